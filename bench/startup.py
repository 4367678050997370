"""How long the command line takes to answer: `plan` and a `run` in which nothing is to be done.

    python bench/startup.py [--runs 7]

Prints the median wall and processor time of whole processes, and the ratio to Hydra alone (import and one compose),
measured in turn in the same run, so that a busy machine slows both alike. Limits: plan 1.0 s, no-op run 1.2 s.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TINY = Path(__file__).resolve().parents[1] / "tests" / "data" / "models" / "tiny-llama"
HYDRA_ALONE = """
import sys
from hydra import compose, initialize_config_dir
with initialize_config_dir(sys.argv[1], version_base="1.3"):
    compose("config")
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=7)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "conf").mkdir()
        (folder / "conf" / "config.yaml").write_text("a: 1\n")
        job = ["target=reference", "model=hf", "source=local", f"model.path={TINY}", "precision=fp16"]
        pipeline = [sys.executable, "-m", "pipeline"]
        subprocess.run([*pipeline, *job], cwd=folder, check=True, capture_output=True)
        commands = {
            "hydra alone": [sys.executable, "-c", HYDRA_ALONE, str(folder / "conf")],
            "plan": [*pipeline, "plan", "target=reference"],
            "plan, 405B": [
                *pipeline,
                "plan",
                "model=llama3_405b",
                "precision=fp8",
                "parallel=tp8",
                "hardware=h100_80g",
            ],
            "run, all hits": [*pipeline, *job],
        }
        # The folder has a ./conf of Hydra's own kind; ours must not be looked for there.
        work = folder / "work"
        work.mkdir()
        (folder / ".pipeline").rename(work / ".pipeline")
        (folder / "dist").rename(work / "dist")
        samples: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        for _ in range(runs):
            for name, command in commands.items():
                samples[name].append(_once(command, work))
    hydra = statistics.median(wall for wall, _ in samples["hydra alone"])
    print(f"{'':16}{'wall s':>8}{'cpu s':>8}{'÷ hydra':>9}   median of {runs}")
    for name, pairs in samples.items():
        wall, cpu = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"{name:16}{wall:8.2f}{cpu:8.2f}{wall / hydra:9.2f}")


def _once(command: list[str], folder: Path) -> tuple[float, float]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(command, cwd=folder, env=env, capture_output=True, check=False)
    wall = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
