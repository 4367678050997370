"""INT8 weights by output channel and INT8 activations by tensor, smoothed: modelopt's W8A8_SQ_PER_CHANNEL.

The input is multiplied by ``prequant`` = w^(1 - alpha) / x^alpha and the weight divided by it; both are then rounded to
int8 with scales amax / 127 that multiply the stored code.

Source: SmoothQuant, arXiv 2211.10438, section 4; layout as nvidia-modelopt 0.47 exports it for TensorRT-LLM.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from pipeline.checkpoint.binding import Bound
from pipeline.checkpoint.blocks import row_blocks
from pipeline.checkpoint.dtypes import Array, cast_checked, numpy_dtype
from pipeline.checkpoint.families import Layout
from pipeline.checkpoint.quantization.grouped_int4 import ARCHITECTURES, prequant_factor
from pipeline.checkpoint.quantization.ranges import Ranges
from pipeline.checkpoint.quantization.scheme import (
    Scheme,
    SchemeContext,
    beside,
    constant,
    is_linear_weight,
    only_for,
    shared_inputs,
)
from pipeline.checkpoint.views import Derived, Matrix, Tensor
from pipeline.errors import ConfigError

_LEVELS = np.float32(127.0)
_SMALLEST = 1e-5


@dataclass(frozen=True, slots=True, eq=False)
class _Smoothed(Derived):
    """A weight divided by the factors of its input, float32."""

    prequant: Array
    dtype: str

    def smooth(self, start: int, stop: int) -> Array:
        weight = cast_checked(self.base.read(start, stop), self.dtype, self.origin()).astype(np.float32)
        smoothed: Array = weight / self.prequant
        return smoothed


def _row_scales(values: Array) -> Array:
    """Return amax / 127 of each row [rows, 1], 1 for rows of zeros."""
    amax = np.abs(values).max(axis=1, keepdims=True)
    scales: Array = np.where(amax > 0, amax, _LEVELS) / _LEVELS
    return scales


@dataclass(frozen=True, slots=True, eq=False)
class _Codes(_Smoothed):
    def read(self, start: int, stop: int) -> Array:
        """Return int8 rows."""
        values = self.smooth(start, stop)
        return np.clip(np.rint(values / _row_scales(values)), -128, 127).astype(np.int8)


@dataclass(frozen=True, slots=True, eq=False)
class _Scales(_Smoothed):
    @property
    def cols(self) -> int:
        """One scale per row."""
        return 1

    def read(self, start: int, stop: int) -> Array:
        """Return float32 scales: [stop - start, 1]."""
        return _row_scales(self.smooth(start, stop))


class _Input:
    """What linears of a common input share: the factors, and the scale of the activation."""

    def __init__(self, linears: list[str], context: SchemeContext, ranges: Ranges) -> None:
        self._linears, self._context, self._ranges = linears, context, ranges

    @cached_property
    def prequant(self) -> Array:
        """[in] float32, rounded to the type it is stored in."""
        weights: list[Matrix] = [Tensor(self._context.source, f"{name}.weight") for name in self._linears]
        largest = np.full(weights[0].cols, _SMALLEST)
        for weight in weights:
            for start, stop in row_blocks(weight):
                block = np.abs(weight.read(start, stop).astype(np.float32)).max(axis=0)
                largest = np.maximum(largest, block)
        x = np.maximum(np.max([self._ranges.input(name) for name in self._linears], axis=0), _SMALLEST)
        alpha = self._context.options.alpha
        factors = largest ** (1.0 - alpha) / x.astype(np.float64) ** alpha
        stored: Array = factors.astype(np.float32).astype(numpy_dtype(self._context.dtype)).astype(np.float32)
        return stored

    @cached_property
    def scale(self) -> float:
        """Largest multiplied input / 127."""
        return float(max((self._ranges.input(name) * self.prequant).max() for name in self._linears) / _LEVELS)


class Int8PerChannel(Scheme):
    """W8A8_SQ_PER_CHANNEL."""

    def __init__(self, context: SchemeContext, ranges: Ranges | None) -> None:
        """Check that the scheme fits.

        Raises:
            ConfigError: Another architecture, or no measured ranges.
        """
        only_for(context, ARCHITECTURES, "quant int8_sq")
        if ranges is None:
            raise ConfigError(
                "quant is 'int8_sq'; expected measured ranges", hint="give --calibration TEXT or --ranges FILE"
            )
        self._context, self._ranges = context, ranges
        self._inputs: dict[str, _Input] = {}
        self.quantization = {"quant_algo": "W8A8_SQ_PER_CHANNEL", "smoothquant_val": context.options.alpha}

    def expand(self, bound: Bound) -> Iterator[Bound]:
        """Quantize each linear layer and add its scales."""
        if not is_linear_weight(bound.rule):
            yield bound
            return
        linears = shared_inputs(bound)
        shared = self._inputs.setdefault(linears[0], _Input(linears, self._context, self._ranges))
        dtype = self._context.dtype
        codes = tuple(_Codes(part, shared.prequant, dtype) for part in bound.parts)
        yield replace(bound, rule=replace(bound.rule, dtype="int8"), parts=codes)
        layout = Layout.WHOLE if bound.rule.layout is Layout.ROW else bound.rule.layout
        scales = [_Scales(part, shared.prequant, dtype) for part in bound.parts]
        yield beside(bound, "weights_scaling_factor", scales, layout=layout)
        yield prequant_factor(bound, shared.prequant)
        yield constant(f"{bound.module}.activation_scaling_factor", [shared.scale])
