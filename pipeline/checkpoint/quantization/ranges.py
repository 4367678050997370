"""Activation ranges that calibration measured, from a safetensors file.

``<linear>.x`` is the largest |input| per input channel, ``<linear>.y`` the largest |output| per output channel, both
float32, under the linear's Hugging Face name, measured on the model before any smoothing. Where present,
``<k_proj or v_proj>.cache`` [1] is the largest magnitude in the KV cache, keys rotated. For weights in groups a search
adds ``<linear>.prequant`` [in], what the input is multiplied with, and ``<linear>.clip`` [out, in / group], the largest
magnitude that a group keeps.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pipeline.checkpoint.dtypes import Array
from pipeline.checkpoint.readers.base import OpenFiles, read_matrix
from pipeline.checkpoint.readers.safetensors_file import read_safetensors_header
from pipeline.errors import SourceError


class Ranges:
    """A file of measured ranges."""

    def __init__(self, path: Path) -> None:
        """Load the file.

        Raises:
            SourceError: It is missing, damaged, or holds a range that is not finite or negative.
        """
        if not path.is_file():
            raise SourceError(f"{path}: does not exist; expected measured ranges")
        self._path = path
        header = read_safetensors_header(path)
        files = OpenFiles()
        files.add(path)
        self._values: dict[str, Array] = {}
        try:
            for name, info in header.tensors.items():
                if name.endswith((".x", ".y", ".cache", ".prequant", ".clip")) and info.dtype == "float32":
                    rows = read_matrix(files, info, header.offsets[name], (0, info.rows), (0, info.cols))
                    self._values[name] = rows.reshape(info.shape)
        finally:
            files.close()
        bad = next((n for n, v in self._values.items() if not (np.isfinite(v).all() and (v >= 0).all())), None)
        if bad is not None:
            raise SourceError(f"{path}: {bad} holds values that are negative or not finite; expected magnitudes")

    def input(self, linear: str) -> Array:
        """Return the largest |input| per channel: [in], float32."""
        return self._get(f"{linear}.x")

    def output(self, linear: str) -> Array:
        """Return the largest |output| per channel: [out], float32."""
        return self._get(f"{linear}.y")

    def cached(self, layer: str) -> float | None:
        """Return the largest magnitude in the KV cache of a layer (its prefix with the dot), None if not measured."""
        names = [f"{layer}self_attn.{part}_proj.cache" for part in "kv"]
        if not all(name in self._values for name in names):
            return None
        return float(max(self._get(name).max() for name in names))

    def prequant(self, linear: str) -> Array:
        """Return what the search multiplies the input with: [in], float32."""
        return self._get(f"{linear}.prequant")

    def clip(self, linear: str) -> Array:
        """Return the largest magnitude that each group keeps: [out, in / group], float32."""
        return self._get(f"{linear}.clip")

    def _get(self, name: str) -> Array:
        if name not in self._values:
            raise SourceError(
                f"{self._path}: lacks {name}; expected a float32 range for every linear layer",
                hint="the ranges were measured on another model",
            )
        values = self._values[name] if name.endswith(".clip") else self._values[name].reshape(-1)
        if not values.any():
            raise SourceError(f"{self._path}: {name} is all zero: calibration had no effect")
        return values
