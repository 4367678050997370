"""INT4 weights in groups with activation-aware scaling, alone (W4A16_AWQ) or with FP8 activations (W4A8_AWQ).

The input is multiplied by ``prequant``; the weight is divided by it first. A group of input columns of one row shares
a scale, clip / 7. Two rows are packed in a byte, the even one in the low half. Factors and clips come from a search
(:mod:`pipeline.calibration.awq`); this module only writes them down.

Source: what nvidia-modelopt 0.47 exports for TensorRT-LLM; verified against such an export.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from pipeline.checkpoint.binding import Bound, Form
from pipeline.checkpoint.dtypes import Array, cast_checked, numpy_dtype
from pipeline.checkpoint.families import Layout
from pipeline.checkpoint.quantization.ranges import Ranges
from pipeline.checkpoint.quantization.scheme import (
    Constant,
    Scheme,
    SchemeContext,
    beside,
    constant,
    is_linear_weight,
    only_for,
    shared_inputs,
)
from pipeline.checkpoint.views import Derived, Matrix
from pipeline.errors import ConfigError, SourceError

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
# Codes reach from -8 to 7; scales are made for 7, so -8 only occurs for clipped values.
_LARGEST = np.float32(7.0)


def int4_codes(weight: Array, scales: Array) -> Array:
    """Return the codes of a weight: [rows, in] float32 by scales [rows, in / group] -> int8 in -8 … 7."""
    grouped = weight.reshape(len(weight), scales.shape[1], -1)
    codes = np.clip(np.rint(grouped / scales[:, :, None]), -8, 7)
    return codes.reshape(weight.shape).astype(np.int8)


def pack_rows(codes: Array) -> Array:
    """Pack int4 codes [rows, in] two rows to a byte: int8 [rows / 2, in], the even row in the low half."""
    low, high = codes[0::2].view(np.uint8) & 15, codes[1::2].view(np.uint8) << 4
    packed: Array = (low | high).view(np.int8)
    return packed


@dataclass(frozen=True, slots=True, eq=False)
class PackedRows(Derived):
    """int4 codes of another matrix, two of its rows in a byte."""

    @property
    def rows(self) -> int:
        """Half of the base."""
        return self.base.rows // 2

    def read(self, start: int, stop: int) -> Array:
        """Return int8 rows."""
        return pack_rows(self.base.read(2 * start, 2 * stop))


@dataclass(frozen=True, slots=True, eq=False)
class GroupCodes(Derived):
    """A weight divided by ``prequant`` and rounded to int4 codes.

    Attributes:
        prequant: [in], float32.
        scales: [out, in / group], float32.
        dtype: Type of the checkpoint, to which the weight is rounded first.
    """

    prequant: Array
    scales: Array
    dtype: str

    def read(self, start: int, stop: int) -> Array:
        """Return int8 rows, unpacked."""
        weight = cast_checked(self.base.read(start, stop), self.dtype, self.origin()).astype(np.float32)
        return int4_codes(weight / self.prequant, self.scales[start:stop])


class Int4Groups(Scheme):
    """W4A16_AWQ, and W4A8_AWQ with FP8 activations."""

    def __init__(self, context: SchemeContext, ranges: Ranges | None, *, fp8_activations: bool) -> None:
        """Check that the scheme fits.

        Raises:
            ConfigError: Another architecture, no search results, or widths that the group does not divide.
        """
        quant, group = context.options.quant, context.options.group_size
        only_for(context, ARCHITECTURES, f"quant {quant}")
        if ranges is None:
            raise ConfigError(f"quant is {quant!r}; expected scales from a search", hint="give --calibration TEXT")
        refuse_group_size(context, group)
        self._context, self._ranges, self._group, self._fp8 = context, ranges, group, fp8_activations
        self.quantization = {
            "quant_algo": "W4A8_AWQ" if fp8_activations else "W4A16_AWQ",
            "group_size": group,
            "has_zero_point": False,
            "pre_quant_scale": True,
        }

    def expand(self, bound: Bound) -> Iterator[Bound]:
        """Quantize each linear layer and add its scales."""
        if not is_linear_weight(bound.rule):
            yield bound
            return
        linears = [name.removesuffix(".weight") for name in bound.sources]
        prequant = self._prequant(bound)
        scales = [self._scales(name, part) for name, part in zip(linears, bound.parts, strict=True)]
        codes = (
            PackedRows(GroupCodes(part, prequant, scale, self._context.dtype))
            for part, scale in zip(bound.parts, scales, strict=True)
        )
        yield replace(bound, rule=replace(bound.rule, dtype="int8"), parts=tuple(codes))
        what = f"{bound.module}.weights_scaling_factor"
        yield beside(bound, "weights_scaling_factor", [Constant(s, what) for s in scales], form=Form.MATRIX)
        yield prequant_factor(bound, prequant)
        if self._fp8:
            second = max(float(scale.max()) for scale in scales) * 7.0 / 448.0
            largest = float((self._ranges.input(linears[0]) * prequant).max())
            yield constant(f"{bound.module}.weights_scaling_factor_2", [second])
            yield constant(f"{bound.module}.activation_scaling_factor", [largest / 448.0])

    def _prequant(self, bound: Bound) -> Array:
        """Return the factors of the input, as they will be stored; common to all that share the input."""
        found = [self._ranges.prequant(name) for name in shared_inputs(bound)]
        if any(not np.array_equal(found[0], other) for other in found[1:]):
            raise SourceError(f"{bound.module}: the factors of {', '.join(shared_inputs(bound))} differ")
        if not (found[0] > 0).all():
            raise SourceError(f"{bound.module}: prequant holds zeros; expected positive factors")
        stored: Array = found[0].astype(numpy_dtype(self._context.dtype)).astype(np.float32)
        return stored

    def _scales(self, linear: str, weight: Matrix) -> Array:
        clip = self._ranges.clip(linear)
        expected = (weight.rows, weight.cols // self._group)
        if clip.shape != expected:
            raise SourceError(f"{linear}.clip is {list(clip.shape)}; expected {list(expected)}: another group size")
        scales: Array = np.where(clip > 0, clip, np.float32(1.0)) / _LARGEST
        return scales


def prequant_factor(bound: Bound, prequant: Array) -> Bound:
    """Return ``prequant_scaling_factor``: a value per input, in the checkpoint's type, cut like the weight's inputs."""
    layout = Layout.COLUMN if bound.rule.layout is Layout.ROW else Layout.WHOLE
    column = Constant(prequant.reshape(-1, 1), f"{bound.module}.prequant_scaling_factor")
    return beside(bound, "prequant_scaling_factor", [column], layout=layout, dtype=None)


def refuse_group_size(context: SchemeContext, group: int) -> None:
    """Check that the group divides the input width of every linear on a rank, and that rows can be paired.

    Raises:
        ConfigError: Names the layer, its width and what would work.
    """
    a, tp = context.architecture, context.options.tp
    widths = {
        "attention.qkv": a.hidden_size,
        "attention.dense": a.num_heads * a.head_dim // tp,
        "mlp.fc": a.hidden_size,
        "mlp.proj": a.intermediate_size // tp,
    }
    for name, width in widths.items():
        if width % group:
            fitting = [size for size in (128, 64, 32, 16) if all(w % size == 0 for w in widths.values())]
            raise ConfigError(
                f"group_size is {group}: {name} has {width} inputs on a rank at tp {tp}, no multiple of it",
                hint=f"group sizes that fit: {', '.join(map(str, fitting)) or 'none'}; or choose another tp",
            )
    if a.intermediate_size // tp % 2 or a.head_dim % 2:
        raise ConfigError(f"quant {context.options.quant}: rows of a rank cannot be paired at tp {tp}")
