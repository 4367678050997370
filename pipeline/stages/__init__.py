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
