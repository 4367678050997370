"""Write safetensors files tensor by tensor, in any order, from several threads.

The header is fixed first, so each tensor has its place before any data is there: the bytes do not depend on the
order of writing. A file has its name only when it is whole and on disk.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.checkpoint.dtypes import Array, code_of, itemsize
from pipeline.errors import StoreError

PARTIAL = ".partial"


class SafetensorsWriter:
    """A safetensors file under construction.

    Bytes that nobody writes are zero. Without metadata, as NVIDIA's converter writes it.
    """

    def __init__(self, path: Path, tensors: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
        """Reserve the file.

        Args:
            path: Final name; the file is called ``{path}.partial`` until :meth:`finish`.
            tensors: Name to shape and type.

        Raises:
            StoreError: The file cannot be created, or the disk is full.
        """
        self.path = path
        self._partial = path.with_name(path.name + PARTIAL)
        # Largest alignment first, then by name: the order of the safetensors library, which keeps data aligned.
        ordered = sorted(tensors.items(), key=lambda item: (-itemsize(item[1][1]), item[0]))
        header: dict[str, Any] = {}
        end = 0
        begins: dict[str, int] = {}
        for name, (shape, dtype) in ordered:
            begins[name] = end
            end += math.prod(shape) * itemsize(dtype)
            header[name] = {"dtype": code_of(dtype), "shape": list(shape), "data_offsets": [begins[name], end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        start = 8 + len(text)
        self._offsets = {name: start + begin for name, begin in begins.items()}
        self.nbytes = end
        try:
            self._descriptor = os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            self._put(len(text).to_bytes(8, "little") + text, 0)
            os.ftruncate(self._descriptor, start + end)
        except OSError as error:
            raise _write_error(self._partial, error) from error

    def write(self, name: str, position: int, values: Array) -> None:
        """Write contiguous values at a byte position inside a tensor.

        Raises:
            StoreError: The disk is full or fails.
        """
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
        try:
            self._put(data, self._offsets[name] + position)
        except OSError as error:
            raise _write_error(self._partial, error) from error

    def _put(self, data: bytes | memoryview, offset: int) -> None:
        view = memoryview(data)
        while view:
            count = os.pwrite(self._descriptor, view, offset)
            view = view[count:]
            offset += count

    def finish(self) -> None:
        """Bring the file to disk and give it its name.

        Raises:
            StoreError: The disk is full or fails.
        """
        try:
            os.fsync(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1
            self._partial.replace(self.path)
        except OSError as error:
            raise _write_error(self.path, error) from error

    def abandon(self) -> None:
        """Remove the unfinished file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._partial.unlink(missing_ok=True)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file with four spaces, on disk before it has its name.

    Raises:
        StoreError: The disk is full or fails.
    """
    partial = path.with_name(path.name + PARTIAL)
    try:
        with partial.open("w", encoding="utf-8") as stream:
            json.dump(value, stream, indent=4, ensure_ascii=False)
            stream.write("\n")
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise _write_error(path, error) from error


def sync_folder(path: Path) -> None:
    """Bring the names in a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_error(path: Path, error: OSError) -> StoreError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreError(f"{path}: the disk is full", hint="free space or choose another output folder")
    return StoreError(f"{path}: cannot be written ({error.strerror or error})")
