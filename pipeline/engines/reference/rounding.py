"""How values become the codes of an 8-bit or 4-bit type and come back, in float32.

Letters: K inputs, T tokens. A :class:`~.linear.Prepare` works on activations [K, T].
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import numpy.typing as npt

from .linear import Prepare

F32 = npt.NDArray[np.float32]
E4M3_LARGEST = np.float32(448)
E2M1_LARGEST = np.float32(6)
NVFP4_BLOCK = 16


def round_e4m3(x: F32) -> F32:
    """Round to the nearest float8_e4m3fn, saturating at 448."""
    codes = np.clip(x, -E4M3_LARGEST, E4M3_LARGEST).astype(ml_dtypes.float8_e4m3fn)
    return np.asarray(codes, np.float32)


def round_int8(x: F32) -> F32:
    """Round to the nearest integer, ties to even, saturating at -128 and 127."""
    return np.asarray(np.clip(np.rint(x), -128, 127), np.float32)


def _through_e4m3(x: F32, scale: F32 | np.float32) -> F32:
    rounded: F32 = round_e4m3(x / scale) * scale
    return rounded


def _through_int8(x: F32, scale: F32 | np.float32) -> F32:
    rounded: F32 = round_int8(x / scale) * scale
    return rounded


def _largest_per_token(x: F32) -> F32:
    """Return [1, T]; 1 for a token that is all zero, whose scale does not matter."""
    largest: F32 = np.abs(x).max(axis=0, keepdims=True)
    largest[largest == 0] = 1
    return largest


@dataclass(frozen=True, slots=True)
class Scaled:
    """Multiply each input by a factor, then go on: smoothing and AWQ."""

    factor: F32
    then: Prepare | None = None

    def __call__(self, x: F32) -> F32:
        scaled = x * self.factor
        return scaled if self.then is None else self.then(scaled)


@dataclass(frozen=True, slots=True)
class StaticFp8:
    """One scale for the tensor, measured in calibration."""

    scale: float

    def __call__(self, x: F32) -> F32:
        return _through_e4m3(x, np.float32(self.scale))


@dataclass(frozen=True, slots=True)
class DynamicFp8:
    """One scale per token, from its largest value."""

    clamp: tuple[float, float] | None

    def __call__(self, x: F32) -> F32:
        if self.clamp is not None:
            x = np.clip(x, np.float32(self.clamp[0]), np.float32(self.clamp[1]))
        return _through_e4m3(x, _largest_per_token(x) / E4M3_LARGEST)


@dataclass(frozen=True, slots=True)
class StaticInt8:
    """One scale for the tensor: real value to integer, and integer to what the product needs."""

    to_int: float
    to_real: float

    def __call__(self, x: F32) -> F32:
        out: F32 = round_int8(x * np.float32(self.to_int)) * np.float32(self.to_real)
        return out


@dataclass(frozen=True, slots=True)
class DynamicInt8:
    """One scale per token, from its largest value."""

    def __call__(self, x: F32) -> F32:
        return _through_int8(x, _largest_per_token(x) / np.float32(127))


@dataclass(frozen=True, slots=True)
class BlockFp4:
    """e2m1 codes with an e4m3 scale per block of 16 inputs, itself scaled by one float."""

    scale: float

    def __call__(self, x: F32) -> F32:
        blocks = x.reshape(-1, NVFP4_BLOCK, x.shape[1])
        largest = np.abs(blocks).max(axis=1, keepdims=True)
        scales = round_e4m3(largest / E2M1_LARGEST / np.float32(self.scale)) * np.float32(self.scale)
        scales[scales == 0] = 1
        codes = np.clip(blocks / scales, -E2M1_LARGEST, E2M1_LARGEST).astype(ml_dtypes.float4_e2m1fn)
        out: F32 = (codes.astype(np.float32) * scales).reshape(x.shape)
        return out


@dataclass(frozen=True, slots=True)
class KvInt8:
    """Keys and values as an int8 cache returns them."""

    scale: float

    def __call__(self, x: F32) -> F32:
        return _through_int8(x, np.float32(self.scale))
