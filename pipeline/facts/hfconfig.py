"""A model's shape out of its Hugging Face ``config.json``, for planning; conversion reads the file on its own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pipeline.facts.architecture import Architecture

# Class name in ``architectures`` to the family that converts it.
FAMILIES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
    "GPT2LMHeadModel": "gpt2",
}
# Rotary kinds whose factor already is in max_position_embeddings. Source: trtllm-build, rule for max_seq_len.
_ABSORBED = ("su", "longrope", "llama3", "default", None)


class NotADecoder(ValueError):
    """A ``config.json`` does not describe a decoder model; the text says what is missing or wrong."""


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """Return the shape that a ``config.json`` describes; both the classic and the transformers 5 spelling are read.

    Raises:
        NotADecoder: A number that every decoder has is missing, or a value is not what it must be.
    """
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else None
    body: Mapping[str, Any] = text or config
    name = _class_name(config.get("architectures") or body.get("architectures"))
    hidden = _whole(body, "hidden_size", "n_embd")
    heads = _whole(body, "num_attention_heads", "n_head")
    experts = _whole(body, "num_local_experts", "num_experts", default=0)
    return Architecture(
        architecture=name,
        num_layers=_whole(body, "num_hidden_layers", "n_layer"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=_whole(body, "num_key_value_heads", default=heads),
        head_size=_whole(body, "head_dim", default=max(1, hidden // heads)),
        intermediate_size=_whole(body, "intermediate_size", "n_inner", default=4 * hidden),
        vocab_size=_whole(body, "vocab_size"),
        max_position_embeddings=_whole(body, "max_position_embeddings", "n_positions", default=2048),
        tie_word_embeddings=bool(body.get("tie_word_embeddings", name.startswith(("Gemma", "GPT2")))),
        gated_mlp=not name.startswith("GPT2"),
        num_experts=experts,
        experts_per_token=_whole(body, "num_experts_per_tok", default=0) if experts else 0,
        rope_scaling_factor=_context_factor(body.get("rope_scaling") or body.get("rope_parameters") or {}),
    )


def _class_name(architectures: Any) -> str:
    return str(architectures[0]) if isinstance(architectures, list) and architectures else ""


def _whole(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """Return the first of several names that has a value: a whole number from 1, or from a smaller default."""
    name = next((name for name in names if config.get(name) is not None), None)
    if name is None:
        if default is None:
            raise NotADecoder(f"lacks {names[0]}: not a decoder model")
        return default
    value, least = config[name], 1 if default is None else min(1, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise NotADecoder(f"{name} is {value!r}; expected a whole number from {least}")
    return value


def _context_factor(rope: Any) -> float:
    """Return how many times longer the context is than ``max_position_embeddings``."""
    if not isinstance(rope, Mapping):
        raise NotADecoder(f"rope_scaling is {rope!r}; expected an object or null")
    factor = rope.get("factor", 1.0)
    if rope.get("rope_type", rope.get("type")) in _ABSORBED or factor is None:
        return 1.0
    if not isinstance(factor, int | float) or not 0 < factor < math.inf:
        raise NotADecoder(f"the factor of rope_scaling is {factor!r}; expected a number above 0")
    return float(factor)
