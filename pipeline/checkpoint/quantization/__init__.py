"""Quantization schemes of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.checkpoint.binding import Bound, LayerNames, Target
from pipeline.checkpoint.families import Rule
from pipeline.checkpoint.options import GROUPED
from pipeline.checkpoint.quantization.fp8 import SOURCE_ARCHITECTURES, RowwiseFp8, SourceFp8, holds_fp8
from pipeline.checkpoint.quantization.kv_cache import kv_cache
from pipeline.checkpoint.quantization.ranges import Ranges
from pipeline.checkpoint.quantization.scheme import Scheme, SchemeContext, only_for
from pipeline.checkpoint.readers import TensorInfo, TensorSource
from pipeline.checkpoint.readers.packed import PackedSource
from pipeline.errors import ConfigError, SourceError

__all__ = ["Scheme", "SchemeContext", "choose_scheme"]

_ROWWISE = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
# Their weights stay as they are: the engine builder packs them for its GPU.
_WEIGHT_ONLY = {"int8": "W8A16", "int4": "W4A16"}


class WeightOnly(Scheme):
    """INT8 or INT4 weights, packed when the engine is built; the checkpoint holds 16-bit weights and says so."""

    def __init__(self, kind: str) -> None:
        """Set what the config says."""
        self.quantization = {"quant_algo": _WEIGHT_ONLY[kind]}


class WithKvCache(Scheme):
    """A scheme together with a quantized KV cache."""

    def __init__(self, weights: Scheme, cache: Any) -> None:
        """Join the two."""
        self._weights = weights
        self._cache = cache
        self.quantization: Mapping[str, Any] = {**weights.quantization, "kv_cache_quant_algo": cache.algorithm}
        self.ignored = weights.ignored
        self.warnings = (*weights.warnings, *cache.warnings)

    def accepts(self, info: TensorInfo, rule: Rule) -> bool:
        """As the weights' scheme."""
        return self._weights.accepts(info, rule)

    def expand(self, bound: Bound) -> Iterator[Bound]:
        """As the weights' scheme."""
        return self._weights.expand(bound)

    def finish(self, target: Target) -> Iterator[Target]:
        """As the weights' scheme."""
        return self._weights.finish(target)

    def layer_tensors(self, names: LayerNames) -> Iterator[Bound]:
        """Add the scale of the cache."""
        yield from self._weights.layer_tensors(names)
        yield from self._cache.layer_tensors(names)


def choose_scheme(context: SchemeContext) -> Scheme:
    """Return the scheme that options and source ask for.

    Raises:
        ConfigError: The scheme does not fit the source or the architecture, or lacks measured ranges.
        SourceError: The source is quantized in a way that is not read.
    """
    ranges = Ranges(context.options.ranges) if context.options.ranges is not None else None
    weights = _weights(context, ranges)
    cache = kv_cache(context, ranges)
    return weights if cache is None else WithKvCache(weights, cache)


def _weights(context: SchemeContext, ranges: Ranges | None) -> Scheme:
    quant = context.options.quant
    if isinstance(context.source, PackedSource) or _holds_int8(context.source):
        if quant is not None:
            raise ConfigError(f"quant is {quant!r}, but the source's weights already are integers; expected none")
        only_for(context, SOURCE_ARCHITECTURES, "a quantized source")
        from pipeline.checkpoint.quantization.taken_over import SourceGroups, SourceInt8

        packed = isinstance(context.source, PackedSource)
        return SourceGroups(context, context.source) if packed else SourceInt8(context)  # type: ignore[arg-type]
    fp8_source = holds_fp8(context.source)
    _refuse_foreign_quantization(context, fp8_source)
    if fp8_source and quant in (None, "fp8_rowwise") and _has_row_scales(context.source):
        only_for(context, SOURCE_ARCHITECTURES, "an FP8 source")
        from pipeline.checkpoint.quantization.taken_over import SourceRowwiseFp8

        return SourceRowwiseFp8(context)
    if fp8_source:
        if quant not in (None, "fp8"):
            raise ConfigError(f"quant is {quant!r}, but the source's weights already are FP8; expected none or fp8")
        only_for(context, SOURCE_ARCHITECTURES, "an FP8 source")
        return SourceFp8(context)
    if quant is None:
        return Scheme()
    if context.architecture.num_experts:
        raise ConfigError(f"quant is {quant!r}; expected none for {context.architecture.name} (mixture of experts)")
    if quant in _WEIGHT_ONLY:
        return WeightOnly(quant)
    if quant == "fp8_rowwise":
        only_for(context, _ROWWISE, "quant fp8_rowwise")
        return RowwiseFp8()
    if quant == "smoothquant":
        from pipeline.checkpoint.quantization.smoothquant import SmoothQuant

        return SmoothQuant(context, ranges)
    if quant == "int8_sq":
        from pipeline.checkpoint.quantization.int8_sq import Int8PerChannel

        return Int8PerChannel(context, ranges)
    if quant in GROUPED:
        from pipeline.checkpoint.quantization.grouped_int4 import Int4Groups

        return Int4Groups(context, ranges, fp8_activations=quant == "w4a8_awq")
    if quant == "nvfp4":
        from pipeline.checkpoint.quantization.nvfp4 import Nvfp4

        return Nvfp4(context, ranges)
    from pipeline.checkpoint.quantization.fp8_static import StaticFp8

    return StaticFp8(context, ranges)


def _holds_int8(source: TensorSource) -> bool:
    """Say whether weights are int8 with a scale beside them."""
    return any(
        info.dtype == "int8" and name.endswith(".weight") and f"{name}_scale" in source.tensors
        for name, info in source.tensors.items()
    )


def _has_row_scales(source: TensorSource) -> bool:
    """Say whether FP8 weights have a scale per output and activations none."""
    names = source.tensors
    has_rows = any(info.rows > 1 for name, info in names.items() if name.endswith(".weight_scale"))
    return has_rows and not any(name.endswith(".input_scale") for name in names)


def _refuse_foreign_quantization(context: SchemeContext, fp8_source: bool) -> None:
    stated = context.architecture.raw.get("quantization_config")
    if not isinstance(stated, Mapping) or fp8_source:
        return
    packed = [name for name in context.source.tensors if re.search(r"\.(qweight|weight_packed|qzeros)$", name)]
    if packed:
        raise SourceError(
            f"{context.source.path}: weights are quantized by {stated.get('quant_method', 'an unknown method')} "
            f"({packed[0]}); expected plain or FP8 weights",
            hint="start from the unquantized model",
        )
