"""Parse the header of a GGUF file: metadata and tensor table, bounded by the file's length.

Source: the GGUF specification, version 3 (little-endian). Written out here, not taken from a memory-mapping reader, so
that memory stays bounded and a truncated file gives an error that names it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pipeline.checkpoint.readers.base import refuse_placeholder
from pipeline.errors import SourceError

# Value type -> struct code.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32
_DEPTH = 4  # of arrays in arrays; no known key has any


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """An entry of the tensor table.

    Attributes:
        shape: Rows first (the file stores it reversed).
        type: GGML type number.
        offset: Position of the data in the file.
    """

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata and tensors of a GGUF file."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


class _Reader:
    def __init__(self, stream: BinaryIO, path: Path, size: int) -> None:
        self.stream = stream
        self.path = path
        self.size = size

    def take(self, count: int) -> bytes:
        if count > self.size - self.stream.tell():
            raise SourceError(
                f"{self.path}: ends inside its header at {self.size} bytes: the file is truncated",
                hint="fetch the file again",
            )
        return self.stream.read(count)

    def unpack(self, code: str, count: int = 1) -> tuple[Any, ...]:
        layout = f"<{count}{code}"
        return struct.unpack(layout, self.take(struct.calcsize(layout)))

    def text(self) -> str:
        return self.take(int(self.unpack("Q")[0])).decode("utf-8", errors="surrogateescape")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.unpack(_SCALARS[kind])[0]
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            element, count = self.unpack("I")[0], self.unpack("Q")[0]
            if count > self.size or depth > _DEPTH:
                what = f"an array of {count} values" if count > self.size else f"arrays nested over {_DEPTH} deep"
                raise SourceError(f"{self.path}: {what} in the header; the file is damaged")
            if element in _SCALARS:
                return list(self.unpack(_SCALARS[element], count))
            return [self.value(element, depth + 1) for _ in range(count)]
        raise SourceError(f"{self.path}: metadata value of unknown type {kind}; the file is damaged or newer")


def read_gguf_header(path: Path) -> GgufHeader:
    """Read metadata and tensor table.

    Raises:
        SourceError: The file is truncated inside the header, no GGUF, or of a version other than 2 or 3.
    """
    refuse_placeholder(path)
    with path.open("rb", buffering=1 << 20) as stream:
        reader = _Reader(stream, path, path.stat().st_size)
        if reader.take(4) != b"GGUF":
            raise SourceError(f"{path}: is no GGUF file")
        version = reader.unpack("I")[0]
        if version not in (2, 3):
            raise SourceError(f"{path}: is GGUF version {version}; expected 2 or 3 (little-endian)")
        tensor_count, value_count = reader.unpack("Q", 2)
        metadata: dict[str, Any] = {}
        for _ in range(value_count):
            key = reader.text()
            metadata[key] = reader.value(reader.unpack("I")[0])
        table = []
        for _ in range(tensor_count):
            name = reader.text()
            dimensions = reader.unpack("I")[0]
            if dimensions > 8:
                raise SourceError(f"{path}: {name} has {dimensions} dimensions; the file is damaged")
            shape = tuple(reversed(reader.unpack("Q", dimensions)))
            table.append((name, shape, *reader.unpack("I"), *reader.unpack("Q")))
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if isinstance(alignment, bool) or not isinstance(alignment, int) or alignment < 1:
            raise SourceError(f"{path}: general.alignment is {alignment!r}; expected a whole number from 1")
        start = math.ceil(stream.tell() / alignment) * alignment
    return GgufHeader(metadata, {name: GgufTensor(name, shape, kind, start + at) for name, shape, kind, at in table})
