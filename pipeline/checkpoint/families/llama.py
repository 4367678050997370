"""Llama (2, 3.x), Mistral and Mixtral: RMSNorm, rotary embedding, gated MLP or experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.checkpoint.families import base
from pipeline.checkpoint.families.base import Family, Layout, Rule
from pipeline.checkpoint.hfconfig import Architecture

# ``normalization_mode`` of the router: the chosen experts' weights are made to sum to one.
_RENORMALIZE = 1


def moe_fields(architecture: Architecture, normalization_mode: int | None) -> dict[str, Any]:
    """Return the ``moe`` object; all zero for dense models."""
    return {
        "num_experts": architecture.num_experts,
        "shared_expert_intermediate_size": 0,
        "top_k": architecture.raw.get("num_experts_per_tok", 0) if architecture.num_experts else 0,
        "normalization_mode": normalization_mode,
        "sparse_mixer_epsilon": 0.01,
        "tp_mode": 0,
        "device_limited_n_group": 0,
        "device_limited_topk_group": 0,
        "device_limited_routed_scaling_factor": 1.0,
    }


def rotary_fields(architecture: Architecture, default_base: float) -> dict[str, Any]:
    """Return base and scaling; the scaling object is the source's, verbatim."""
    theta = architecture.rope_theta
    scaling = architecture.rope_scaling
    return {
        "rotary_base": default_base if theta is None else theta,
        "rotary_scaling": None if scaling is None else dict(scaling),
    }


def llama_fields(architecture: Architecture) -> Mapping[str, Any]:
    """Return the config fields of TensorRT-LLM's llama class."""
    return {
        "attn_bias": architecture.attention_bias,
        "mlp_bias": architecture.mlp_bias,
        **rotary_fields(architecture, 10000.0),
        "residual_mlp": bool(architecture.raw.get("parallel_attn_mlp_res", False)),
        "disable_weight_only_quant_plugin": False,
        "moe": moe_fields(architecture, _RENORMALIZE if architecture.num_experts else None),
        "remove_duplicated_kv_heads": False,
        "fc_after_embed": False,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "layer_idx_offset": 0,
        "tie_word_embeddings": architecture.tied,
        **({"hidden_act": "swiglu"} if architecture.num_experts else {}),
    }


def _check(architecture: Architecture) -> None:
    base.refuse_partial_rotation(architecture)
    base.refuse(
        architecture,
        base.mixed_windows(architecture),
        (base.moe(architecture) and architecture.hidden_act != "silu", f"experts with {architecture.hidden_act}"),
    )


_EXPERT = "block_sparse_moe.experts.{e}."

FAMILIES = (
    Family(
        name="llama",
        architectures=("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"),
        rules=(
            base.EMBEDDING,
            base.INPUT_NORM,
            base.QKV,
            base.QKV_BIAS,
            base.DENSE,
            base.DENSE_BIAS,
            base.POST_NORM,
            base.FC,
            base.FC_BIAS,
            base.GATE,
            base.GATE_BIAS,
            base.PROJ,
            base.PROJ_BIAS,
            Rule("mlp.router.weight", ("block_sparse_moe.gate.weight",), when=base.moe, dtype="float32"),
            # Multiplied branch first, then the one with the activation, for each expert.
            Rule(
                "mlp.fc.weight",
                (f"{_EXPERT}w3.weight", f"{_EXPERT}w1.weight"),
                Layout.COLUMN,
                when=base.moe,
                stacked=True,
            ),
            Rule("mlp.proj.weight", (f"{_EXPERT}w2.weight",), Layout.ROW, when=base.moe, stacked=True),
            base.FINAL_NORM,
            base.HEAD,
        ),
        config=llama_fields,
        ignored=(base.ROTARY_BUFFERS,),
        check=_check,
        prefixes=("", "language_model."),
    ),
)
