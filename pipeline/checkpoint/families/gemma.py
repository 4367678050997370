"""Gemma 1, 2 and 3 (text): norm weights are stored as their difference from one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pipeline.checkpoint.families import base
from pipeline.checkpoint.families.base import Family, Rule
from pipeline.checkpoint.families.llama import rotary_fields
from pipeline.checkpoint.hfconfig import Architecture
from pipeline.checkpoint.options import ConvertOptions
from pipeline.checkpoint.views import Matrix, PlusOne
from pipeline.errors import ConfigError

_PATTERN = "_sliding_window_pattern"


def _is_1(architecture: Architecture) -> bool:
    return architecture.name == "GemmaForCausalLM"


def _is_3(architecture: Architecture) -> bool:
    return architecture.name == "Gemma3ForCausalLM"


def _has_inner_norms(architecture: Architecture) -> bool:
    return not _is_1(architecture)


def _plus_one(architecture: Architecture, parts: tuple[Matrix, ...]) -> tuple[Matrix, ...]:
    return tuple(PlusOne(part) for part in parts)


def _pattern(architecture: Architecture) -> int:
    """Return p: every p-th layer looks back at everything, the others through the window."""
    if not _is_3(architecture):
        return 2
    raw = architecture.raw
    return int(raw.get(_PATTERN) or raw.get("sliding_window_pattern") or 6)


def _local_base(architecture: Architecture) -> float:
    """Return the rotary base of layers with a window (Gemma 3)."""
    parameters = architecture.raw.get("rope_parameters") or {}
    local = parameters.get("sliding_attention", {}) if isinstance(parameters, Mapping) else {}
    value: float = local.get("rope_theta") or architecture.raw.get("rope_local_base_freq") or 10000.0
    return value


def _fields(architecture: Architecture) -> Mapping[str, Any]:
    """Return the config fields of TensorRT-LLM's gemma class."""
    raw = architecture.raw
    act = architecture.hidden_act
    fields: dict[str, Any] = {
        "attn_bias": architecture.attention_bias,
        "mlp_bias": False,
        **rotary_fields(architecture, 1000000.0 if _is_3(architecture) else 10000.0),
        "inter_layernorms": _has_inner_norms(architecture),
        "quantization": {"smoothquant_val": None},
        # The first configs said "gelu" and meant the approximation by tanh, as the class always used.
        "hidden_act": "gelu_pytorch_tanh" if act == "gelu" else act,
    }
    if _has_inner_norms(architecture):
        fields["query_pre_attn_scalar"] = raw.get("query_pre_attn_scalar", 256)
        fields["final_logit_softcapping"] = raw.get("final_logit_softcapping")
        if architecture.sliding_window is not None:
            fields["sliding_window"] = architecture.sliding_window
            fields[_PATTERN] = _pattern(architecture)
    if architecture.name == "Gemma2ForCausalLM":
        fields["attn_logit_softcapping"] = raw.get("attn_logit_softcapping")
    if _is_3(architecture):
        fields["rope_local_base_freq"] = _local_base(architecture)
    return fields


def _check(architecture: Architecture) -> None:
    base.refuse_partial_rotation(architecture)
    kinds = architecture.raw.get("layer_types")
    pattern = _pattern(architecture)
    layers = range(1, architecture.num_layers + 1)
    regular = ["full_attention" if i % pattern == 0 else "sliding_attention" for i in layers]
    capped = _is_3(architecture) and architecture.raw.get("attn_logit_softcapping") is not None
    base.refuse(
        architecture,
        (architecture.attention_bias, "attention_bias"),
        (
            _has_inner_norms(architecture) and kinds not in (None, regular),
            f"layer_types other than every {pattern}th full",
        ),
        (
            _is_3(architecture) and architecture.rope_scaling is not None,
            "rope scaling of the layers without window alone",
        ),
        (bool(architecture.raw.get("use_bidirectional_attention")), "bidirectional attention"),
        (capped, "attn_logit_softcapping"),
    )


def _adjust(options: ConvertOptions) -> tuple[ConvertOptions, tuple[str, ...]]:
    """Split the embedding by vocabulary over ranks: the model class always expects it so."""
    if options.tp == 1:
        return replace(options, embedding_sharding="none"), ()
    if options.embedding_sharding == "hidden":
        raise ConfigError(
            "embedding_sharding is 'hidden': TensorRT-LLM's gemma class splits the embedding by vocabulary",
            hint="leave the option out",
        )
    return replace(options, embedding_sharding="vocab"), (
        "the embedding is split by vocabulary over the ranks, as TensorRT-LLM's gemma class demands for tp > 1",
    )


FAMILIES = (
    Family(
        name="gemma",
        architectures=("GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"),
        rules=(
            base.EMBEDDING,
            replace(base.INPUT_NORM, prepare=_plus_one),
            base.QKV,
            Rule("attention.q_layernorm.weight", ("self_attn.q_norm.weight",), prepare=_plus_one, when=_is_3),
            Rule("attention.k_layernorm.weight", ("self_attn.k_norm.weight",), prepare=_plus_one, when=_is_3),
            base.DENSE,
            replace(base.POST_NORM, prepare=_plus_one),
            Rule(
                "pre_feedforward_layernorm.weight",
                ("pre_feedforward_layernorm.weight",),
                prepare=_plus_one,
                when=_has_inner_norms,
            ),
            Rule(
                "post_feedforward_layernorm.weight",
                ("post_feedforward_layernorm.weight",),
                prepare=_plus_one,
                when=_has_inner_norms,
            ),
            base.FC,
            base.GATE,
            base.PROJ,
            replace(base.FINAL_NORM, prepare=_plus_one),
            base.HEAD,
        ),
        config=_fields,
        ignored=(base.ROTARY_BUFFERS,),
        check=_check,
        adjust=_adjust,
    ),
)
