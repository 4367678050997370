"""FP8: weights that already are float8 in the source, and row-wise quantization of others.

Source of the formulas: checkpoint format of TensorRT-LLM, float8 part; verified bit for bit against NVIDIA's converter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from pipeline.checkpoint.binding import Bound, Target
from pipeline.checkpoint.dtypes import PLAIN_FLOATS, Array, largest_magnitude, numpy_dtype
from pipeline.checkpoint.families import Rule
from pipeline.checkpoint.quantization.scheme import Scheme, SchemeContext, constant, is_linear_weight
from pipeline.checkpoint.readers import TensorInfo, TensorSource
from pipeline.checkpoint.sharder import Segment, Shard
from pipeline.checkpoint.views import Matrix
from pipeline.errors import SourceError

FP8 = "float8_e4m3fn"
_LARGEST = np.float32(448.0)
# Activations of row-wise FP8 are clamped to this range before they are quantized; the weights too.
CLAMP = (-1200.0, 1200.0)
_SMALLEST_SCALE = np.float32(1.0 / (448.0 * 512.0))

SOURCE_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def holds_fp8(source: TensorSource) -> bool:
    """Say whether the source's weights already are float8."""
    return any(info.dtype == FP8 for info in source.tensors.values())


def read_scalar(source: TensorSource, name: str) -> float:
    """Return the value of a one-element tensor.

    Raises:
        SourceError: It has more elements, or is not a positive finite number.
    """
    info = source.tensors[name]
    if info.rows * info.cols != 1:
        raise SourceError(
            f"{info.file}: {name} has the shape {list(info.shape)}; expected one value",
            hint="only FP8 with one scale per tensor is read",
        )
    value = float(source.read(name, 0, 1).astype(np.float32)[0, 0])
    if not np.isfinite(value) or value <= 0:
        raise SourceError(f"{info.file}: {name} is {value}; expected a positive number")
    return value


@dataclass(frozen=True, slots=True)
class Rescaled:
    """Float8 values of one scale as float8 values of another: value * own / common, in float32, rounded once."""

    base: Matrix
    own: float
    common: float

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
        real = self.base.read(start, stop).astype(np.float32) * np.float32(self.own)
        rescaled: Array = (real / np.float32(self.common)).astype(numpy_dtype(FP8))
        return rescaled

    def origin(self) -> str:
        """As the base."""
        return self.base.origin()


class SourceFp8(Scheme):
    """Weights with ``weight_scale`` and ``input_scale``, one number each, are taken over.

    q, k and v need one common scale: each is re-quantized to the largest of the three.
    """

    ignored = ((r".*\.(k_scale|v_scale)", "scale of the KV cache, which is not asked to be FP8"),)

    def __init__(self, context: SchemeContext) -> None:
        """Look at the source's scales."""
        self._context = context
        self.quantization = {"quant_algo": "FP8"}
        kv_scales = any(re.fullmatch(self.ignored[0][0], name) for name in context.source.tensors)
        if kv_scales and context.options.kv_cache is None:
            self.warnings = ("the source carries scales of an FP8 KV cache, which were left out: ask for kv_cache fp8",)

    def accepts(self, info: TensorInfo, rule: Rule) -> bool:
        """Take float8 for linear layers and plain types elsewhere."""
        return info.dtype == FP8 if is_linear_weight(rule) else info.dtype in PLAIN_FLOATS

    def expand(self, bound: Bound) -> Iterator[Bound]:
        """Add the two scales to each linear layer."""
        if not is_linear_weight(bound.rule):
            yield bound
            return
        weights = [self._scale(name, "weight_scale", bound.name) for name in bound.sources]
        inputs = [self._scale(name, "input_scale", bound.name) for name in bound.sources]
        common = max(weights)
        parts = bound.parts
        if len(parts) > 1:
            parts = tuple(Rescaled(part, own, common) for part, own in zip(parts, weights, strict=True))
        yield replace(bound, rule=replace(bound.rule, dtype=FP8), parts=parts)
        yield constant(f"{bound.module}.weights_scaling_factor", [common])
        yield constant(f"{bound.module}.activation_scaling_factor", [max(inputs)])

    def _scale(self, weight: str, kind: str, target: str) -> float:
        name = weight.removesuffix("weight") + kind
        if not self._context.ledger.consume(name, target):
            # The ledger reports it with all others.
            return 1.0
        return read_scalar(self._context.source, name)


@dataclass(frozen=True, slots=True)
class _Columns:
    """Some columns of a matrix, clamped, in float32."""

    base: Matrix
    first: int
    last: int

    def read(self, start: int, stop: int) -> Array:
        raw = self.base.read(start, stop)[:, self.first : self.last]
        if largest_magnitude(np.ascontiguousarray(raw)) == float("inf"):
            raise SourceError(
                f"{self.base.origin()}: holds NaN or infinite values; expected finite weights",
                hint="the file is damaged or training diverged; fetch the model again",
            )
        return np.clip(raw.astype(np.float32), np.float32(CLAMP[0]), np.float32(CLAMP[1]))


def row_scales(values: Array) -> Array:
    """Return amax / 448 of each row, at least 1 / (448 * 512). values: [rows, cols], float32 -> [rows, 1]."""
    scales: Array = np.maximum(np.abs(values).max(axis=1, keepdims=True) / _LARGEST, _SMALLEST_SCALE)
    return scales


@dataclass(frozen=True, slots=True)
class RowQuantized:
    """Some columns of a matrix, quantized to float8 by rows."""

    base: Matrix
    first: int
    last: int

    @property
    def rows(self) -> int:
        """As the base."""
        return self.base.rows

    @property
    def cols(self) -> int:
        """Columns taken."""
        return self.last - self.first

    def read(self, start: int, stop: int) -> Array:
        """Return float8 rows."""
        values = _Columns(self.base, self.first, self.last).read(start, stop)
        return np.clip(values / row_scales(values), -_LARGEST, _LARGEST).astype(numpy_dtype(FP8))

    def origin(self) -> str:
        """As the base."""
        return self.base.origin()


@dataclass(frozen=True, slots=True)
class RowScales:
    """The scales that belong to :class:`RowQuantized`."""

    base: Matrix
    first: int
    last: int

    @property
    def rows(self) -> int:
        """As the base."""
        return self.base.rows

    @property
    def cols(self) -> int:
        """One scale per row."""
        return 1

    def read(self, start: int, stop: int) -> Array:
        """Return float32 scales: [stop - start, 1]."""
        return row_scales(_Columns(self.base, self.first, self.last).read(start, stop))

    def origin(self) -> str:
        """As the base."""
        return self.base.origin()


class RowwiseFp8(Scheme):
    """Weights quantized by output rows, each rank from the columns it holds; activations are quantized at run time."""

    def __init__(self) -> None:
        """Set what the config says."""
        self.quantization = {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "clamp_val": list(CLAMP)}

    def finish(self, target: Target) -> Iterator[Target]:
        """Quantize what a rank holds: dense and proj have scales of their own on each rank."""
        if not is_linear_weight(target.rule):
            yield target
            return
        weights, scales = [], []
        for segment in target.shard.segments:
            cut = (segment.matrix, segment.first, segment.last)
            weights.append(Segment(RowQuantized(*cut), 0, segment.last - segment.first, segment.row))
            scales.append(Segment(RowScales(*cut), 0, 1, segment.row))
        rows, cols = target.shard.rows, target.shard.cols
        yield replace(target, dtype=FP8, shard=Shard(rows, cols, tuple(weights)))
        name = target.name.removesuffix("weight") + "per_channel_scale"
        yield replace(target, name=name, shape=(rows,), dtype="float32", shard=Shard(rows, 1, tuple(scales)))
