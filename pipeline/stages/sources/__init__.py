"""Where a model comes from: a pinned wheel, the hub, or a local folder or file. One module per kind, one seam."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from pipeline.config.spec import Spec
from pipeline.errors import PipelineError
from pipeline.stages.base import StageContext


class ModelSource(Protocol):
    """One way to get a model."""

    def identity(self, *, resolve: bool) -> Mapping[str, Any]:
        """Return what pins the content.

        Args:
            resolve: May read large files or ask the network to find out.

        Raises:
            Unresolved: It is not known and ``resolve`` is False.
            SourceError: It cannot be found out.
        """

    def fetch(self, context: StageContext) -> None:
        """Put the model's files into ``context.out / "model"`` and what was used into ``context.facts``.

        Raises:
            SourceError: A file is missing, damaged or not accessible.
        """


def open_model_source(spec: Spec) -> ModelSource:
    """Return the source that the job names."""
    from pipeline.stages.sources.hub import HubSource
    from pipeline.stages.sources.local import LocalSource
    from pipeline.stages.sources.wheel import WheelSource

    kinds: dict[str, Callable[[Spec], ModelSource]] = {"wheel": WheelSource, "hub": HubSource, "local": LocalSource}
    return kinds[spec.source.kind](spec)


@contextmanager
def named_as_given(spec: Spec, copy: Path) -> Iterator[None]:
    """In errors about our copy of the source, name the files as the user knows them.

    Args:
        spec: The job, which says where the source is.
        copy: Folder of the copy.
    """
    try:
        yield
    except PipelineError as error:
        origin = _origin(spec)
        error.message = error.message.replace(str(copy), origin)
        error.args = (error.message,)
        error.findings = tuple(
            replace(f, path=f.path.replace(str(copy), origin), message=f.message.replace(str(copy), origin))
            for f in error.findings
        )
        raise


def _origin(spec: Spec) -> str:
    source = spec.source
    if source.kind == "local":
        path = Path(source.path)
        return str(path.parent if path.is_file() else path)
    return source.wheel.requirement if source.wheel else source.id
