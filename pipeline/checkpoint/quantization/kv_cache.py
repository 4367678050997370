"""Scales of a quantized KV cache: one number per layer that multiplies the stored 8-bit value to get the real one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from pipeline.checkpoint.binding import Bound, LayerNames
from pipeline.checkpoint.quantization.fp8 import read_scalar
from pipeline.checkpoint.quantization.ranges import Ranges
from pipeline.checkpoint.quantization.scheme import SchemeContext, constant
from pipeline.errors import ConfigError, SourceError

_NAME = "attention.kv_cache_scaling_factor"
# Pairs of names under which FP8 checkpoints keep the scales of keys and values.
_SOURCE_SCALES = (("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"), ("self_attn.k_scale", "self_attn.v_scale"))


class Int8KvCache:
    """INT8: amax / 127 of the cache; without it of the outputs of q, k and v, as NVIDIA's converter does."""

    algorithm = "INT8"
    warnings: tuple[str, ...] = ()

    def __init__(self, ranges: Ranges | None) -> None:
        """Take the measured ranges.

        Raises:
            ConfigError: There are none.
        """
        if ranges is None:
            raise ConfigError(
                "kv_cache is 'int8'; expected measured ranges with it", hint="give --ranges RANGES.safetensors"
            )
        self._ranges = ranges

    def layer_tensors(self, names: LayerNames) -> Iterator[Bound]:
        """Yield the scale of a layer."""
        amax = self._ranges.cached(names.source)
        if amax is None:
            amax = max(self._ranges.output(f"{names.source}self_attn.{part}_proj").max() for part in "qkv")
        yield constant(names.target + _NAME, [float(np.float32(amax) / np.float32(127.0))])


class Fp8KvCache:
    """FP8: the larger of the source's two scales; without them measured amax / 448 but at least the floor; else 1."""

    algorithm = "FP8"

    def __init__(self, context: SchemeContext, ranges: Ranges | None) -> None:
        """Look for scales in the source."""
        self._context = context
        self._ranges = ranges
        self._floor = context.options.kv_scale_floor
        self._stated = any(name.endswith(("k_scale", "v_scale")) for name in context.source.tensors)
        self.warnings: tuple[str, ...] = ()
        if not self._stated and ranges is None:
            self.warnings = ("no scale of the KV cache was measured: 1.0 is used, values beyond 448 would be cut",)

    def layer_tensors(self, names: LayerNames) -> Iterator[Bound]:
        """Yield the scale of a layer."""
        tensors = self._context.source.tensors
        for pair in _SOURCE_SCALES:
            present = [names.source + name for name in pair if names.source + name in tensors]
            if present:
                for name in present:
                    self._context.ledger.consume(name, names.target + _NAME)
                scale = max(read_scalar(self._context.source, name) for name in present)
                yield constant(names.target + _NAME, [scale])
                return
        if self._stated:
            raise SourceError(
                f"{self._context.source.path}: {names.source}self_attn has no scale of the KV cache, other layers do"
            )
        scale = 1.0
        if self._ranges is not None:
            amax = self._ranges.cached(names.source)
            if amax is None:
                amax = max(self._ranges.output(f"{names.source}self_attn.{part}_proj").max() for part in "kv")
            scale = max(self._floor, float(np.float32(amax) / np.float32(448.0)))
        yield constant(names.target + _NAME, [scale])


def kv_cache(context: SchemeContext, ranges: Ranges | None) -> Any:
    """Return the KV cache of the options, None if it is not quantized."""
    if context.options.kv_cache == "int8":
        return Int8KvCache(ranges)
    if context.options.kv_cache == "fp8":
        return Fp8KvCache(context, ranges)
    return None
