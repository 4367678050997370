"""Quantized linear layers and caches, executed in float32 with the roundings the engine would make.

Weights become the float32 numbers that their codes stand for. Activations are rounded to the codes the scheme has
(:class:`~.linear.Prepare`), so that the product is that of the quantized kernels up to the order of summation.
Letters: N outputs, K inputs, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from .config import ModelConfig
from .errors import EngineError
from .linear import Linear, Prepare
from .rounding import (
    NVFP4_BLOCK,
    BlockFp4,
    DynamicFp8,
    DynamicInt8,
    KvInt8,
    Scaled,
    StaticFp8,
    StaticInt8,
    round_e4m3,
)
from .safetensors_file import DTYPES, to_float32
from .weights import Checkpoint, Join

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LinearSource:
    """Where a linear layer is stored.

    Attributes:
        prefix: ``transformer.layers.0.mlp.fc``.
        shape: (N, K) of the whole layer.
        join: How its weight is divided over ranks: ``rows``, ``qkv``, ``halves`` by outputs, ``columns`` by inputs.
        input_scale: Tensor with the static input scale of the smoothquant plugin flavours.
    """

    checkpoint: Checkpoint
    config: ModelConfig
    prefix: str
    shape: tuple[int, int]
    join: Join
    input_scale: str

    def weight(self, shape: tuple[int, int] | None = None) -> npt.NDArray[Any]:
        """Return the stored weight; ``shape`` where packing makes it another than the layer's."""
        return self.checkpoint.tensor(f"{self.prefix}.weight", self.join, shape or self.shape)

    def per_output(self, suffix: str) -> F32:
        """Return a value per output as [N, 1], or one for all as [1, 1]."""
        name = f"{self.prefix}.{suffix}"
        if self.checkpoint.stored_size(name) == 1:
            return self.checkpoint.vector(name, "same", 1)[:, None]
        return self.checkpoint.vector(name, "same" if self.join == "columns" else self.join, self.shape[0])[:, None]

    def per_input(self, suffix: str) -> F32:
        """Return a value per input as [K, 1]."""
        join: Join = "columns" if self.join == "columns" else "same"
        return self.checkpoint.vector(f"{self.prefix}.{suffix}", join, self.shape[1])[:, None]

    def per_group(self, suffix: str, size: int) -> npt.NDArray[Any]:
        """Return a value per output and group of inputs as [N, K/size], in its stored type; -1 is a whole row."""
        if size < 0:
            join: Join = "same" if self.join == "columns" else self.join
            return self.checkpoint.tensor(f"{self.prefix}.{suffix}", join, (self.shape[0], 1))
        if self.shape[1] % size:
            raise EngineError(f"{self.prefix} has {self.shape[1]} inputs, no multiple of the group size {size}")
        return self.checkpoint.tensor(f"{self.prefix}.{suffix}", self.join, (self.shape[0], self.shape[1] // size))

    def number(self, suffix: str) -> float:
        """Return a single value of this layer."""
        return self.named_number(f"{self.prefix}.{suffix}")

    def named_number(self, name: str) -> float:
        """Return a single value by its full name."""
        return positive_number(self.checkpoint, name)


def positive_number(checkpoint: Checkpoint, name: str) -> float:
    """Return a scale.

    Raises:
        EngineError: It is zero, negative, NaN or infinite: scales never are.
    """
    value = float(checkpoint.vector(name, "same", 1)[0])
    if not (math.isfinite(value) and value > 0):
        raise EngineError(f"{checkpoint.folder}: scale {name} is {value}; expected a positive number")
    return value


def _fp8(source: LinearSource) -> Linear:
    weight = _as_e4m3(source.weight()) * np.float32(source.number("weights_scaling_factor"))
    return Linear(weight, prepare=StaticFp8(source.number("activation_scaling_factor")))


def _fp8_rowwise(source: LinearSource) -> Linear:
    weight = _as_e4m3(source.weight()) * source.per_output("per_channel_scale")
    return Linear(weight, prepare=DynamicFp8(source.config.quantization.clamp))


def _int8_modelopt(source: LinearSource) -> Linear:
    weight = _as_int8(source.weight()) * source.per_output("weights_scaling_factor")
    scale = source.number("activation_scaling_factor")
    rounding = StaticInt8(1 / scale, scale)
    return Linear(weight, prepare=Scaled(to_float32(source.per_input("prequant_scaling_factor")), rounding))


def _int8_plugin(source: LinearSource) -> Linear:
    is_per_token = "PER_TOKEN" in str(source.config.quantization.algo)
    scales = source.per_output("per_channel_scale")
    prepare: Prepare = DynamicInt8()
    if not is_per_token:
        # The stored scale leads to an int8 output, act_scale from there to the real value: their product dequantizes
        # the accumulator. The input stays integer.
        scales = scales * np.float32(source.number("act_scale"))
        prepare = StaticInt8(source.named_number(source.input_scale), 1.0)
    if source.join == "columns":
        prepare = Scaled(np.float32(1) / source.per_input("smoother"), prepare)
    return Linear(_as_int8(source.weight()) * scales, prepare=prepare)


def _weight_only(bits: int) -> Callable[[LinearSource], Linear]:
    largest = 2 ** (bits - 1)

    def read(source: LinearSource) -> Linear:
        name = f"{source.prefix}.weight"
        if bits == 4 and source.checkpoint.has(name) and source.checkpoint.stored_type(name) == np.int8:
            return Linear(_unpack_int4(source) * source.per_output("weights_scaling_factor"))
        stored = source.weight()
        if stored.dtype == np.int8:
            return Linear(_as_int8(stored) * source.per_output("weights_scaling_factor"))
        weight = to_float32(stored)
        return Linear(_round_weight(weight, largest, DTYPES_BY_NAME[source.config.dtype]))

    return read


def _round_weight(weight: F32, largest: int, scale_dtype: np.dtype[Any]) -> F32:
    """Quantize per output as the builder does: symmetric, ties away from zero, the scale kept in the model's type."""
    scale = np.abs(weight).max(axis=-1, keepdims=True) / np.float32(largest)
    scale[scale == 0] = 1
    scaled = weight / scale
    codes = np.clip(np.trunc(scaled + np.copysign(np.float32(0.5), scaled)), -largest, largest - 1)
    rounded: F32 = codes * scale.astype(scale_dtype).astype(np.float32)
    return rounded


def _awq(source: LinearSource) -> Linear:
    weight = _unpack_int4(source) * _spread(to_float32(_awq_scales(source)), source.shape)
    return Linear(weight, prepare=Scaled(to_float32(source.per_input("prequant_scaling_factor"))))


def _gptq(bits: int) -> Callable[[LinearSource], Linear]:
    def read(source: LinearSource) -> Linear:
        codes = _unpack_int4(source) if bits == 4 else _as_int8(source.weight())
        weight = codes * _spread(to_float32(_awq_scales(source)), source.shape)
        if source.checkpoint.has(f"{source.prefix}.zero"):
            zeros = source.per_group("zero", source.config.quantization.group_size)
            weight += _spread(to_float32(zeros), source.shape)
        return Linear(weight)

    return read


def _awq_fp8(source: LinearSource) -> Linear:
    second = np.float32(source.number("weights_scaling_factor_2"))
    weight = round_e4m3(_unpack_int4(source) * _spread(to_float32(_awq_scales(source)), source.shape) / second) * second
    rounding = StaticFp8(source.number("activation_scaling_factor"))
    return Linear(weight, prepare=Scaled(to_float32(source.per_input("prequant_scaling_factor")), rounding))


def _awq_scales(source: LinearSource) -> npt.NDArray[Any]:
    return source.per_group("weights_scaling_factor", source.config.quantization.group_size)


def _nvfp4(source: LinearSource) -> Linear:
    outputs, inputs = source.shape
    packed = source.weight((outputs, inputs // 2)).view(np.uint8)
    codes = np.empty(source.shape, np.uint8)
    codes[:, 0::2], codes[:, 1::2] = packed & 15, packed >> 4
    scales = to_float32(source.per_group("weights_scaling_factor", NVFP4_BLOCK))
    scales = scales * np.float32(source.number("weights_scaling_factor_2"))
    weight = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32) * _spread(scales, source.shape)
    return Linear(weight, prepare=BlockFp4(source.number("activation_scaling_factor")))


def _unpack_int4(source: LinearSource) -> F32:
    """Return the codes [N, K]: a byte holds output 2j in its low and 2j+1 in its high half, two's complement."""
    outputs, inputs = source.shape
    packed = source.weight((outputs // 2, inputs)).view(np.int8)
    codes = np.empty((outputs, inputs), np.int8)
    codes[0::2], codes[1::2] = (packed << 4) >> 4, packed >> 4
    return codes.astype(np.float32)


def _spread(scales: F32, shape: tuple[int, int]) -> F32:
    """Repeat a scale per group [N, K/g] to [N, K]."""
    return np.repeat(scales, shape[1] // scales.shape[1], axis=1)


def _as_e4m3(stored: npt.NDArray[Any]) -> F32:
    if stored.dtype.itemsize != 1:
        raise EngineError(f"a float8 weight is stored as {stored.dtype}")
    return np.asarray(stored.view(ml_dtypes.float8_e4m3fn), np.float32)


def _as_int8(stored: npt.NDArray[Any]) -> F32:
    if stored.dtype != np.int8:
        raise EngineError(f"an int8 weight is stored as {stored.dtype}")
    return stored.astype(np.float32)


DTYPES_BY_NAME: Mapping[str, np.dtype[Any]] = {
    "float16": DTYPES["F16"],
    "bfloat16": DTYPES["BF16"],
    "float32": DTYPES["F32"],
}

SCHEMES: Mapping[str, Callable[[LinearSource], Linear]] = {
    "FP8": _fp8,
    "FP8_PER_CHANNEL_PER_TOKEN": _fp8_rowwise,
    "W8A8_SQ_PER_CHANNEL": _int8_modelopt,
    "W8A8_SQ_PER_TENSOR_PLUGIN": _int8_plugin,
    "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN": _int8_plugin,
    "W8A8_SQ_PER_CHANNEL_PER_TENSOR_PLUGIN": _int8_plugin,
    "W8A8_SQ_PER_TENSOR_PER_TOKEN_PLUGIN": _int8_plugin,
    "W8A16": _weight_only(8),
    "W4A16": _weight_only(4),
    "W4A16_AWQ": _awq,
    "W4A16_GPTQ": _gptq(4),
    "W8A16_GPTQ": _gptq(8),
    "W4A8_AWQ": _awq_fp8,
    "NVFP4": _nvfp4,
}


def read_linear(source: LinearSource) -> Linear:
    """Read a linear layer, without its bias.

    Raises:
        EngineError: The algorithm is unknown, or a tensor is missing or of another type.
    """
    quantization = source.config.quantization
    if not quantization.covers(source.prefix):
        return Linear(to_float32(source.weight()))
    scheme = SCHEMES.get(str(quantization.algo))
    if scheme is None:
        raise EngineError(
            f"{source.checkpoint.folder}: quant_algo {quantization.algo!r} is not supported; "
            f"known are {', '.join(SCHEMES)}"
        )
    try:
        return scheme(source)
    except EngineError as error:
        raise EngineError(f"{source.prefix} ({quantization.algo}): {error}") from error


def read_experts(source: LinearSource, count: int) -> list[Linear]:
    """Read the linear layers of all experts, stored as one tensor [experts, N, K].

    Raises:
        EngineError: The algorithm is not one that stores experts in a known way.
    """
    checkpoint, quantization = source.checkpoint, source.config.quantization
    stored = checkpoint.tensor(f"{source.prefix}.weight", source.join, (count, *source.shape))
    if not quantization.covers(source.prefix):
        return [Linear(weight) for weight in to_float32(stored)]
    if quantization.algo in ("W8A16", "W4A16") and stored.dtype != np.int8:
        largest = 128 if quantization.algo == "W8A16" else 8
        return [Linear(w) for w in _round_weight(to_float32(stored), largest, DTYPES_BY_NAME[source.config.dtype])]
    if quantization.algo == "FP8":
        name = f"{source.prefix}.weights_scaling_factor"
        scales = np.broadcast_to(checkpoint.vector(name, "same", checkpoint.stored_size(name)), count)
        prepare = StaticFp8(source.number("activation_scaling_factor"))
        weights = zip(_as_e4m3(stored), scales, strict=True)
        return [Linear(weight * scale, prepare=prepare) for weight, scale in weights]
    raise EngineError(f"{checkpoint.folder}: experts with quant_algo {quantization.algo!r} are not supported")


def read_kv_rounding(checkpoint: Checkpoint, kind: str | None, prefix: str) -> Callable[[F32], F32] | None:
    """Return how an 8-bit cache rounds keys and values; None for a float cache.

    Raises:
        EngineError: The kind is unknown or its scale missing.
    """
    if kind is None:
        return None
    if kind not in ("INT8", "FP8"):
        raise EngineError(f"{checkpoint.folder}: kv_cache_quant_algo {kind!r} is not supported; known are INT8, FP8")
    scale = positive_number(checkpoint, f"{prefix}.kv_cache_scaling_factor")
    return KvInt8(scale) if kind == "INT8" else StaticFp8(scale)
