"""What quantization changes in the tensors of a layer, told from the config alone. No numpy here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pipeline.errors import SourceError

Spec = tuple[tuple[int, ...], str]

_LINEARS = ("attention.qkv", "attention.dense", "mlp.fc", "mlp.gate", "mlp.proj")
_ONE: Spec = ((1,), "float32")
_ONE_BY_ONE: Spec = ((1, 1), "float32")


def quantized_layer(config: Mapping[str, Any], layer: Mapping[str, Spec]) -> dict[str, Spec]:
    """Return the tensors of a layer under the config's quantization.

    Args:
        config: The checkpoint's config.json.
        layer: The layer's tensors without quantization, names below the layer.

    Raises:
        SourceError: The algorithm is not known here.
    """
    quantization = config.get("quantization") or {}
    algorithm = quantization.get("quant_algo")
    tensors = dict(layer)
    if algorithm == "FP8":
        tensors.update(_fp8(layer))
    elif algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
        tensors.update(_fp8_rowwise(layer))
    elif algorithm is not None and algorithm.startswith("W8A8_SQ_") and algorithm.endswith("_PLUGIN"):
        tensors.update(_smoothquant(layer, algorithm))
    elif isinstance(algorithm, str) and algorithm in _MODELOPT:
        for module, shape in _weights(layer):
            specs = _MODELOPT[algorithm](shape, str(config["dtype"]), int(quantization.get("group_size") or 128))
            if not quantization.get("has_zero_point"):
                specs.pop("zero", None)
            tensors.update({f"{module}.{name}": spec for name, spec in specs.items()})
    elif algorithm not in (None, "W8A16", "W4A16"):
        raise SourceError(f"config.json: no contract for quant_algo {algorithm}")
    if quantization.get("kv_cache_quant_algo") is not None:
        tensors["attention.kv_cache_scaling_factor"] = _ONE
    return tensors


def _weights(layer: Mapping[str, Spec]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for module in _LINEARS:
        if f"{module}.weight" in layer:
            yield module, layer[f"{module}.weight"][0]


def _fp8(layer: Mapping[str, Spec]) -> Iterator[tuple[str, Spec]]:
    for module, shape in _weights(layer):
        yield f"{module}.weight", (shape, "float8_e4m3fn")
        yield f"{module}.weights_scaling_factor", _ONE
        yield f"{module}.activation_scaling_factor", _ONE


def _fp8_rowwise(layer: Mapping[str, Spec]) -> Iterator[tuple[str, Spec]]:
    for module, shape in _weights(layer):
        yield f"{module}.weight", (shape, "float8_e4m3fn")
        yield f"{module}.per_channel_scale", (shape[:1], "float32")


def _smoothquant(layer: Mapping[str, Spec], algorithm: str) -> Iterator[tuple[str, Spec]]:
    per_channel, per_token = "PER_CHANNEL" in algorithm, "PER_TOKEN" in algorithm
    for module, shape in _weights(layer):
        yield f"{module}.weight", (shape, "int8")
        rows = shape[0] if per_channel or module == "attention.qkv" else 1
        yield f"{module}.per_channel_scale", ((1, rows), "float32")
        if not per_token:
            yield f"{module}.act_scale", _ONE_BY_ONE
        if module in ("attention.dense", "mlp.proj"):
            yield f"{module}.smoother", ((1, shape[1]), "float32")
            if not per_token:
                yield f"{module.partition('.')[0]}.quantization_scaling_factor", _ONE
    yield "input_layernorm.scale_to_int", _ONE
    yield "post_layernorm.scale_to_int", _ONE


def _int8_per_channel(shape: tuple[int, ...], dtype: str, group: int) -> dict[str, Spec]:
    return {
        "weight": (shape, "int8"),
        "weights_scaling_factor": (shape[:1], "float32"),
        "prequant_scaling_factor": (shape[1:], dtype),
        "activation_scaling_factor": _ONE,
    }


def _awq(shape: tuple[int, ...], dtype: str, group: int) -> dict[str, Spec]:
    out, width = shape
    return {
        # Two output rows in a byte.
        "weight": ((out // 2, width), "int8"),
        "weights_scaling_factor": ((out, width // group), "float32"),
        "prequant_scaling_factor": ((width,), dtype),
    }


def _awq_int8(shape: tuple[int, ...], dtype: str, group: int) -> dict[str, Spec]:
    second = {"weights_scaling_factor_2": _ONE, "activation_scaling_factor": _ONE}
    return {**_awq(shape, dtype, group), **second}


def _nvfp4(shape: tuple[int, ...], dtype: str, group: int) -> dict[str, Spec]:
    out, width = shape
    return {
        # Two input columns in a byte.
        "weight": ((out, width // 2), "uint8"),
        "weights_scaling_factor": ((out, width // group), "float8_e4m3fn"),
        "weights_scaling_factor_2": ((), "float32"),
        "activation_scaling_factor": ((), "float32"),
    }


def _gptq(bits: int) -> Callable[[tuple[int, ...], str, int], dict[str, Spec]]:
    """Groups with zero points in the portable layout; ``group`` -1 is a whole row."""

    def tensors(shape: tuple[int, ...], dtype: str, group: int) -> dict[str, Spec]:
        out, width = shape
        grouped = ((out, width // group if group > 0 else 1), "float32")
        rows = out // 2 if bits == 4 else out
        return {"weight": ((rows, width), "int8"), "weights_scaling_factor": grouped, "zero": grouped}

    return tensors


# Schemes of portable layouts. The AWQ kinds, NVFP4 and INT8 are what nvidia-modelopt writes, as measured on exports of
# version 0.47.
_MODELOPT: Mapping[str, Callable[[tuple[int, ...], str, int], dict[str, Spec]]] = {
    "W8A8_SQ_PER_CHANNEL": _int8_per_channel,
    "W4A16_AWQ": _awq,
    "W4A8_AWQ": _awq_int8,
    "NVFP4": _nvfp4,
    "W4A16_GPTQ": _gptq(4),
    "W8A16_GPTQ": _gptq(8),
}
