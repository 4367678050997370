"""What each quantization algorithm costs in memory and where it runs.

Source: support matrix of the TensorRT engine backend (0.17 to 1.2.1): the builder's own guards for Blackwell, published
documentation for the rest. ``unverified`` means no statement was found; rules turn it into a warning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Support = Literal["yes", "no", "unverified"]
GENERATIONS = ("Ampere", "Ada", "Hopper", "Blackwell", "Blackwell RTX")


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One ``quant_algo`` of the checkpoint format.

    Attributes:
        weight_bytes: Bytes per quantized weight, scales included.
        support: Per generation, in the order of :data:`GENERATIONS`.
        kv_cache: Cache types it goes with, besides the model's dtype.
    """

    weight_bytes: float
    support: tuple[Support, Support, Support, Support, Support]
    kv_cache: tuple[str, ...] = ("INT8", "FP8")


# Bytes: 4-bit weights carry 16-bit scales per group of 128 (0.53 in all), NVFP4 FP8 scales per 16 (0.57).
ALGORITHMS: Mapping[str, Algorithm] = {
    "W8A16": Algorithm(1.0, ("yes", "yes", "yes", "no", "unverified")),
    "W4A16": Algorithm(0.53, ("yes", "yes", "yes", "no", "unverified")),
    "W4A16_AWQ": Algorithm(0.53, ("yes", "yes", "yes", "no", "unverified")),
    "W4A8_AWQ": Algorithm(0.53, ("no", "yes", "yes", "unverified", "no")),
    "W4A16_GPTQ": Algorithm(0.53, ("yes", "yes", "yes", "no", "unverified")),
    "W8A16_GPTQ": Algorithm(1.0, ("yes", "yes", "yes", "no", "unverified")),
    "W8A8_SQ_PER_CHANNEL": Algorithm(1.0, ("yes", "yes", "yes", "no", "unverified")),
    "W8A8_SQ_PER_TENSOR_PLUGIN": Algorithm(1.0, ("yes", "yes", "yes", "no", "unverified")),
    "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN": Algorithm(1.0, ("yes", "yes", "yes", "no", "unverified")),
    "W8A8_SQ_PER_CHANNEL_PER_TENSOR_PLUGIN": Algorithm(1.0, ("yes", "yes", "yes", "no", "unverified")),
    "W8A8_SQ_PER_TENSOR_PER_TOKEN_PLUGIN": Algorithm(1.0, ("yes", "yes", "yes", "no", "unverified")),
    "FP8": Algorithm(1.0, ("no", "yes", "yes", "yes", "yes")),
    "FP8_PER_CHANNEL_PER_TOKEN": Algorithm(1.0, ("no", "yes", "yes", "no", "no")),
    "NVFP4": Algorithm(0.57, ("no", "no", "no", "yes", "yes"), kv_cache=("FP8",)),
}

# ``quant_algo`` of SmoothQuant by (weights per channel, activations per token).
SMOOTHQUANT: Mapping[tuple[bool, bool], str] = {
    (False, False): "W8A8_SQ_PER_TENSOR_PLUGIN",
    (True, False): "W8A8_SQ_PER_CHANNEL_PER_TENSOR_PLUGIN",
    (False, True): "W8A8_SQ_PER_TENSOR_PER_TOKEN_PLUGIN",
    (True, True): "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN",
}
# Group sizes that kernels of group-wise weights exist for, preferred first.
GROUP_SIZES = (128, 64)
NVFP4_GROUP = 16

# Algorithms whose weights are grouped along the input width.
GROUPED = ("W4A16_AWQ", "W4A8_AWQ", "W4A16_GPTQ", "W8A16_GPTQ")
# Algorithms that measure activations on text; row-wise FP8 and weight-only INT8 and INT4 do not.
CALIBRATED = (*SMOOTHQUANT.values(), "W8A8_SQ_PER_CHANNEL", "FP8", "NVFP4", "W4A16_AWQ", "W4A8_AWQ")
FP8_FAMILY = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "W4A8_AWQ", "NVFP4")

DTYPE_BYTES: Mapping[str, int] = {"float16": 2, "bfloat16": 2, "float32": 4}

# Families that the converter of this project quantizes, by algorithm; algorithms that are not here work for all.
_GATED = ("llama", "mistral", "qwen2", "qwen3")
_DENSE = (*_GATED, "gemma", "gemma2", "gemma3", "phi3", "gpt2")
NATIVE_KV_CACHE = (*_GATED, "gemma", "gemma2", "gemma3")
# Calibrated algorithms that NVIDIA's ModelOpt writes, with the option name of each.
MODELOPT: Mapping[str, str] = {
    "FP8": "fp8",
    "W8A8_SQ_PER_CHANNEL": "int8_sq",
    "W4A16_AWQ": "int4_awq",
    "W4A8_AWQ": "w4a8_awq",
    "NVFP4": "nvfp4",
}
# Published quantizations that it cannot take over, by :class:`~pipeline.facts.published.SourceQuantization` kind.
UNREAD_SOURCES = ("fp8_block", "nvfp4", "bitsandbytes", "hqq", "aqlm", "quip")


def native_families(algorithm: str | None) -> tuple[str, ...]:
    """Return the families for which this project's converter makes an algorithm; empty for all."""
    if algorithm is None:
        return ()
    if algorithm in ("W8A16", "W4A16"):
        return _DENSE
    return ("llama", "mistral") if algorithm in SMOOTHQUANT.values() else _GATED


def generation(sm: int) -> str | None:
    """Return the GPU generation of a compute capability (90 for 9.0), or None below Ampere."""
    for first, name in ((120, "Blackwell RTX"), (100, "Blackwell"), (90, "Hopper"), (89, "Ada"), (80, "Ampere")):
        if sm >= first:
            return name
    return None


def support(algorithm: str, sm: int) -> Support:
    """Say whether the engine backend runs ``algorithm`` on a compute capability; ``no`` below Ampere."""
    name = generation(sm)
    return ALGORITHMS[algorithm].support[GENERATIONS.index(name)] if name else "no"


def is_calibrated(algorithm: str | None, kv_cache: str | None, *, from_checkpoint: bool = False) -> bool:
    """Say whether making such weights or such a cache measures activations on text."""
    measured = algorithm in CALIBRATED and not from_checkpoint
    return measured or kv_cache is not None


def weight_bytes(algorithm: str | None, dtype: str) -> float:
    """Return bytes per weight of the layers' matrices; embedding and head stay in ``dtype``."""
    return ALGORITHMS[algorithm].weight_bytes if algorithm is not None else float(DTYPE_BYTES[dtype])


def kv_bytes(kv_cache: str | None, dtype: str) -> int:
    """Return bytes per cached value."""
    return 1 if kv_cache else DTYPE_BYTES[dtype]
