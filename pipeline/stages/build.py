"""Stage 4: make what the target serves."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.config.spec import Spec
from pipeline.stages.base import StageContext
from pipeline.stages.engine_faults import engine_faults


class ReferenceBuildStage:
    """Output: ``engine/``, the checkpoint for the project's own CPU engine, judged and served.

    The same bytes, except that weight-only checkpoints are packed here, as the engine builder would pack them.
    """

    name = "build"
    version = 3
    inputs: tuple[str, ...] = ("convert",)

    def identity(self, spec: Spec) -> Mapping[str, Any]:
        """Return target and limits."""
        return spec.identity_of("build")

    def run(self, context: StageContext) -> None:
        """Pack the checkpoint."""
        from pipeline.checkpoint.hfconfig import load_config
        from pipeline.checkpoint.packing import is_packable, pack_weight_only
        from pipeline.checkpoint.storage import storage_table

        checkpoint, engine = context.inputs["convert"] / "checkpoint", context.out / "engine"
        engine.mkdir()
        if is_packable(load_config(checkpoint / "config.json")):
            pack_weight_only(checkpoint, engine)
        else:
            self._link(context, checkpoint, engine)
        context.facts["storage"] = [dataclasses.asdict(row) for row in storage_table(engine)]

    def _link(self, context: StageContext, checkpoint: Path, engine: Path) -> None:
        from pipeline.store.files import link_or_copy

        files = sorted(checkpoint.iterdir())
        for count, path in enumerate(files, start=1):
            link_or_copy(path, engine / path.name)
            context.progress(count, len(files), "files")

    def check(self, path: Path) -> None:
        """Make sure that the engine accepts the configuration."""
        from pipeline.engines.reference.config import read_config

        with engine_faults():
            read_config(path / "engine")
