"""Read-only view of one ``.safetensors`` file, bfloat16 and float8 included.

The file is mapped, not read: an array costs memory when it is touched. The safetensors package is not used since its
numpy interface does not know the narrow types in every version.

Source: https://github.com/huggingface/safetensors#format (8-byte little-endian header length, JSON header, raw data).
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from .errors import EngineError

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


class SafetensorsFile:
    """Tensors of one file by name.

    Raises:
        EngineError: The file is missing, truncated, or not a safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise EngineError(f"{path}: the file is missing; the config's mapping asks for it")
        size = path.stat().st_size
        if size < 8:
            raise EngineError(f"{path}: {size} bytes are no safetensors file (a header is at least 8 bytes)")
        self._bytes = np.memmap(path, dtype=np.uint8, mode="r")
        header_size = int(self._bytes[:8].view("<u8")[0])
        if header_size > size - 8:
            raise EngineError(f"{path}: not a safetensors file, or truncated: header of {header_size} in {size} bytes")
        try:
            header = json.loads(bytes(self._bytes[8 : 8 + header_size]))
        except (ValueError, RecursionError) as error:
            raise EngineError(f"{path}: the safetensors header is not JSON ({error})") from error
        header.pop("__metadata__", None)
        self._header: dict[str, dict[str, Any]] = header
        self._start = 8 + header_size
        end = self._start + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if end > size:
            raise EngineError(f"{path}: truncated, has {size} bytes where the header describes {end}")

    def names(self) -> set[str]:
        """Return the tensor names."""
        return set(self._header)

    def tensor(self, name: str) -> npt.NDArray[Any]:
        """Return a tensor in its stored type, mapped from the file.

        Raises:
            EngineError: The type is unknown or the byte range does not fit the shape.
        """
        entry = self._header[name]
        dtype = DTYPES.get(entry["dtype"])
        if dtype is None:
            raise EngineError(f"{self.path}: {name} has type {entry['dtype']}; known are {', '.join(DTYPES)}")
        begin, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        if end - begin != prod(shape) * dtype.itemsize:
            raise EngineError(f"{self.path}: {name} of shape {shape} {dtype} has {end - begin} bytes")
        raw = self._bytes[self._start + begin : self._start + end]
        if raw.ctypes.data % dtype.itemsize:
            raw = raw.copy()
        return np.asarray(raw.view(dtype).reshape(shape))


def to_float32(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Widen to float32; exact for every type narrower than it."""
    if values.dtype == ml_dtypes.bfloat16:
        # NOTE: bfloat16 is the upper half of a float32; shifting is several times faster than a cast by element.
        wide = values.view(np.uint16).astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    return values.astype(np.float32)
