"""A model's shape out of its Hugging Face ``config.json``, for planning; conversion reads the file on its own."""

from __future__ import annotations

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


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """Return the shape that a ``config.json`` describes; both the classic and the transformers 5 spelling are read.

    Raises:
        KeyError: A number that every decoder has is missing; the key is the argument.
    """
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else None
    body: Mapping[str, Any] = text or config
    name = (config.get("architectures") or body.get("architectures") or [""])[0]
    hidden = int(_first(body, "hidden_size", "n_embd"))
    heads = int(_first(body, "num_attention_heads", "n_head"))
    rope = body.get("rope_scaling") or body.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type"))
    experts = int(body.get("num_local_experts") or body.get("num_experts") or 0)
    return Architecture(
        architecture=str(name),
        num_layers=int(_first(body, "num_hidden_layers", "n_layer")),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=int(body.get("num_key_value_heads") or heads),
        head_size=int(body.get("head_dim") or hidden // heads),
        intermediate_size=int(body.get("intermediate_size") or body.get("n_inner") or 4 * hidden),
        vocab_size=int(_first(body, "vocab_size")),
        max_position_embeddings=int(body.get("max_position_embeddings") or body.get("n_positions") or 2048),
        tie_word_embeddings=bool(body.get("tie_word_embeddings", name.startswith(("Gemma", "GPT2")))),
        gated_mlp=not name.startswith("GPT2"),
        num_experts=experts,
        experts_per_token=int(body.get("num_experts_per_tok") or 0) if experts else 0,
        rope_scaling_factor=1.0 if kind in _ABSORBED else float(rope.get("factor") or 1.0),
    )


def _first(config: Mapping[str, Any], *names: str) -> Any:
    for name in names:
        if config.get(name) is not None:
            return config[name]
    raise KeyError(names[0])
