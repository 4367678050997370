"""Schemes of sources that are quantized already: codes and scales are taken over, nothing is rounded again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from pipeline.checkpoint.binding import Bound, Form, LayerNames
from pipeline.checkpoint.dtypes import PLAIN_FLOATS, Array
from pipeline.checkpoint.families import Layout, Rule
from pipeline.checkpoint.quantization.fp8 import CLAMP, FP8, read_scalar
from pipeline.checkpoint.quantization.grouped_int4 import PackedRows, prequant_factor, refuse_group_size
from pipeline.checkpoint.quantization.scheme import Scheme, SchemeContext, beside, constant, is_linear_weight
from pipeline.checkpoint.readers import TensorInfo
from pipeline.checkpoint.readers.packed import PackedSource
from pipeline.checkpoint.views import Derived, Matrix, Tensor
from pipeline.errors import SourceError

_PORTABLE = (
    "codes and scales are in a portable layout, which the reference engine executes; the engine builder wants that of "
    "its GPU: convert for it with converter=nvidia"
)


@dataclass(frozen=True, slots=True, eq=False)
class _Float32(Derived):
    """A matrix widened to float32, or one number repeated for every row."""

    repeated: int = 0

    @property
    def rows(self) -> int:
        """As the base, or as often as repeated."""
        return self.repeated or self.base.rows

    def read(self, start: int, stop: int) -> Array:
        """Return float32 rows."""
        if self.repeated:
            return np.repeat(self.base.read(0, 1).astype(np.float32), stop - start, axis=0)
        values: Array = self.base.read(start, stop).astype(np.float32)
        return values


class _TakenOver(Scheme):
    """Common parts: which tensors are codes, and how those beside them are found and booked."""

    codes = "int8"

    def __init__(self, context: SchemeContext) -> None:
        self._context = context

    def accepts(self, info: TensorInfo, rule: Rule) -> bool:
        """Take codes for linear layers and plain types elsewhere."""
        return info.dtype == self.codes if is_linear_weight(rule) else info.dtype in PLAIN_FLOATS

    def _beside(self, bound: Bound, suffix: str) -> list[Matrix]:
        """Book ``X.suffix`` of every source linear of a bound weight and return them."""
        found: list[Matrix] = []
        for weight in bound.sources:
            name = weight.removesuffix("weight") + suffix
            if self._context.ledger.consume(name, bound.name):
                found.append(Tensor(self._context.source, name))
        return found

    def _row_scales(self, bound: Bound) -> list[Matrix]:
        """Return ``weight_scale`` of every source linear with a value per row: [out, 1] each, float32."""
        pairs = zip(self._beside(bound, "weight_scale"), bound.parts, strict=True)
        return [_Float32(scale, 0 if scale.rows == part.rows else part.rows) for scale, part in pairs]


class SourceGroups(_TakenOver):
    """INT4 or INT8 weights in groups: GPTQ, AutoAWQ, compressed-tensors."""

    def __init__(self, context: SchemeContext, source: PackedSource) -> None:
        """Look at the groups.

        Raises:
            ConfigError: A group does not fit a rank.
        """
        super().__init__(context)
        self._bits, self._zeros = source.bits, source.has_zeros
        group = _common_group(source)
        if group > 0:
            refuse_group_size(context, group)
        self._is_awq = self._bits == 4 and not self._zeros and group > 0
        self.quantization = {
            "quant_algo": "W4A16_AWQ" if self._is_awq else f"W{self._bits}A16_GPTQ",
            "group_size": group,
            "has_zero_point": self._zeros,
            "pre_quant_scale": self._is_awq,
        }
        if not self._is_awq:
            self.warnings = (_PORTABLE,)

    def expand(self, bound: Bound) -> Iterator[Bound]:
        """Take codes and scales over."""
        if not is_linear_weight(bound.rule):
            yield bound
            return
        parts: tuple[Matrix, ...] = bound.parts
        if self._bits == 4:
            parts = tuple(PackedRows(part) for part in parts)
        yield replace(bound, rule=replace(bound.rule, dtype="int8"), parts=parts)
        scales = self._beside(bound, "group_scale")
        layout = bound.rule.layout
        if layout is Layout.ROW and scales and scales[0].cols == 1:
            layout = Layout.WHOLE
        yield beside(bound, "weights_scaling_factor", scales, form=Form.MATRIX, layout=layout)
        if self._zeros:
            yield beside(bound, "zero", self._beside(bound, "group_zero"), form=Form.MATRIX, layout=layout)
        if self._is_awq:
            yield prequant_factor(bound, np.ones(bound.parts[0].cols, np.float32))


def _common_group(source: PackedSource) -> int:
    """Return the group size, -1 where a row is one group.

    Raises:
        SourceError: Layers have different ones.
    """
    groups = {
        (source.tensors[name.removesuffix("group_scale") + "weight"].cols, info.cols)
        for name, info in source.tensors.items()
        if name.endswith(".group_scale")
    }
    sizes = {width // count for width, count in groups}
    if len(sizes) == 1 and any(count > 1 for _, count in groups):
        return int(sizes.pop())
    if all(count == 1 for _, count in groups):
        return -1
    raise SourceError(f"{source.path}: layers have groups of {sorted(sizes)} inputs; expected one size")


class SourceRowwiseFp8(_TakenOver):
    """FP8 weights with a scale per output; activations are scaled per token at run time."""

    codes = FP8
    ignored = ((r".*\.input_scale_ub", "bound of the activations, which the config's clamp_val states"),)

    def __init__(self, context: SchemeContext) -> None:
        """Set what the config says."""
        super().__init__(context)
        self.quantization = {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "clamp_val": list(CLAMP)}

    def expand(self, bound: Bound) -> Iterator[Bound]:
        """Take codes and scales over."""
        if not is_linear_weight(bound.rule):
            yield bound
            return
        yield replace(bound, rule=replace(bound.rule, dtype=FP8))
        layout = Layout.WHOLE if bound.rule.layout is Layout.ROW else bound.rule.layout
        yield beside(bound, "per_channel_scale", self._row_scales(bound), layout=layout)


class SourceInt8(_TakenOver):
    """INT8 weights with a scale per output and INT8 activations: per token at run time, or by a stored scale."""

    def __init__(self, context: SchemeContext) -> None:
        """See whether activations have stored scales."""
        super().__init__(context)
        self._is_static = any(name.endswith(".input_scale") for name in context.source.tensors)
        algorithm = "W8A8_SQ_PER_CHANNEL" + ("" if self._is_static else "_PER_TOKEN_PLUGIN")
        self.quantization = {"quant_algo": algorithm}

    def expand(self, bound: Bound) -> Iterator[Bound]:
        """Take codes and scales over; factors are one."""
        if not is_linear_weight(bound.rule):
            yield bound
            return
        yield replace(bound, rule=replace(bound.rule, dtype="int8"))
        layout = Layout.WHOLE if bound.rule.layout is Layout.ROW else bound.rule.layout
        ones = np.ones(bound.parts[0].cols, np.float32)
        scales = self._row_scales(bound)
        if self._is_static:
            yield beside(bound, "weights_scaling_factor", scales, layout=layout)
            yield prequant_factor(bound, ones)
            inputs = [read_scalar(self._context.source, part.name) for part in self._input_scales(bound)]
            yield constant(f"{bound.module}.activation_scaling_factor", [max(inputs)])
            return
        yield beside(bound, "per_channel_scale", scales, layout=layout, form=Form.ROW)
        if bound.rule.layout is Layout.ROW:
            yield constant(f"{bound.module}.smoother", ones, form=Form.ROW, layout=Layout.COLUMN)

    def _input_scales(self, bound: Bound) -> list[Tensor]:
        return [part for part in self._beside(bound, "input_scale") if isinstance(part, Tensor)]

    def layer_tensors(self, names: LayerNames) -> Iterator[Bound]:
        """Add the dummy scales that the plugins want."""
        if not self._is_static:
            for norm in ("input_layernorm", "post_layernorm"):
                yield constant(f"{names.target}{norm}.scale_to_int", [1.0])
