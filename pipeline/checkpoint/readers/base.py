"""What every reader offers: tensors as matrices, read by rows, under their Hugging Face names.

A tensor of any rank is seen as a matrix: leading dimensions flattened into rows, the last one as columns; a vector
is one column. So a bias can be cut by the same rows as its weight.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pipeline.checkpoint.dtypes import Array, itemsize, numpy_dtype
from pipeline.errors import SourceError


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of a source.

    Attributes:
        name: Hugging Face name.
        shape: As in Hugging Face, rows (outputs) first.
        dtype: Type that ``read`` returns.
        file: File that holds it.
        nbytes: Bytes it takes in that file.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    nbytes: int

    @property
    def rows(self) -> int:
        """Rows of the tensor seen as a matrix."""
        return math.prod(self.shape[:-1]) if len(self.shape) > 1 else math.prod(self.shape)

    @property
    def cols(self) -> int:
        """Columns of the tensor seen as a matrix."""
        return self.shape[-1] if len(self.shape) > 1 else 1


@dataclass(frozen=True, slots=True)
class WeightFile:
    """What the header of a weight file says.

    Attributes:
        tensors: Name to tensor.
        offsets: Name to the byte position of its data in the file.
    """

    tensors: Mapping[str, TensorInfo]
    offsets: Mapping[str, int]


class TensorSource(Protocol):
    """A model on disk. Opening it verifies all headers; reading is thread-safe and never maps files into memory."""

    path: Path
    kind: str
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    ignored_files: Mapping[str, str]
    warnings: tuple[str, ...]

    def read(self, name: str, start: int, stop: int, first: int = 0, last: int | None = None) -> Array:
        """Return rows [start, stop) and columns [first, last) of a tensor: [stop - start, last - first], its dtype.

        Raises:
            SourceError: The file ends early or cannot be read; names file and tensor.
        """

    def weight_files(self) -> tuple[Path, ...]:
        """Return the files that hold the weights, in a fixed order."""

    def close(self) -> None:
        """Close all files."""


class OpenFiles:
    """File descriptors, opened once, for positioned reads from several threads."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}

    def add(self, path: Path) -> None:
        """Open a file for reading."""
        if path not in self._descriptors:
            self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def fill(self, path: Path, buffer: Array, offset: int, what: str) -> None:
        """Fill a contiguous array from a file position.

        Raises:
            SourceError: The file ends before the array is full.
        """
        view = memoryview(buffer.reshape(-1).view(np.uint8).data)
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._descriptors[path], [view[done:]], offset + done)
            except OSError as error:
                raise SourceError(f"{path}: {what}: cannot be read ({error})") from error
            if count == 0:
                size = os.fstat(self._descriptors[path]).st_size
                raise SourceError(
                    f"{path}: {what}: file ends at byte {size}; expected {offset + len(view)} or more",
                    hint="the file is truncated or was changed while it was read; fetch it again",
                )
            done += count

    def close(self) -> None:
        """Close all of them."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


def read_matrix(
    files: OpenFiles, info: TensorInfo, offset: int, rows: tuple[int, int], columns: tuple[int, int]
) -> Array:
    """Read a block of a plain row-major tensor that begins at a file position."""
    (start, stop), (first, last) = rows, columns
    size = itemsize(info.dtype)
    out = np.empty((stop - start, last - first), numpy_dtype(info.dtype))
    if (first, last) == (0, info.cols):
        files.fill(info.file, out, offset + start * info.cols * size, info.name)
    else:
        for row in range(start, stop):
            files.fill(info.file, out[row - start], offset + (row * info.cols + first) * size, info.name)
    return out


def refuse_placeholder(path: Path) -> None:
    """Refuse what often stands where weights should be: a Git-LFS pointer, an HTML page, nothing.

    Raises:
        SourceError: Names the file and the likely reason.
    """
    try:
        with path.open("rb") as stream:
            head = stream.read(64)
    except OSError as error:
        raise SourceError(f"{path}: cannot be read ({error.strerror or error})") from error
    if not head:
        raise SourceError(f"{path}: is empty", hint="the download did not finish; fetch it again")
    if head.startswith(b"version https://git-lfs"):
        raise SourceError(
            f"{path}: is a Git-LFS pointer text, not the weights",
            hint="run 'git lfs pull' in the clone, or fetch the model from the hub",
        )
    if head.lstrip().lower().startswith((b"<!doctype", b"<html")):
        raise SourceError(f"{path}: is an HTML page, not weights", hint="the download was redirected; fetch it again")
