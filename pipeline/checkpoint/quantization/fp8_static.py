"""FP8 with one scale per tensor for weights and activations, from measured ranges.

Scales are amax / 448 and multiply the stored value to get the real one. q, k, v share their scales, and so do the two
branches of the MLP, because the engine may fuse them.

Source: what nvidia-modelopt 0.47 exports for TensorRT-LLM; verified bit for bit against such an export.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from pipeline.checkpoint.binding import Bound
from pipeline.checkpoint.dtypes import Array, cast_checked, numpy_dtype
from pipeline.checkpoint.quantization.fp8 import FP8, SOURCE_ARCHITECTURES
from pipeline.checkpoint.quantization.ranges import Ranges
from pipeline.checkpoint.quantization.scheme import (
    Scheme,
    SchemeContext,
    WeightAmaxes,
    constant,
    is_linear_weight,
    only_for,
    shared_inputs,
)
from pipeline.checkpoint.views import Matrix
from pipeline.errors import ConfigError, SourceError

_LARGEST = np.float32(448.0)


@dataclass(frozen=True, slots=True)
class TensorQuantized:
    """A matrix divided by one scale and rounded to float8, in float32."""

    base: Matrix
    scale: float
    dtype: str

    @property
    def rows(self) -> int:
        """As the base."""
        return self.base.rows

    @property
    def cols(self) -> int:
        """As the base."""
        return self.base.cols

    def read(self, start: int, stop: int) -> Array:
        """Return float8 rows."""
        values = cast_checked(self.base.read(start, stop), self.dtype, self.origin()).astype(np.float32)
        quantized: Array = np.clip(values / np.float32(self.scale), -_LARGEST, _LARGEST).astype(numpy_dtype(FP8))
        return quantized

    def origin(self) -> str:
        """As the base."""
        return self.base.origin()


class StaticFp8(Scheme):
    """Weights quantized here; activations by a range that calibration measured."""

    def __init__(self, context: SchemeContext, ranges: Ranges | None) -> None:
        """Check that the scheme fits.

        Raises:
            ConfigError: Another architecture, or no measured ranges.
        """
        only_for(context, SOURCE_ARCHITECTURES, "quant fp8")
        if ranges is None:
            raise ConfigError(
                "quant is 'fp8'; expected measured ranges, or a source whose weights already are FP8",
                hint="give --ranges RANGES.safetensors, or use fp8_rowwise, which needs no calibration",
            )
        self._context, self._ranges = context, ranges
        self._amaxes = WeightAmaxes(context)
        self.quantization = {"quant_algo": "FP8"}

    def expand(self, bound: Bound) -> Iterator[Bound]:
        """Quantize each linear layer and add its two scales."""
        if not is_linear_weight(bound.rule):
            yield bound
            return
        names = shared_inputs(bound)
        weight = np.float32(max(self._amaxes(name) for name in names)) / _LARGEST
        activation = np.float32(max(self._ranges.input(name).max() for name in names)) / _LARGEST
        if weight == 0:
            raise SourceError(f"{bound.parts[0].origin()}: holds only zeros; expected weights to quantize")
        parts = tuple(TensorQuantized(part, float(weight), self._context.dtype) for part in bound.parts)
        yield replace(bound, rule=replace(bound.rule, dtype=FP8), parts=parts)
        yield constant(f"{bound.module}.weights_scaling_factor", [float(weight)])
        yield constant(f"{bound.module}.activation_scaling_factor", [float(activation)])
