"""Stage 4: make what the target serves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.config.spec import Spec
from pipeline.stages.base import StageContext
from pipeline.stages.engine_faults import engine_faults


class ReferenceBuildStage:
    """Output: ``engine/``, the checkpoint packed for the project's own CPU engine: same bytes, judged and served."""

    name = "build"
    version = 1
    inputs: tuple[str, ...] = ("convert",)

    def identity(self, spec: Spec) -> Mapping[str, Any]:
        """Return target and limits."""
        return spec.identity_of("build")

    def run(self, context: StageContext) -> None:
        """Pack the checkpoint."""
        from pipeline.store.files import link_or_copy

        checkpoint, engine = context.inputs["convert"] / "checkpoint", context.out / "engine"
        engine.mkdir()
        files = sorted(checkpoint.iterdir())
        for count, path in enumerate(files, start=1):
            link_or_copy(path, engine / path.name)
            context.progress(count, len(files), "files")

    def check(self, path: Path) -> None:
        """Make sure that the engine accepts the configuration."""
        from pipeline.engines.reference.config import read_config

        with engine_faults():
            read_config(path / "engine")
