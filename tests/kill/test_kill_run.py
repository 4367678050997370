"""A kill at any moment loses nothing that was finished and publishes nothing that was not."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.store.digest import list_tree, tree_digest
from pipeline.store.inspect import verify
from pipeline.store.store import Store

SCRIPT = Path(__file__).with_name("toy_job.py")
STAGES = ["fetch", "convert", "emit"]


class Job:
    """Starts the toy job in processes of its own."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(folder / "store")
        self.output = folder / "dist" / "toy"
        self.runs = folder / "runs"

    def start(self, point: str = "", **env: str) -> subprocess.Popen[str]:
        argv = [sys.executable, str(SCRIPT), str(self.store.root), str(self.output), point]
        environment = {**os.environ, "TOY_RUNS": str(self.runs), **env}
        return subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def run(self, point: str = "", **env: str) -> dict[str, Any]:
        """Run to the end and return what the job printed."""
        return finish(self.start(point, **env))

    def kill(self, point: str, **env: str) -> None:
        """Run until the job kills itself at a point."""
        with self.start(point, **env) as process:
            _, errors = process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL, errors

    def check(self) -> None:
        """The store is sound, nothing is left over, and the export is what the store says."""
        assert verify(self.store) == []
        assert list((self.store.root / "staging").iterdir()) == []
        assert [path.name for path in self.output.parent.iterdir()] == [self.output.name]
        (self.output / ".export.json").unlink()
        record = self.store.latest("toy", "emit")
        assert record and tree_digest(list_tree(self.output)) == record.artefact


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    with process:
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    result: dict[str, Any] = json.loads(output)
    return result


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


@pytest.mark.parametrize("stage", STAGES)
def test_kill_inside_a_stage_keeps_the_stages_before_it(job: Job, stage: str) -> None:
    job.kill(f"in {stage}")
    assert job.run()["hits"] == STAGES[: STAGES.index(stage)]
    job.check()


@pytest.mark.parametrize(
    ("point", "hits"),
    [
        ("before rename", ["fetch"]),
        ("between rename and record", ["fetch"]),
        ("while the record is written", ["fetch"]),
        # Found by the content of its input.
        ("between the two records", ["fetch", "convert"]),
        ("after the record", ["fetch", "convert"]),
        ("while files are exported", STAGES),
        ("before the export is swapped", STAGES),
    ],
)
def test_kill_while_publishing_keeps_what_was_committed(job: Job, point: str, hits: list[str]) -> None:
    job.kill(point)
    assert verify(job.store) == []
    result = job.run()
    assert result["hits"] == hits
    assert result["export"] == "written"
    job.check()


@pytest.mark.parametrize(
    "point",
    [
        "while files are exported",
        "before the export is swapped",
        "between the renames of an export",
        "after the export is swapped",
    ],
)
def test_kill_while_an_export_is_replaced_leaves_the_old_or_the_new(job: Job, point: str) -> None:
    job.run(TOY_BYTES="10")
    job.kill(point)
    if point != "between the renames of an export":
        assert (job.output / "half").stat().st_size in (10, 1000)
    assert job.run()["hits"] == STAGES
    assert (job.output / "half").stat().st_size == 1000
    job.check()


def test_kill_ends_the_program_a_stage_had_started(job: Job) -> None:
    pid_file = Path(f"{job.output}.pid")
    pid_file.parent.mkdir()
    with job.start("program in convert") as process:
        deadline = time.monotonic() + 30
        while not (pid_file.exists() and pid_file.read_text().endswith("\n")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.kill()
    status = Path("/proc", pid_file.read_text().strip(), "cmdline")
    while status.exists() and status.read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    pid_file.unlink()
    assert job.run()["hits"] == ["fetch"]
    job.check()


def test_kills_at_random_times_never_harm(job: Job) -> None:
    seed = 20240607
    rng = random.Random(seed)
    done: set[str] = set()
    for _ in range(8):
        with job.start(TOY_PAUSE_S="0.1") as process:
            time.sleep(rng.uniform(0.15, 0.6))
            process.kill()
        assert verify(job.store) == []
        now = {stage for stage in STAGES if job.store.latest("toy", stage)}
        assert now >= done, "what was finished stays finished"
        done = now
    assert set(job.run()["hits"]) >= done
    job.check()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "term"])
def test_signals_clean_up_at_once(job: Job, number: signal.Signals) -> None:
    with job.start(TOY_PAUSE_S="30") as process:
        deadline = time.monotonic() + 30
        while not job.runs.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(number)
        process.communicate(timeout=20)
    assert process.returncode != 0
    assert list((job.store.root / "staging").iterdir()) == []
    assert verify(job.store) == []


@pytest.mark.parametrize("point", ["", "without locks"], ids=["locks", "no locks"])
def test_processes_racing_for_one_key_all_end_right(job: Job, tmp_path: Path, point: str) -> None:
    barrier = tmp_path / "go"
    racers = [job.start(point, TOY_BARRIER=str(barrier), TOY_PAUSE_S="0.05") for _ in range(3)]
    time.sleep(0.3)  # all are waiting; the exact time does not matter
    barrier.touch()
    results = [finish(racer) for racer in racers]
    assert results[0]["artefacts"] == results[1]["artefacts"] == results[2]["artefacts"]
    runs = job.runs.read_text().split()
    if point == "":
        # Locks save work; without them every process does it, and the result is the same.
        assert sorted(runs) == sorted(STAGES)
    assert job.run()["hits"] == STAGES
    job.check()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    argv = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    if os.getuid() != 0 or subprocess.run(argv, capture_output=True).returncode != 0:
        pytest.skip("file systems can be mounted by root only; a limit of file size is tested elsewhere")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def fill(disk: Path, free: int) -> None:
    """Leave ``free`` bytes on a file system."""
    with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    os.truncate(disk / "filler", (disk / "filler").stat().st_size - free)


def test_full_disk_keeps_finished_stages_and_the_next_run_goes_on(small_disk: Path, tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.store = Store(small_disk / "store")
    with job.start(TOY_BYTES="400000") as process:  # the third stage does not fit
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 6, errors
    assert errors.startswith("StoreError: cannot write ") and "No space left" in errors and "free)" in errors
    assert verify(job.store) == []
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    assert job.run(TOY_BYTES="400000")["hits"] == ["fetch", "convert"]
    job.check()


@pytest.mark.parametrize("free_kib", [0, 4, 12, 20, 28, 36, 44, 52])
def test_disk_that_fills_at_any_step_leaves_a_sound_store(small_disk: Path, tmp_path: Path, free_kib: int) -> None:
    # Every file of a run takes one page, so each amount ends at another step: folders, logs, files, records, pointers.
    job = Job(tmp_path)
    job.store = Store(small_disk / "store")
    fill(small_disk, free_kib << 10)
    with job.start() as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 6, errors
    assert "No space left" in errors and "Traceback" not in errors
    assert verify(job.store) == []
    done = [stage for stage in STAGES if job.store.latest("toy", stage)]
    (small_disk / "filler").unlink()
    assert set(job.run()["hits"]) >= set(done)
    job.check()
