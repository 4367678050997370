"""SmoothQuant in the layout of TensorRT-LLM's plugins: INT8 weights and activations, made from measured ranges.

Numbers follow NVIDIA's converter to the bit: the model is float16 during calibration, smoothing factors are float64,
and 127 / amax of a weight is rounded to float16 before use.

Source: checkpoint format of TensorRT-LLM, SmoothQuant part; verified against its own conversions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from pipeline.checkpoint.binding import Bound, Form
from pipeline.checkpoint.blocks import row_blocks
from pipeline.checkpoint.dtypes import Array, cast_checked, numpy_dtype
from pipeline.checkpoint.families import Layout, Rule
from pipeline.checkpoint.quantization.ranges import Ranges
from pipeline.checkpoint.quantization.scheme import (
    Constant,
    Scheme,
    SchemeContext,
    constant,
    is_linear_weight,
    only_for,
)
from pipeline.checkpoint.views import Matrix
from pipeline.errors import ConfigError, SourceError

_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
_SMALLEST = 1e-5
# 127 / amax must stay below the largest float16, 65504.
_SMALLEST_ROW = 0.00195

# Layer rule -> linears that share its input: smoothed together.
_GROUPS = {
    "input_layernorm.weight": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.qkv.weight": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.dense.weight": ("self_attn.o_proj",),
    "post_layernorm.weight": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.fc.weight": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.gate.weight": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.proj.weight": ("mlp.down_proj",),
}
_NORMS = ("input_layernorm.weight", "post_layernorm.weight")
# Linears without a norm before them keep their factors; the engine divides the activation by them.
_STATIC_INPUTS = {
    "attention.dense.weight": "attention.quantization_scaling_factor",
    "mlp.proj.weight": "mlp.quantization_scaling_factor",
}


def _to_half(values: Array, what: str) -> Array:
    """Round float64 to float16 by way of float32, as torch does."""
    return cast_checked(values.astype(np.float32), "float16", what)


@dataclass(frozen=True, slots=True, eq=False)
class Smoothed:
    """A float16 weight with its columns multiplied by the factors, rounded to float16.

    Attributes:
        base: [out, in], any float type.
        factors: [in], float64.
        dtype: Type of the result; other than float16 is one more rounding.
    """

    base: Matrix
    factors: Array
    dtype: str

    @property
    def rows(self) -> int:
        """As the base."""
        return self.base.rows

    @property
    def cols(self) -> int:
        """As the base."""
        return self.base.cols

    def half(self, start: int, stop: int) -> Array:
        """Return float16 rows."""
        half = cast_checked(self.base.read(start, stop), "float16", self.origin())
        return _to_half(half.astype(np.float64) * self.factors, self.origin())

    def read(self, start: int, stop: int) -> Array:
        """Return rows in the type of the checkpoint."""
        return self.half(start, stop).astype(numpy_dtype(self.dtype))

    def origin(self) -> str:
        """As the base."""
        return self.base.origin()


@dataclass(frozen=True, slots=True, eq=False)
class SmoothedNorm:
    """A norm weight divided by the factors, in float16: [n, 1]."""

    base: Matrix
    factors: Array

    @property
    def rows(self) -> int:
        """As the base."""
        return self.base.rows

    @property
    def cols(self) -> int:
        """As the base."""
        return self.base.cols

    def read(self, start: int, stop: int) -> Array:
        """Return float16 values."""
        half = cast_checked(self.base.read(start, stop), "float16", self.origin())
        return _to_half(half.astype(np.float64) / self.factors[start:stop, None], self.origin())

    def origin(self) -> str:
        """As the base."""
        return self.base.origin()


@dataclass(frozen=True, slots=True, eq=False)
class Int8Rows:
    """A smoothed weight as int8, -127 to 127, rounded half to even.

    Attributes:
        base: The smoothed weight.
        scales: [rows, 1], float32: multiplied with the weight, or dividing it.
        divide: Whether the weight is divided.
        rounded: Whether the product is rounded to the weight's own type before it is rounded to an integer.
    """

    base: Smoothed
    scales: Array
    divide: bool
    rounded: bool

    @property
    def rows(self) -> int:
        """As the base."""
        return self.base.rows

    @property
    def cols(self) -> int:
        """As the base."""
        return self.base.cols

    def read(self, start: int, stop: int) -> Array:
        """Return int8 rows."""
        values = self.base.read(start, stop)
        own = values.dtype
        scales = self.scales[start:stop]
        product = values.astype(np.float32) / scales if self.divide else values.astype(np.float32) * scales
        if self.rounded:
            product = product.astype(own).astype(np.float32)
        return np.clip(np.rint(product), -127, 127).astype(np.int8)

    def origin(self) -> str:
        """As the base."""
        return self.base.origin()


class _Group:
    """Linears that share an input: their smoothing factors, from ranges and weights."""

    def __init__(self, linears: Sequence[str], weights: Sequence[Matrix], ranges: Ranges, alpha: float) -> None:
        self._linears = linears
        self._weights = weights
        self._ranges = ranges
        self._alpha = alpha

    @cached_property
    def factors(self) -> Array:
        """Smoothing factor per input channel: x^alpha / w^(1 - alpha), at least 1e-5; float64."""
        largest = np.zeros(self._weights[0].cols, np.float16)
        for weight in self._weights:
            for start, stop in row_blocks(weight):
                half = cast_checked(weight.read(start, stop), "float16", weight.origin())
                largest = np.maximum(largest, np.abs(half).max(axis=0))
        w = np.maximum(largest.astype(np.float64), _SMALLEST)
        x = self._ranges.input(self._linears[0]).astype(np.float64)
        factors: Array = np.maximum(x**self._alpha / w ** (1.0 - self._alpha), _SMALLEST)
        return factors

    @cached_property
    def input_amax(self) -> Array:
        """Largest |input| after smoothing: a float64 number."""
        amax: Array = (self._ranges.input(self._linears[0]) / self.factors).max()
        return amax


def levels_over(amax: Array) -> Array:
    """Return 127 / amax in the type of ``amax``, as torch computes it: the reciprocal first, each step rounded."""
    one, levels = amax.dtype.type(1.0), amax.dtype.type(127.0)
    quotient: Array = (one / amax) * levels
    return quotient


def row_amax(weight: Smoothed) -> Array:
    """Return the largest magnitude of each row: [rows], float16; 1 for a row of zeros, which any scale keeps.

    Raises:
        SourceError: A row is so small that 127 / amax does not fit float16: it would be stored with a scale of zero.
    """
    amax = np.concatenate([np.abs(weight.half(start, stop)).max(axis=1) for start, stop in row_blocks(weight)])
    smallest = np.min(amax, where=amax > 0, initial=np.float16(1.0))
    if smallest < _SMALLEST_ROW:
        raise SourceError(
            f"{weight.origin()}: a smoothed row has magnitudes of at most {smallest:g}; expected {_SMALLEST_ROW}",
            hint="use fp8_rowwise or int8, whose scales have no such limit",
        )
    return np.where(amax > 0, amax, np.float16(1.0))


class SmoothQuant(Scheme):
    """Per tensor or per channel weights, per tensor (static) or per token activations."""

    def __init__(self, context: SchemeContext, ranges: Ranges | None) -> None:
        """Check that the scheme fits the model.

        Raises:
            ConfigError: Another architecture, sizes that the layout cannot express, or no measured ranges.
        """
        only_for(context, _ARCHITECTURES, "quant smoothquant")
        a, options = context.architecture, context.options
        if ranges is None:
            raise ConfigError(
                "quant is 'smoothquant'; expected measured ranges", hint="give --ranges RANGES.safetensors"
            )
        if a.num_heads * a.head_dim != a.hidden_size:
            raise ConfigError(f"quant smoothquant: heads of {a.head_dim} values do not add up to {a.hidden_size}")
        if a.num_kv_heads % options.tp:
            raise ConfigError(f"quant smoothquant: tp is {options.tp}; expected a divisor of {a.num_kv_heads} kv heads")
        self._context, self._ranges, self._options = context, ranges, options
        self._groups: dict[str, _Group] = {}
        weights = "PER_CHANNEL" if options.per_channel else "PER_TENSOR"
        inputs = "_PER_TOKEN" if options.per_token else "_PER_TENSOR" if options.per_channel else ""
        self.quantization = {"quant_algo": f"W8A8_SQ_{weights}{inputs}_PLUGIN", "smoothquant_val": options.alpha}

    def expand(self, bound: Bound) -> Iterator[Bound]:
        """Smooth norms, quantize linears, add their scales."""
        target = bound.rule.target
        if bound.rule.place != "layer" or target not in _GROUPS:
            yield bound
            return
        prefix = bound.sources[0].removesuffix(bound.rule.sources[0])
        group = self._group(prefix, target)
        if target in _NORMS:
            yield replace(bound, parts=(SmoothedNorm(bound.parts[0], group.factors),))
            scale = 1.0 if self._options.per_token else float(np.float32(levels_over(group.input_amax)))
            yield constant(f"{bound.module}.scale_to_int", [scale])
        elif is_linear_weight(bound.rule):
            yield from self._linear(bound, group, prefix)

    def _group(self, prefix: str, target: str) -> _Group:
        linears = tuple(prefix + name for name in _GROUPS[target])
        if linears[0] not in self._groups:
            from pipeline.checkpoint.views import Tensor

            weights = [Tensor(self._context.source, f"{name}.weight") for name in linears]
            self._groups[linears[0]] = _Group(linears, weights, self._ranges, self._options.alpha)
        return self._groups[linears[0]]

    def _linear(self, bound: Bound, group: _Group, prefix: str) -> Iterator[Bound]:
        fused = len(bound.parts) > 1
        # The fused q, k, v weight stays float16 until it is quantized, others take the checkpoint's type before.
        kind = "float16" if fused else self._context.dtype
        smoothed = [Smoothed(part, group.factors, kind) for part in bound.parts]
        amaxes = [row_amax(weight) for weight in smoothed]
        if not self._options.per_channel:
            amaxes = [np.full_like(amax, amax.max()) for amax in amaxes]
        to_int = [levels_over(amax)[:, None] for amax in amaxes]
        to_real = [np.float16(1.0) / scale for scale in to_int]
        divide = fused and not self._options.per_channel and self._is_grouped
        rounded = divide or not (fused or self._options.per_channel)
        parts = tuple(
            Int8Rows(weight, (real if divide else ints).astype(np.float32), divide, rounded)
            for weight, ints, real in zip(smoothed, to_int, to_real, strict=True)
        )
        yield replace(bound, rule=replace(bound.rule, dtype="int8"), parts=parts)
        linears = [name.removesuffix(".weight") for name in bound.sources]
        scales = to_real if self._options.per_token else self._accumulator_scales(group, linears, to_int, fused)
        yield self._channel_scale(bound, scales, fused)
        target = bound.rule.target
        if not self._options.per_token:
            amax = max(self._ranges.output(name).max() for name in linears)
            yield constant(f"{bound.module}.act_scale", [float(np.float32(amax) / np.float32(127.0))], form=Form.MATRIX)
        if target in _STATIC_INPUTS:
            yield constant(f"{bound.module}.smoother", group.factors, form=Form.ROW, layout=Layout.COLUMN)
            if not self._options.per_token:
                name = bound.name.removesuffix(target) + _STATIC_INPUTS[target]
                yield constant(name, [float(np.float32(levels_over(group.input_amax)))])

    @property
    def _is_grouped(self) -> bool:
        return self._context.architecture.num_kv_heads < self._context.architecture.num_heads

    def _accumulator_scales(
        self, group: _Group, linears: Sequence[str], to_int: Sequence[Array], fused: bool
    ) -> list[Array]:
        """Return what turns int32 accumulators into int8: (127 / y) / ((127 / x) * (127 / w)), [out, 1] each."""
        y = levels_over(np.float32(max(self._ranges.output(name).max() for name in linears)))
        x = levels_over(group.input_amax)
        if fused or self._options.per_channel:
            return [y / (np.float32(x) * scale.astype(np.float32)) for scale in to_int]
        return [np.float64(y) / (x * scale.astype(np.float64)) for scale in to_int]

    def _channel_scale(self, bound: Bound, scales: Sequence[Array], fused: bool) -> Bound:
        """Return ``per_channel_scale``: [1, out] cut like the weight's rows, or [1, 1] for one scale per tensor."""
        name = f"{bound.module}.per_channel_scale"
        if not (fused or self._options.per_channel):
            return constant(name, scales[0][:1], form=Form.MATRIX)
        layout = bound.rule.layout if bound.rule.layout is not Layout.ROW else Layout.WHOLE
        parts = tuple(Constant(scale.astype(np.float32), name) for scale in scales)
        return Bound(name, Rule(name, (), layout, dtype="float32"), (), parts, Form.ROW)
