"""How a published checkpoint is quantized already, out of its ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Method in ``quantization_config`` to our word, where they differ.
_KINDS: Mapping[str, str] = {"fbgemm_fp8": "fp8_rowwise"}
_MODELOPT: Mapping[str, str] = {"FP8": "fp8", "NVFP4": "nvfp4"}
# What the weights are once they are a TensorRT-LLM checkpoint.
_ALGORITHMS: Mapping[str, str] = {
    "gptq4": "W4A16_GPTQ",
    "gptq8": "W8A16_GPTQ",
    "awq4": "W4A16_GPTQ",
    "fp8": "FP8",
    "fp8_rowwise": "FP8_PER_CHANNEL_PER_TOKEN",
    "nvfp4": "NVFP4",
}


@dataclass(frozen=True, slots=True)
class SourceQuantization:
    """How a published checkpoint is quantized already.

    Attributes:
        kind: ``gptq``, ``awq``, ``fp8`` (per tensor), ``fp8_rowwise``, ``fp8_block``, ``nvfp4``, or upstream's word.
        bits: Bits of a weight.
        group_size: Weights that share a scale; 0 when not group-wise.
        desc_act: GPTQ with activation order, which the converters refuse.
    """

    kind: str
    bits: int = 4
    group_size: int = 128
    desc_act: bool = False

    @property
    def key(self) -> str:
        """Name in the route table: ``gptq4``, ``awq4``, ``fp8`` …"""
        return f"{self.kind}{self.bits}" if self.kind in ("gptq", "awq") else self.kind

    @property
    def algorithm(self) -> str | None:
        """``quant_algo`` that a conversion gives; None when nothing converts it. AWQ runs on the GPTQ kernels."""
        return _ALGORITHMS.get(self.key)


def source_quantization(config: Mapping[str, Any]) -> SourceQuantization | None:
    """Read how a Hugging Face checkpoint is quantized from its ``config.json`` (``quantization_config`` block).

    Returns:
        None when it is not quantized.
    """
    block = config.get("quantization_config")
    if not isinstance(block, Mapping):
        return None
    method = str(block.get("quant_method", "")).lower()
    group = block.get("group_size")
    if method in ("gptq", "awq"):
        bits = int(block.get("bits", block.get("w_bit", 4)))
        return SourceQuantization(method, bits, int(group or 128), bool(block.get("desc_act")))
    if method == "modelopt":
        algorithm = str(block.get("quant_algo", "")).upper()
        return SourceQuantization(_MODELOPT.get(algorithm, f"modelopt {algorithm}"), 8, 0)
    if method == "fp8":
        return SourceQuantization("fp8_block" if block.get("weight_block_size") else "fp8", 8, 0)
    return SourceQuantization(_KINDS.get(method, method or "unknown"), 8, 0)
