"""What quantization changes in the tensors of a layer, told from the config alone. No numpy here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
