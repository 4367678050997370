"""GPT-2 and StarCoder2: LayerNorm with bias, plain MLP; TensorRT-LLM's gpt class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pipeline.checkpoint.families import base
from pipeline.checkpoint.families.base import Family, Layout, Rule
from pipeline.checkpoint.families.llama import moe_fields, rotary_fields
from pipeline.checkpoint.hfconfig import Architecture
from pipeline.checkpoint.views import Matrix, Tensor, Transposed, rows_of


def gpt_fields(architecture: Architecture, variant: str, *, bias: bool) -> dict[str, Any]:
    """Return the config fields of TensorRT-LLM's gpt class."""
    return {
        "gpt_variant": variant,
        "bias": bias,
        "q_scaling": 1,
        "embedding_scale": None,
        "apply_query_key_layer_scaling": False,
        "rotary_pct": architecture.rotary_factor,
        **rotary_fields(architecture, 10000.0),
        "inner_layernorm": False,
        "norm_before_bmm1": False,
        "moe": moe_fields(architecture, 1),
    }


def _transposed(architecture: Architecture, parts: tuple[Matrix, ...]) -> tuple[Matrix, ...]:
    """Return [out, in] of GPT-2's weights, which are [in, out]."""
    return tuple(Transposed(part) for part in parts if isinstance(part, Tensor))


def _split_qkv(architecture: Architecture, parts: tuple[Matrix, ...]) -> tuple[Matrix, ...]:
    (fused,) = parts
    third = fused.rows // 3
    return tuple(rows_of(fused, third * i, third * (i + 1)) for i in range(3))


def _transposed_qkv(architecture: Architecture, parts: tuple[Matrix, ...]) -> tuple[Matrix, ...]:
    return _split_qkv(architecture, _transposed(architecture, parts))


def _gpt2_fields(architecture: Architecture) -> Mapping[str, Any]:
    return {**gpt_fields(architecture, "gpt2", bias=True), "position_embedding_type": "learned_absolute"}


def _check_gpt2(architecture: Architecture) -> None:
    raw = architecture.raw
    base.refuse(
        architecture,
        (bool(raw.get("scale_attn_by_inverse_layer_idx")), "scale_attn_by_inverse_layer_idx"),
        (raw.get("scale_attn_weights", True) is False, "scale_attn_weights false"),
        (bool(raw.get("add_cross_attention")), "add_cross_attention"),
    )


GPT2 = Family(
    name="gpt2",
    architectures=("GPT2LMHeadModel",),
    rules=(
        replace(base.EMBEDDING, sources=("wte.weight",)),
        Rule("transformer.position_embedding.weight", ("wpe.weight",), place="first"),
        Rule("input_layernorm.weight", ("ln_1.weight",)),
        Rule("input_layernorm.bias", ("ln_1.bias",)),
        Rule("attention.qkv.weight", ("attn.c_attn.weight",), Layout.QKV, prepare=_transposed_qkv),
        Rule("attention.qkv.bias", ("attn.c_attn.bias",), Layout.QKV, prepare=_split_qkv),
        Rule("attention.dense.weight", ("attn.c_proj.weight",), Layout.ROW, prepare=_transposed),
        Rule("attention.dense.bias", ("attn.c_proj.bias",)),
        Rule("post_layernorm.weight", ("ln_2.weight",)),
        Rule("post_layernorm.bias", ("ln_2.bias",)),
        Rule("mlp.fc.weight", ("mlp.c_fc.weight",), Layout.COLUMN, prepare=_transposed),
        Rule("mlp.fc.bias", ("mlp.c_fc.bias",), Layout.COLUMN),
        Rule("mlp.proj.weight", ("mlp.c_proj.weight",), Layout.ROW, prepare=_transposed),
        Rule("mlp.proj.bias", ("mlp.c_proj.bias",)),
        Rule("transformer.ln_f.weight", ("ln_f.weight",), place="last"),
        Rule("transformer.ln_f.bias", ("ln_f.bias",), place="last"),
        base.HEAD,
    ),
    config=_gpt2_fields,
    layer_prefix="h.{i}.",
    ignored=((r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)", "causal mask, a constant"),),
    check=_check_gpt2,
    prefixes=("transformer.", ""),
)


def _use_bias(architecture: Architecture) -> bool:
    return bool(architecture.raw.get("use_bias", True))


def _starcoder2_fields(architecture: Architecture) -> Mapping[str, Any]:
    # The class calls the approximation by tanh "gelu".
    return {**gpt_fields(architecture, "starcoder2", bias=_use_bias(architecture)), "hidden_act": "gelu"}


def _check_starcoder2(architecture: Architecture) -> None:
    act = architecture.hidden_act
    base.refuse_partial_rotation(architecture)
    base.refuse(
        architecture,
        base.mixed_windows(architecture),
        (act not in ("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), f"hidden_act {act}"),
        (architecture.raw.get("norm_type", "layer_norm") != "layer_norm", "norm_type other than layer_norm"),
        (architecture.raw.get("mlp_type", "default") != "default", "mlp_type other than default"),
    )


STARCODER2 = Family(
    name="starcoder2",
    architectures=("Starcoder2ForCausalLM",),
    rules=(
        base.EMBEDDING,
        base.INPUT_NORM,
        Rule("input_layernorm.bias", ("input_layernorm.bias",)),
        base.QKV,
        replace(base.QKV_BIAS, when=_use_bias),
        base.DENSE,
        replace(base.DENSE_BIAS, when=_use_bias),
        base.POST_NORM,
        Rule("post_layernorm.bias", ("post_attention_layernorm.bias",)),
        Rule("mlp.fc.weight", ("mlp.c_fc.weight",), Layout.COLUMN),
        Rule("mlp.fc.bias", ("mlp.c_fc.bias",), Layout.COLUMN, when=_use_bias),
        Rule("mlp.proj.weight", ("mlp.c_proj.weight",), Layout.ROW),
        Rule("mlp.proj.bias", ("mlp.c_proj.bias",), when=_use_bias),
        base.FINAL_NORM,
        Rule("transformer.ln_f.bias", ("model.norm.bias",), place="last"),
        base.HEAD,
    ),
    config=_starcoder2_fields,
    ignored=(base.ROTARY_BUFFERS,),
    check=_check_starcoder2,
)

FAMILIES = (GPT2, STARCODER2)
