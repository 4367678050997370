"""A job of three stages that kills its own process at a given point; started by the tests beside it.

Usage: toy_job.py STORE OUTPUT POINT. Prints one JSON document when it gets to its end.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pipeline.errors import PipelineError
from pipeline.graph import export
from pipeline.graph.run import run
from pipeline.runners.process import run as run_program
from pipeline.stages.base import StageContext
from pipeline.store import files
from pipeline.store.store import Store

ROOT, OUTPUT, POINT = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
PAUSE_S = float(os.environ.get("TOY_PAUSE_S", "0"))
OUTPUT_BYTES = int(os.environ.get("TOY_BYTES", "1000"))


def die() -> bool:
    os.kill(os.getpid(), signal.SIGKILL)
    return True


class ToyStage:
    version = 1

    def __init__(self, name: str, *inputs: str) -> None:
        self.name, self.inputs = name, inputs

    def identity(self, spec: Any) -> Mapping[str, Any]:
        return {"bytes": OUTPUT_BYTES}

    def run(self, context: StageContext) -> None:
        if "TOY_RUNS" in os.environ:
            with Path(os.environ["TOY_RUNS"]).open("a") as file:
                file.write(f"{self.name}\n")
        (context.out / "half").write_bytes(b"x" * OUTPUT_BYTES)
        if point(f"in {self.name}"):
            die()
        if point(f"program in {self.name}"):
            run_program(["sh", "-c", f"echo $$ > {OUTPUT}.pid; sleep 60; true"], log_path=context.log_path)
        time.sleep(PAUSE_S)
        (context.out / "folder").mkdir()
        for name, path in context.inputs.items():
            files.link_or_copy(path / "half", context.out / "folder" / name)
        (context.out / "name").write_text(self.name)

    def check(self, path: Path) -> None:
        (path / "name").read_text()


def point(name: str) -> bool:
    return name == POINT


def before(owner: Any, name: str, act: Callable[..., object]) -> None:
    """Let ``act`` happen before every call of a function of ours."""
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        act(*args)
        return original(*args, **kwargs)

    setattr(owner, name, call)


def is_of(stage: str, *args: Any) -> bool:
    return getattr(getattr(args[-1], "document", None), "stage", "") == stage


def half_a_record(path: Path, data: bytes) -> None:
    if path.suffix == ".json" and b'"stage": "convert"' in data:
        path.with_name(f".{path.name}.0.tmp").write_bytes(data[: len(data) // 2])
        die()


def second_record(path: Path, data: bytes) -> None:
    if path.suffix == ".json" and b'"stage": "convert"' in data and json.loads(data)["body"]["key"] == path.stem:
        die()


def arm() -> None:
    if point("before rename"):
        before(files, "make_read_only", lambda folder: (folder / "folder" / "fetch").exists() and die())
    elif point("between rename and record"):
        before(Store, "_commit", lambda *args: is_of("convert", *args) and die())
    elif point("while the record is written"):
        before(files, "write_atomic", half_a_record)
    elif point("between the two records"):
        before(files, "write_atomic", second_record)
    elif point("after the record"):
        before(Store, "note_use", lambda store, job, stage, key: stage == "convert" and die())
    elif point("while files are exported"):
        before(files, "copy_file", lambda source, target: target.name == "name" and die())
    elif point("before the export is swapped"):
        before(export, "_exchange", lambda *args: die())
        before(Path, "rename", lambda self, target: ".new-" in self.name and die())
    elif point("between the renames of an export"):
        export._exchange = lambda first, second: False
        before(Path, "rename", lambda self, target: ".new-" in self.name and OUTPUT.name == target.name and die())
    elif point("after the export is swapped"):
        before(export, "_retire", lambda *args: die())
    elif point("without locks"):
        Store.building = lambda self, key, on_wait=None: contextlib.nullcontext()  # type: ignore[assignment,method-assign,return-value]


def main() -> int:
    arm()
    if barrier := os.environ.get("TOY_BARRIER"):
        while not Path(barrier).exists():
            time.sleep(0.001)
    stages = [ToyStage("fetch"), ToyStage("convert", "fetch"), ToyStage("emit", "fetch", "convert")]
    spec: Any = SimpleNamespace(name="toy")
    try:
        result = run(spec, stages, Store(ROOT))
        done = export.export_tree(result.artefact("emit"), OUTPUT)
    except PipelineError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return int(error.exit_code)
    print(
        json.dumps(
            {
                "hits": [name for name, stage in result.stages.items() if stage.hit],
                "reasons": {name: stage.reason for name, stage in result.stages.items()},
                "artefacts": {name: stage.record.artefact for name, stage in result.stages.items()},
                "export": done.status,
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
