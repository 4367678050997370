"""Phi-3 and Phi-4-mini: q, k, v in one tensor, gate and up projection in another."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from pipeline.checkpoint.families import base
from pipeline.checkpoint.families.base import Family, Layout, Rule
from pipeline.checkpoint.hfconfig import Architecture
from pipeline.checkpoint.views import Matrix, rows_of


def _split_qkv(architecture: Architecture, parts: tuple[Matrix, ...]) -> tuple[Matrix, ...]:
    (fused,) = parts
    q_rows = architecture.num_heads * architecture.head_dim
    kv_rows = architecture.num_kv_heads * architecture.head_dim
    bounds = (0, q_rows, q_rows + kv_rows, fused.rows)
    return tuple(rows_of(fused, begin, end) for begin, end in pairwise(bounds))


def _swap_halves(architecture: Architecture, parts: tuple[Matrix, ...]) -> tuple[Matrix, ...]:
    """Return [up, gate] of a tensor that is [gate; up]: each half is cut for the ranks by itself."""
    (fused,) = parts
    half = fused.rows // 2
    return rows_of(fused, half, fused.rows), rows_of(fused, 0, half)


def _fields(architecture: Architecture) -> Mapping[str, Any]:
    """Return the config fields of TensorRT-LLM's phi3 class; its long-context scaling has keys of its own."""
    raw, scaling = architecture.raw, architecture.rope_scaling
    fields: dict[str, Any] = {
        "rotary_base": 10000.0 if architecture.rope_theta is None else architecture.rope_theta,
        "rotary_scaling": None,
        "rotary_pct": architecture.rotary_factor,
        "hidden_act": "swiglu" if architecture.hidden_act == "silu" else architecture.hidden_act,
        "tie_word_embeddings": architecture.tied,
    }
    if scaling is not None:
        fields["position_embedding_type"] = "long_rope"
        fields["original_max_position_embeddings"] = raw["original_max_position_embeddings"]
        fields["longrope_scaling_short_factors"] = list(scaling["short_factor"])
        fields["longrope_scaling_long_factors"] = list(scaling["long_factor"])
    return fields


def _check(architecture: Architecture) -> None:
    scaling = architecture.rope_scaling or {}
    kind = scaling.get("type", scaling.get("rope_type"))
    incomplete = bool(scaling) and not (
        {"short_factor", "long_factor"} <= scaling.keys() and "original_max_position_embeddings" in architecture.raw
    )
    base.refuse(
        architecture,
        base.mixed_windows(architecture),
        (kind not in (None, "longrope", "su"), f"rope scaling type {kind!r}"),
        (incomplete, "rope scaling without short_factor, long_factor and original_max_position_embeddings"),
        (architecture.attention_bias, "attention_bias"),
    )


FAMILIES = (
    Family(
        name="phi3",
        architectures=("Phi3ForCausalLM",),
        rules=(
            base.EMBEDDING,
            base.INPUT_NORM,
            Rule("attention.qkv.weight", ("self_attn.qkv_proj.weight",), Layout.QKV, prepare=_split_qkv),
            base.DENSE,
            base.POST_NORM,
            Rule("mlp.fc.weight", ("mlp.gate_up_proj.weight",), Layout.COLUMN, prepare=_swap_halves),
            base.PROJ,
            base.FINAL_NORM,
            base.HEAD,
        ),
        config=_fields,
        ignored=(base.ROTARY_BUFFERS,),
        check=_check,
    ),
)
