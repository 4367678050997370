"""Rotary position embedding in the half-split (NeoX) form.

Letters: T tokens, H heads, r rotated dimensions of a head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import EngineError

F32 = npt.NDArray[np.float32]


def inverse_frequencies(
    dim: int, base: float, scaling: Mapping[str, Any] | None, length: int
) -> tuple[npt.NDArray[np.float64], float]:
    """Return the rotation per position of each dimension pair, [dim/2] radians, and a factor of cosines and sines.

    Source: RoFormer, arXiv 2104.09864, section 3.2.2; ``linear``: position interpolation, arXiv 2306.15595; ``llama3``:
    wavelengths longer than the original context are stretched by ``factor``, short ones kept, blended in between
    (Llama 3.1 model card); ``longrope``: one factor per pair, arXiv 2402.13753.

    Args:
        dim: Rotated dimensions of a head.
        base: Of the geometric series of wavelengths.
        scaling: The config's object, None for none.
        length: Longest sequence; longrope has one set of factors for the original context and one for beyond.

    Raises:
        EngineError: The kind of scaling is unknown or lacks a value.
    """
    plain = base ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
    if not scaling:
        return plain, 1.0
    kind = scaling.get("type", scaling.get("rope_type", "none"))
    try:
        if kind in ("none", "default"):
            return plain, 1.0
        if kind == "linear":
            return plain / float(scaling.get("factor", 1.0)), 1.0
        if kind == "llama3":
            return _llama3(plain, scaling), 1.0
        if kind in ("longrope", "su"):
            return _longrope(plain, scaling, length)
    except KeyError as error:
        raise EngineError(f"rotary_scaling of type {kind!r} lacks {error.args[0]!r}") from error
    raise EngineError(f"rotary_scaling type {kind!r} is not supported; known are default, linear, llama3, longrope")


def _llama3(plain: npt.NDArray[np.float64], scaling: Mapping[str, Any]) -> npt.NDArray[np.float64]:
    factor = float(scaling.get("factor", 1.0))
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    context = float(scaling["original_max_position_embeddings"])
    turns = context * plain / (2 * math.pi)
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return keep * plain + (1 - keep) * plain / factor


def _longrope(
    plain: npt.NDArray[np.float64], scaling: Mapping[str, Any], length: int
) -> tuple[npt.NDArray[np.float64], float]:
    original = int(scaling["original_max_position_embeddings"])
    factors = np.asarray(scaling["long_factor" if length > original else "short_factor"], np.float64)
    if factors.shape != plain.shape:
        raise EngineError(f"rotary_scaling has {factors.size} factors; expected {plain.size}, one per dimension pair")
    stretch = int(scaling["max_position_embeddings"]) / original
    return plain / factors, math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """Cosines and sines of every position.

    Attributes:
        cos: [max_seq_len, 2, r/2] float32, each value twice.
        sin: The same, negative in the first half.
    """

    cos: F32
    sin: F32

    @classmethod
    def build(cls, frequencies: npt.NDArray[np.float64], length: int, factor: float = 1.0) -> RotaryTable:
        """Make the table for positions 0 .. length-1, multiplied by ``factor``.

        Precision: frequencies and angles are rounded to float32, as TensorRT-LLM and transformers do; at position 8000
        that moves an angle by up to 5e-4.
        """
        angles = np.outer(np.arange(length, dtype=np.float32), frequencies.astype(np.float32))
        cos, sin = np.float32(factor) * np.cos(angles), np.float32(factor) * np.sin(angles)
        return cls(np.stack([cos, cos], axis=1), np.stack([-sin, sin], axis=1))

    def rows(self, positions: npt.NDArray[np.intp]) -> tuple[F32, F32]:
        """Return cosines and sines for some positions, shaped [T, 1, 2, r/2] to broadcast over heads."""
        return self.cos[positions][:, None], self.sin[positions][:, None]


def rotate(x: F32, cos: F32, sin: F32) -> None:
    """Rotate the first r dimensions of ``x`` in place.

    Args:
        x: [T, H, head_size] float32, contiguous along the last axis.
        cos: [T, 1, 2, r/2] float32, as ``sin``, from :meth:`RotaryTable.rows`.
    """
    half = cos.shape[-1]
    # Splitting an axis never copies, so this is a view.
    pairs = x[..., : 2 * half].reshape(*x.shape[:-1], 2, half)
    turned = pairs[:, :, ::-1] * sin
    pairs *= cos
    pairs += turned
