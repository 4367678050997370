"""The ``transformers`` baseline of any model folder: in this process, or in another interpreter that has torch."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from pipeline.errors import PipelineError, PreflightError
from pipeline.gate.available import transformers_available
from pipeline.gate.baseline import Baseline, load_baseline, save_baseline
from pipeline.gate.protocol import Protocol, shipped_text
from pipeline.gate.scoring import Progress
from pipeline.gate.tasks import load_task
from pipeline.gate.tokenizer import GateTokenizer
from pipeline.gate.transformers_engine import TransformersEngine
from pipeline.gate.witness import TOP_K, take_baseline

# (argv, environment, called with every line of output); raises when the program fails.
RunProgram = Callable[[Sequence[str], Mapping[str, str], Callable[[str], None]], object]
NAME = "baseline"
_PROGRESS = "progress "


def transformers_baseline(
    model: Path,
    out: Path,
    *,
    source_digest: str,
    protocol: Protocol,
    interpreter: str | None = None,
    run_program: RunProgram | None = None,
    tasks: Sequence[Path] = (),
    text: str | None = None,
    progress: Progress | None = None,
) -> Baseline:
    """Let transformers answer for the source weights and write the result to ``out``.

    Args:
        model: Hugging Face folder with tokenizer.
        out: Gets ``baseline.json`` and ``baseline.safetensors``.
        source_digest: Of the weights in ``model``.
        protocol: What to run.
        interpreter: Python with torch and transformers; None means this one.
        run_program: Starts it (``pipeline.runners.process.run``, bound); needed with ``interpreter``.
        tasks: Multiple-choice jsonl files.
        text: Evaluation text; None for the shipped one.
        progress: Called with done, total, unit.

    Raises:
        PreflightError: No interpreter with transformers.
        SourceError: The model cannot be loaded or says nothing.
        ToolError: The other interpreter failed.
    """
    if interpreter is None:
        if not transformers_available():
            raise PreflightError(
                "gate.baseline=transformers: this interpreter has no torch and transformers",
                hint="install the extra 'oracle', or point gate.baseline_python at an interpreter that has it",
            )
        return _make(model, out, source_digest, protocol, tasks, text or shipped_text(), progress)
    if run_program is None:
        raise PreflightError(f"gate.baseline_python={interpreter}: nothing here may start a program")
    out.mkdir(parents=True, exist_ok=True)
    request = out / "request.json"
    request.write_text(
        json.dumps(
            {
                "model": str(model.resolve()),
                "out": str(out.resolve()),
                "source_digest": source_digest,
                "protocol": protocol.to_json(),
                "tasks": [str(path.resolve()) for path in tasks],
                "text": text,
            }
        ),
        encoding="utf-8",
    )
    # The other interpreter sees this package's sources only: what runs there needs numpy and what it brings itself.
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    program = "import sys; from pipeline.gate.oracle import main; sys.exit(main(sys.argv[1:]))"
    run_program([interpreter, "-c", program, str(request)], environment, _reader(progress))
    request.unlink()
    return load_baseline(out / f"{NAME}.json")


def _reader(progress: Progress | None) -> Callable[[str], None]:
    """Turn ``progress 10 2047 tokens`` lines back into calls."""

    def read(line: str) -> None:
        if progress is not None and line.startswith(_PROGRESS):
            done, total, unit = line[len(_PROGRESS) :].split(" ", 2)
            progress(float(done), float(total), unit)

    return read


def _make(
    model: Path,
    out: Path,
    source_digest: str,
    protocol: Protocol,
    tasks: Sequence[Path],
    text: str,
    progress: Progress | None,
) -> Baseline:
    tokenizer = GateTokenizer.load(model)
    engine = TransformersEngine(model, checkpoint_digest=source_digest)
    baseline = take_baseline(
        engine,
        kind="transformers",
        source_digest=source_digest,
        tokenizer_digest=tokenizer.digest,
        protocol=protocol,
        token_ids=tokenizer.text_ids(text, protocol),
        prompts=tokenizer.prompts(),
        decode=tokenizer.decode,
        end_ids=tokenizer.end_ids,
        tasks=[load_task(path, tokenizer.encode) for path in tasks],
        top_k=TOP_K,
        bos_id=tokenizer.bos_id,
        versions={**engine.versions, "python": platform.python_version(), "numpy": np.__version__},
        made_by="pipeline.gate.oracle",
        progress=progress,
    )
    save_baseline(baseline, out, NAME)
    return load_baseline(out / f"{NAME}.json")


def main(argv: Sequence[str]) -> int:
    """Run inside the other interpreter: read a request file, write the baseline beside it."""
    parser = argparse.ArgumentParser(prog="transformers-baseline")
    parser.add_argument("request", type=Path)
    request = json.loads(parser.parse_args(argv).request.read_text(encoding="utf-8"))

    def progress(done: float, total: float | None, unit: str) -> None:
        print(f"{_PROGRESS}{done:g} {total or 0:g} {unit}", flush=True)

    try:
        _make(
            Path(request["model"]),
            Path(request["out"]),
            request["source_digest"],
            Protocol(**request["protocol"]),
            [Path(path) for path in request["tasks"]],
            request["text"] or shipped_text(),
            progress,
        )
    except PipelineError as error:
        print(f"{error.message}\n{error.hint}".rstrip(), file=sys.stderr)
        return int(error.exit_code)
    return 0
