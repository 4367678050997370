"""The stages of a job, one file each."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.config.spec import Spec
    from pipeline.stages.base import Stage


def all_stages(spec: Spec, *, resolve: bool) -> list[Stage]:
    """Return the graph of a job.

    Args:
        spec: The job.
        resolve: Whether finding out what the source is may read large files or ask the network: a run may, a plan not.
    """
    if spec.target.resolved == "engine":
        return _engine_stages(spec, resolve=resolve)
    from pipeline.stages.baseline import BaselineStage
    from pipeline.stages.build import ReferenceBuildStage
    from pipeline.stages.convert import ConvertStage
    from pipeline.stages.emit import EmitStage
    from pipeline.stages.fetch import FetchStage
    from pipeline.stages.validate import ValidateStage
    from pipeline.stages.verify import VerifyStage

    return [
        FetchStage(spec, resolve=resolve),
        ConvertStage(),
        ReferenceBuildStage(),
        BaselineStage(),
        ValidateStage(),
        EmitStage(),
        VerifyStage(),
    ]


def _engine_stages(spec: Spec, *, resolve: bool) -> list[Stage]:
    """Return the graph of an engine: what NVIDIA's tools make, as far as this version goes."""
    from pipeline.stages.convert import ConvertStage
    from pipeline.stages.engine.build import EngineBuildStage
    from pipeline.stages.engine.containers import BuildImage
    from pipeline.stages.engine.convert import EngineConvertStage
    from pipeline.stages.fetch import FetchStage
    from pipeline.toolchains.from_spec import tool_plan

    commands, image = tool_plan(spec).commands, BuildImage(spec, resolve=resolve)
    convert: Stage = ConvertStage()
    if spec.converter.resolved == "nvidia":
        convert = EngineConvertStage(spec, commands.get("convert"), image, resolve=resolve)
    return [
        FetchStage(spec, resolve=resolve),
        convert,
        EngineBuildStage(spec, commands.get("build"), image, resolve=resolve),
    ]
