"""Qwen2 (biases on q, k, v) and Qwen3 (norms on queries and keys)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pipeline.checkpoint.families import base
from pipeline.checkpoint.families.base import Family, Rule
from pipeline.checkpoint.families.llama import moe_fields, rotary_fields
from pipeline.checkpoint.hfconfig import Architecture


def _is_qwen2(architecture: Architecture) -> bool:
    return architecture.name == "Qwen2ForCausalLM"


def _is_qwen3(architecture: Architecture) -> bool:
    return architecture.name == "Qwen3ForCausalLM"


def _fields(architecture: Architecture) -> Mapping[str, Any]:
    """Return the config fields of TensorRT-LLM's qwen class."""
    return {
        "attn_bias": _is_qwen2(architecture),
        "mlp_bias": False,
        # NVIDIA's default where the config states no base; Qwen configs do.
        **rotary_fields(architecture, 100000.0),
        "disable_weight_only_quant_plugin": False,
        "num_labels": 1,
        "use_logn_attn": bool(architecture.raw.get("use_logn_attn", False)),
        "moe": moe_fields(architecture, 0),
        "seq_length": architecture.raw.get("seq_length", 8192),
        "qwen_type": architecture.model_type,
        "moe_intermediate_size": 0,
        "moe_shared_expert_intermediate_size": 0,
        "tie_word_embeddings": architecture.tied,
        **({"mlp_only_layers": [], "decoder_sparse_step": 1} if _is_qwen3(architecture) else {}),
    }


def _check(architecture: Architecture) -> None:
    base.refuse_partial_rotation(architecture)
    base.refuse(
        architecture,
        base.mixed_windows(architecture),
        (_is_qwen3(architecture) and architecture.attention_bias, "attention_bias"),
        (architecture.mlp_bias, "mlp_bias"),
    )


FAMILIES = (
    Family(
        name="qwen",
        architectures=("Qwen2ForCausalLM", "Qwen3ForCausalLM"),
        rules=(
            base.EMBEDDING,
            base.INPUT_NORM,
            base.QKV,
            replace(base.QKV_BIAS, when=_is_qwen2),
            Rule("attention.q_layernorm.weight", ("self_attn.q_norm.weight",), when=_is_qwen3),
            Rule("attention.k_layernorm.weight", ("self_attn.k_norm.weight",), when=_is_qwen3),
            base.DENSE,
            base.POST_NORM,
            base.FC,
            base.GATE,
            base.PROJ,
            base.FINAL_NORM,
            base.HEAD,
        ),
        config=_fields,
        ignored=(base.ROTARY_BUFFERS,),
        check=_check,
    ),
)
