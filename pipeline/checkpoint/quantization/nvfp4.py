"""NVFP4: e2m1 weights with an e4m3 scale per 16 inputs and one float32 scale per tensor; activations likewise.

Source: what nvidia-modelopt 0.47 exports for TensorRT-LLM; verified against such an export.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

from pipeline.checkpoint.binding import Bound, Form
from pipeline.checkpoint.dtypes import Array, cast_checked, numpy_dtype
from pipeline.checkpoint.quantization.fp8 import FP8
from pipeline.checkpoint.quantization.grouped_int4 import ARCHITECTURES, refuse_group_size
from pipeline.checkpoint.quantization.ranges import Ranges
from pipeline.checkpoint.quantization.scheme import (
    Scheme,
    SchemeContext,
    WeightAmaxes,
    beside,
    constant,
    is_linear_weight,
    only_for,
    shared_inputs,
)
from pipeline.checkpoint.views import Derived
from pipeline.errors import ConfigError

BLOCK = 16
_LARGEST = np.float32(6.0)
_LARGEST_SCALE = np.float32(448.0)
# amax / this is the scale of a tensor.
_RANGE = np.float32(6.0 * 448.0)


@dataclass(frozen=True, slots=True, eq=False)
class _Blocks(Derived):
    """A weight in blocks of 16 inputs, with the scale of the whole tensor."""

    scale: np.float32
    dtype: str

    def blocks(self, start: int, stop: int) -> tuple[Array, Array]:
        """Return the values [rows, in / 16, 16] float32 and the scales of the blocks [rows, in / 16] e4m3."""
        weight = cast_checked(self.base.read(start, stop), self.dtype, self.origin()).astype(np.float32)
        values = weight.reshape(stop - start, -1, BLOCK)
        wanted = np.abs(values).max(axis=2) / _LARGEST / self.scale
        return values, np.clip(wanted, 0, _LARGEST_SCALE).astype(numpy_dtype(FP8))


@dataclass(frozen=True, slots=True, eq=False)
class _BlockScales(_Blocks):
    @property
    def cols(self) -> int:
        """One scale per block."""
        return self.base.cols // BLOCK

    def read(self, start: int, stop: int) -> Array:
        """Return float8 rows."""
        return self.blocks(start, stop)[1]


@dataclass(frozen=True, slots=True, eq=False)
class _PackedCodes(_Blocks):
    @property
    def cols(self) -> int:
        """Two codes in a byte."""
        return self.base.cols // 2

    def read(self, start: int, stop: int) -> Array:
        """Return uint8 rows: the even input in the low half."""
        values, stored = self.blocks(start, stop)
        scales = stored.astype(np.float32) * self.scale
        scales[scales == 0] = 1
        clipped = np.clip(values / scales[:, :, None], -_LARGEST, _LARGEST)
        codes = clipped.astype(ml_dtypes.float4_e2m1fn).view(np.uint8).reshape(stop - start, -1)
        packed: Array = codes[:, 0::2] | (codes[:, 1::2] << 4)
        return packed


class Nvfp4(Scheme):
    """NVFP4."""

    def __init__(self, context: SchemeContext, ranges: Ranges | None) -> None:
        """Check that the scheme fits.

        Raises:
            ConfigError: Another architecture, no measured ranges, or widths that are no multiple of 16.
        """
        only_for(context, ARCHITECTURES, "quant nvfp4")
        if ranges is None:
            raise ConfigError(
                "quant is 'nvfp4'; expected measured ranges", hint="give --calibration TEXT or --ranges FILE"
            )
        refuse_group_size(context, BLOCK)
        self._context, self._ranges = context, ranges
        self._amaxes = WeightAmaxes(context)
        self.quantization = {"quant_algo": "NVFP4", "group_size": BLOCK}

    def expand(self, bound: Bound) -> Iterator[Bound]:
        """Quantize each linear layer and add its scales."""
        if not is_linear_weight(bound.rule):
            yield bound
            return
        linears = shared_inputs(bound)
        # A tensor of zeros keeps its zeros under any scale.
        scale = np.float32(max(self._amaxes(name) for name in linears) or 1.0) / _RANGE
        activation = np.float32(max(self._ranges.input(name).max() for name in linears)) / _RANGE
        parts = [(part, scale, self._context.dtype) for part in bound.parts]
        yield replace(bound, rule=replace(bound.rule, dtype="uint8"), parts=tuple(_PackedCodes(*p) for p in parts))
        yield beside(bound, "weights_scaling_factor", [_BlockScales(*p) for p in parts], form=Form.MATRIX, dtype=FP8)
        for suffix, value in (("weights_scaling_factor_2", scale), ("activation_scaling_factor", activation)):
            yield constant(f"{bound.module}.{suffix}", [float(value)], form=Form.SCALAR)
