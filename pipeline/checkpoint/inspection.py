"""Look at a source without converting it: every header is verified and the books are closed; no weight is read."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.checkpoint.options import ConvertOptions
from pipeline.checkpoint.planning import plan_conversion
from pipeline.checkpoint.readers import open_source


@dataclass(frozen=True, slots=True)
class SourceSummary:
    """What a source holds.

    Attributes:
        kind: ``safetensors``, ``torch`` or ``gguf``.
        architecture: Model class.
        family: Family table that covers it.
        parameters: Values in all tensors.
        tensors: Number of tensors.
        bytes: Bytes of all tensors on disk.
        dtypes: Type to number of tensors.
        files: Weight file to its size in bytes.
        ignored_files: Weight files that are not read, and why.
        ignored_tensors: Tensors that need no place in a checkpoint, and why.
        warnings: What a reader should know.
    """

    path: Path
    kind: str
    architecture: str
    family: str
    parameters: int
    tensors: int
    bytes: int
    dtypes: Mapping[str, int]
    files: Mapping[str, int]
    ignored_files: Mapping[str, str]
    ignored_tensors: Mapping[str, str]
    warnings: tuple[str, ...]


def inspect_source(path: Path) -> SourceSummary:
    """Verify a source and summarise it, in a time that does not depend on its size.

    Raises:
        SourceError: A file is missing, truncated, a placeholder, or of the wrong kind; a tensor is missing, left
        over, of
            the wrong shape or type. Names file, tensor and the likely reason.
    """
    source = open_source(path)
    try:
        plan = plan_conversion(source, ConvertOptions())
    finally:
        source.close()
    infos = source.tensors.values()
    return SourceSummary(
        path=path,
        kind=source.kind,
        architecture=plan.architecture.name,
        family=plan.family.name,
        parameters=sum(math.prod(info.shape) for info in infos),
        tensors=len(source.tensors),
        bytes=sum(info.nbytes for info in infos),
        dtypes=dict(Counter(info.dtype for info in infos)),
        files={file.name: file.stat().st_size for file in source.weight_files()},
        ignored_files=dict(source.ignored_files),
        ignored_tensors=dict(plan.ignored_tensors),
        warnings=plan.warnings,
    )
