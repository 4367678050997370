"""Stage 1: get the model's files, verified, into the store."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.config.spec import Spec
from pipeline.errors import SourceError
from pipeline.stages.base import StageContext
from pipeline.stages.sources import named_as_given, open_model_source


class FetchStage:
    """Output: ``model/`` with configuration, weights, tokenizer and licence."""

    name = "fetch"
    version = 1
    inputs: tuple[str, ...] = ()

    def __init__(self, spec: Spec, *, resolve: bool) -> None:
        """Prepare.

        Args:
            spec: The job.
            resolve: Whether finding out what the source is may read large files or ask the network.
        """
        self._spec = spec
        self._source = open_model_source(spec)
        self._resolve = resolve

    def identity(self, spec: Spec) -> Mapping[str, Any]:
        """Return what pins the content of the source."""
        return self._source.identity(resolve=self._resolve)

    def run(self, context: StageContext) -> None:
        """Fetch."""
        self._source.fetch(context)

    def check(self, path: Path) -> None:
        """Damaged and missing files are found here, within seconds, not while converting."""
        from pipeline.checkpoint import inspect_source

        if not (path / "model").is_dir():
            raise SourceError("the source gave no files")
        with named_as_given(self._spec, path / "model"):
            inspect_source(path / "model")
