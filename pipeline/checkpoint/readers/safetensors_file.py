"""Read the header of a safetensors file and check it against the file, before any weight is touched."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.checkpoint.dtypes import from_code, itemsize
from pipeline.checkpoint.readers.base import TensorInfo, WeightFile, refuse_placeholder
from pipeline.errors import SourceError

# The format's own limit on the header.
_HEADER_LIMIT = 100_000_000


def read_safetensors_header(path: Path) -> WeightFile:
    """Read and verify the header: types known, data contiguous, length as announced.

    Raises:
        SourceError: Names the file, and the tensor where one is to blame.
    """
    refuse_placeholder(path)
    size = path.stat().st_size
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8:
            raise SourceError(f"{path}: is no safetensors file ({size} bytes; its header alone takes 8 or more)")
        if length > _HEADER_LIMIT:
            raise SourceError(f"{path}: is no safetensors file (header of {length} bytes announced)")
        text = stream.read(length)
    if len(text) < length:
        raise _truncated(path, size, 8 + length)
    try:
        header = json.loads(text, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path}: is no safetensors file (its header cannot be read: {error})") from error
    if not isinstance(header, dict):
        raise SourceError(f"{path}: is no safetensors file (header is no JSON object)")
    header.pop("__metadata__", None)
    tensors: dict[str, TensorInfo] = {}
    offsets: dict[str, int] = {}
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: _begin(path, *item)):
        info, begin = _tensor(path, name, entry)
        if begin != end:
            raise SourceError(f"{path}: {name}: data begins at byte {begin}; expected {end} (overlap or hole)")
        end = begin + info.nbytes
        tensors[name] = info
        offsets[name] = 8 + length + begin
    if size != 8 + length + end:
        raise _truncated(path, size, 8 + length + end)
    return WeightFile(tensors, offsets)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object; of a tensor that is named twice, Python's reader would keep the last without a word."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} is there twice")
    return found


def _begin(path: Path, name: str, entry: Any) -> tuple[int, int]:
    try:
        begin, end = entry["data_offsets"]
        return int(begin), int(end)
    except (KeyError, TypeError, ValueError):
        raise SourceError(f"{path}: {name}: header has no data_offsets; the file is damaged") from None


def _tensor(path: Path, name: str, entry: Mapping[str, Any]) -> tuple[TensorInfo, int]:
    begin, end = _begin(path, name, entry)
    dtype = from_code(str(entry.get("dtype")))
    if dtype is None:
        raise SourceError(f"{path}: {name}: has the unknown type {entry.get('dtype')!r}")
    shape = entry.get("shape")
    if not isinstance(shape, list) or not all(isinstance(n, int) and n >= 0 for n in shape):
        raise SourceError(f"{path}: {name}: has the shape {shape!r}; expected a list of whole numbers")
    nbytes = math.prod(shape) * itemsize(dtype)
    if end - begin != nbytes:
        raise SourceError(f"{path}: {name}: takes {end - begin} bytes; expected {nbytes} for {dtype} {shape}")
    return TensorInfo(name, tuple(shape), dtype, path, nbytes), begin


def _truncated(path: Path, size: int, expected: int) -> SourceError:
    if size < expected:
        return SourceError(
            f"{path}: has {size} bytes, its header announces {expected}: the file is truncated",
            hint=f"{expected - size} bytes are missing; fetch the file again",
        )
    return SourceError(f"{path}: has {size} bytes, its header announces {expected}: {os.fspath(path.name)} is damaged")
