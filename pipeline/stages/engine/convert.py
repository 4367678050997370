"""Stage 2 for engines: NVIDIA's converter or quantizer writes the checkpoint, in the release's image."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.config.spec import Spec
from pipeline.errors import SourceError
from pipeline.stages.base import Planned, StageContext, Unresolved
from pipeline.stages.engine.calibration import calibration_digest, prepare_calibration
from pipeline.stages.engine.containers import BuildImage, command_identity, planned, run_command, verified
from pipeline.stages.engine.host_inputs import host_inputs, identities
from pipeline.stages.engine.outputs import check_checkpoint, error_lines
from pipeline.toolchains.command import Command

_SCRATCH = ".calibration"


class EngineConvertStage:
    """Output as that of the native conversion: ``checkpoint/`` and ``tokenizer/``.

    Args:
        spec: The job.
        command: What converts; None when findings stand in the way.
        image: Where.
        resolve: Whether large inputs may be read to identify them.
    """

    name = "convert"
    version = 1
    inputs: tuple[str, ...] = ("fetch",)

    def __init__(self, spec: Spec, command: Command | None, image: BuildImage, *, resolve: bool) -> None:
        self._spec, self._command, self._image, self._resolve = spec, command, image, resolve

    def identity(self, spec: Spec) -> Mapping[str, Any]:
        """Return options, command, image and the digests of what else it reads."""
        command = self._known_command()
        files = identities(host_inputs(spec, command), resolve=self._resolve)
        if spec.calibration is not None and _calibrates(command):
            files["calibration"] = calibration_digest(spec.calibration, resolve=self._resolve)
        return {
            **spec.identity_of("convert"),
            "image": self._image.identity(),
            "command": command_identity(command),
            "files": files,
        }

    def commands(self, spec: Spec) -> tuple[Planned, ...]:
        """Return what a run would start."""
        return (planned(spec, self._command, host_inputs(spec, self._command)),) if self._command else ()

    def run(self, context: StageContext) -> None:
        """Prepare the calibration text, convert, pack the tokenizer."""
        from pipeline.checkpoint import write_tokenizer

        spec, command, source = context.spec, self._known_command(), context.inputs["fetch"] / "model"
        checkpoint = context.out / "checkpoint"
        checkpoint.mkdir()
        hosts = {**host_inputs(spec, command), "model": source, "out": checkpoint}
        scratch = context.out / _SCRATCH
        if spec.calibration is not None and _calibrates(command):
            hosts["calibration"], count = prepare_calibration(spec.calibration, scratch)
            context.facts["calibration"] = {"texts": count, "seq_len": spec.calibration.seq_len}
        tail = run_command(context, command, self._image, hosts)
        if scratch.is_dir():
            (scratch / "train.jsonl").unlink()
            scratch.rmdir()
        verified(tail, error_lines(tail), context.log_path)
        config = self._checked(context.out)
        context.facts["conversion"] = {"by": command.tool, "config": config.get("quantization", {})}
        context.facts["tokenizer"] = dataclasses.asdict(write_tokenizer(source, context.out / "tokenizer"))

    def check(self, path: Path) -> None:
        """Every rank is there and whole."""
        self._checked(path)
        if not (path / "tokenizer" / "tokenizer.json").is_file():
            raise SourceError("the source gave no tokenizer.json")

    def _checked(self, path: Path) -> dict[str, Any]:
        parallel = self._spec.parallel
        return check_checkpoint(path / "checkpoint", tp=parallel.tp, pp=parallel.pp, cp=parallel.cp)

    def _known_command(self) -> Command:
        if self._command is None:
            raise Unresolved("there is no command: see the findings")
        return self._command


def _calibrates(command: Command) -> bool:
    return any(mount.name == "calibration" for mount in command.mounts)
