"""Stage 3 for engines: ``trtllm-build`` in the release's image."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.config.spec import Spec
from pipeline.stages.base import Planned, StageContext, Unresolved
from pipeline.stages.engine.containers import BuildImage, command_identity, planned, run_command, verified
from pipeline.stages.engine.host_inputs import host_inputs, identities
from pipeline.stages.engine.outputs import check_engine, error_lines
from pipeline.toolchains.command import Command

TIMING_CACHE = "model.cache"


class EngineBuildStage:
    """Output: ``engine/`` with ``config.json`` and one engine per rank, ``timing_cache/`` for the next build.

    The key covers SM and name of the GPU: another GPU builds again, from the same checkpoint.

    Args:
        spec: The job.
        command: What builds; None when findings stand in the way.
        image: Where.
        resolve: Whether large inputs may be read to identify them.
    """

    name = "build"
    version = 1
    inputs: tuple[str, ...] = ("convert",)

    def __init__(self, spec: Spec, command: Command | None, image: BuildImage, *, resolve: bool) -> None:
        self._spec, self._command, self._image, self._resolve = spec, command, image, resolve

    def identity(self, spec: Spec) -> Mapping[str, Any]:
        """Return limits, GPU, command, image and the digests of what else it reads."""
        command = self._known_command()
        return {
            **spec.identity_of("build"),
            "image": self._image.identity(),
            "command": command_identity(command),
            "files": identities(host_inputs(spec, command), resolve=self._resolve),
        }

    def commands(self, spec: Spec) -> tuple[Planned, ...]:
        """Return what a run would start."""
        return (planned(spec, self._command, host_inputs(spec, self._command)),) if self._command else ()

    def run(self, context: StageContext) -> None:
        """Build, then look at what came out."""
        spec, command = context.spec, self._known_command()
        engine = context.out / "engine"
        engine.mkdir()
        hosts = {
            **host_inputs(spec, command),
            "checkpoint": context.inputs["convert"] / "checkpoint",
            "out": engine,
        }
        tail = run_command(context, command, self._image, hosts)
        verified(tail, error_lines(tail), context.log_path)
        config = self._checked(context.out)
        if (engine / TIMING_CACHE).is_file():
            (context.out / "timing_cache").mkdir()
            (engine / TIMING_CACHE).rename(context.out / "timing_cache" / TIMING_CACHE)
        context.facts["engine"] = {"version": config["version"], "ranks": spec.parallel.world_size}

    def check(self, path: Path) -> None:
        """Every rank is there, and the release is the one that was asked for."""
        self._checked(path)

    def _checked(self, path: Path) -> dict[str, Any]:
        spec = self._spec
        return check_engine(path / "engine", ranks=spec.parallel.world_size, release=spec.toolchain.release)

    def _known_command(self) -> Command:
        if self._command is None:
            raise Unresolved("there is no command: see the findings")
        return self._command
