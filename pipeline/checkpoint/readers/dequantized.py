"""A quantized source as plain weights: what calibration and a baseline are made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.checkpoint.dtypes import Array
from pipeline.checkpoint.readers.base import TensorInfo, TensorSource

_CODES = ("int8", "float8_e4m3fn")
_BESIDE = ("group_scale", "group_zero", "weight_scale", "input_scale", "k_scale", "v_scale", "input_zero_point")


class DequantizedSource:
    """Weights of a quantized source, multiplied out to float32. See :class:`TensorSource`."""

    def __init__(self, source: TensorSource) -> None:
        """Look at the source; nothing is read yet."""
        self._source = source
        self.path, self.kind = source.path, source.kind
        self.config: Mapping[str, Any] = {k: v for k, v in source.config.items() if k != "quantization_config"}
        self.ignored_files, self.warnings = source.ignored_files, source.warnings
        self.tensors: Mapping[str, TensorInfo] = {
            name: replace(info, dtype="float32") if _is_coded(name, info) else info
            for name, info in source.tensors.items()
            if name.rpartition(".")[2] not in _BESIDE
        }

    def read(self, name: str, start: int, stop: int, first: int = 0, last: int | None = None) -> Array:
        """Return a block of a tensor; see :meth:`TensorSource.read`."""
        values = self._source.read(name, start, stop, first, last)
        if not _is_coded(name, self._source.tensors[name]):
            return values
        base = name.removesuffix(".weight")
        real: Array = values.astype(np.float32)
        if f"{base}.group_scale" in self._source.tensors:
            scale = self._spread(f"{base}.group_scale", name, start, stop)[:, first:last]
            real = real * scale
            if f"{base}.group_zero" in self._source.tensors:
                real = real + self._spread(f"{base}.group_zero", name, start, stop)[:, first:last]
        elif (info := self._source.tensors.get(f"{base}.weight_scale")) is not None:
            rows = (start, stop) if info.rows > 1 else (0, 1)
            real = real * self._source.read(info.name, *rows).astype(np.float32)
        return real

    def _spread(self, name: str, weight: str, start: int, stop: int) -> Array:
        """Repeat values of groups to [rows, in]."""
        width = self._source.tensors[weight].cols // self._source.tensors[name].cols
        return np.repeat(self._source.read(name, start, stop), width, axis=1)

    def weight_files(self) -> tuple[Path, ...]:
        """Return the files of the source."""
        return self._source.weight_files()

    def close(self) -> None:
        """Close the source."""
        self._source.close()


def _is_coded(name: str, info: TensorInfo) -> bool:
    return name.endswith(".weight") and info.dtype in _CODES
