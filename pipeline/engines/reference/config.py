"""What a TensorRT-LLM checkpoint says about itself, and what its architecture means.

Differences between architectures are data: one :class:`Family` row each. Everything else follows from ``config.json``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from .errors import EngineError

MlpKind = Literal["gated", "plain", "fused"]


@dataclass(frozen=True, slots=True)
class Family:
    """How an architecture differs from llama.

    Attributes:
        mlp: ``gated``: proj(act(fc) * gate); ``fused``: the same with rows of gate, then of fc, in one tensor ``fc``;
            ``plain``: proj(act(fc)). A config with experts has fused experts whatever this says.
        norm: ``rms`` (weight) or ``layer`` (weight and bias).
        qk_norm: RMSNorm per head on q and k before the rotation.
        scale_embedding: The embedding is multiplied by sqrt(hidden_size).
        dense_bias: ``attn_bias`` also means a bias of the attention output.
        window_period: Every so many-th layer sees all positions when the config has a sliding window; 1: none does.
    """

    mlp: MlpKind = "gated"
    norm: Literal["rms", "layer"] = "rms"
    qk_norm: bool = False
    scale_embedding: bool = False
    dense_bias: bool = True
    window_period: int = 1


_GPT = Family(mlp="plain", norm="layer")

FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(),
    "MixtralForCausalLM": Family(),
    "Qwen2ForCausalLM": Family(dense_bias=False),
    "Qwen3ForCausalLM": Family(qk_norm=True),
    "GemmaForCausalLM": Family(scale_embedding=True),
    "Gemma2ForCausalLM": Family(scale_embedding=True, window_period=2),
    "Gemma3ForCausalLM": Family(scale_embedding=True, qk_norm=True, window_period=6),
    "Phi3ForCausalLM": Family(mlp="fused"),
    "GPT2LMHeadModel": _GPT,
    "GPTForCausalLM": _GPT,
    "Starcoder2ForCausalLM": _GPT,
}


@dataclass(frozen=True, slots=True)
class Quantization:
    """The ``quantization`` object; None for an algorithm means not quantized."""

    algo: str | None = None
    kv_cache: str | None = None
    group_size: int = 128
    clamp: tuple[float, float] | None = None
    exclude: tuple[str, ...] = ("*lm_head", "*router", "*vocab_embedding", "*position_embedding")

    def covers(self, module: str) -> bool:
        """Say whether the linear layer of this name is quantized."""
        return self.algo is not None and not any(fnmatchcase(module, pattern) for pattern in self.exclude)


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture of experts: how many there are, how many a token visits, and how their weights are made."""

    count: int
    top_k: int
    renormalize: bool


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder described by ``config.json``. Sizes are of the whole model, not of a rank.

    Attributes:
        rotary_dim: Rotated dimensions of a head; 0 when positions are learned.
        rotary_local_base: Base of the layers with a sliding window, where it differs.
        query_divisor: Scores are divided by its square root; the head size except in gemma 2 and 3.
        attention_softcap: Bound of the scores, None for none; ``final_softcap`` that of the logits.
        inter_norms: Two more norms per layer, behind attention and MLP.
        sliding_window: Newest positions a query sees in windowed layers.
        embedding_split: Axis along which the embedding is split over tp, None when every rank has all of it.
    """

    architecture: str
    family: Family
    dtype: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate_size: int
    hidden_act: str
    norm_epsilon: float
    max_position_embeddings: int
    rotary_dim: int
    rotary_base: float
    rotary_local_base: float | None
    rotary_scaling: Mapping[str, Any] | None
    attn_bias: bool
    mlp_bias: bool
    query_divisor: float
    attention_softcap: float | None
    final_softcap: float | None
    inter_norms: bool
    sliding_window: int | None
    window_period: int
    experts: Experts | None
    tp: int
    pp: int
    embedding_split: int | None
    quantization: Quantization

    @property
    def max_seq_len(self) -> int:
        """Tokens the positions are good for: stretched by linear scaling, as the builder deduces it."""
        scaling = self.rotary_scaling or {}
        stretch = scaling.get("factor", 1.0) if scaling.get("type", scaling.get("rope_type")) == "linear" else 1.0
        return round(self.max_position_embeddings * stretch)

    def is_local(self, layer: int) -> bool:
        """Say whether the sliding window, and in gemma 3 the local rotary base, is this layer's."""
        return self.window_period == 1 or (layer + 1) % self.window_period != 0


def read_config(folder: Path) -> ModelConfig:
    """Read ``config.json`` of a checkpoint folder.

    Raises:
        EngineError: The file is missing, not JSON, lacks a field, or describes something this engine cannot run.
    """
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise EngineError(f"{path}: missing; expected a TensorRT-LLM checkpoint folder") from error
    except (ValueError, RecursionError) as error:
        raise EngineError(f"{path}: not JSON ({error})") from error
    if not isinstance(raw, dict):
        raise EngineError(f"{path}: expected a JSON object")
    try:
        config = _parse(raw)
        _check(config, raw)
    except EngineError as error:
        raise EngineError(f"{path}: {error}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        what = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
        raise EngineError(f"{path}: {what}") from error
    return config


def _parse(raw: Mapping[str, Any]) -> ModelConfig:
    architecture = raw["architecture"]
    family = FAMILIES.get(architecture)
    if family is None:
        raise EngineError(f"architecture {architecture!r} is not supported; known are {', '.join(FAMILIES)}")
    heads, hidden_size = int(raw["num_attention_heads"]), int(raw["hidden_size"])
    head_size = int(raw.get("head_size") or hidden_size // heads)
    is_rotary = raw.get("position_embedding_type", "learned_absolute") != "learned_absolute"
    rotary_dim = int(raw.get("rotary_embedding_dim") or head_size * raw.get("rotary_pct", 1.0))
    window, period = raw.get("sliding_window"), raw.get("sliding_window_pattern", raw.get("_sliding_window_pattern"))
    mapping = raw.get("mapping") or {}
    return ModelConfig(
        architecture=architecture,
        family=family,
        dtype=raw["dtype"],
        vocab_size=int(raw["vocab_size"]),
        hidden_size=hidden_size,
        layers=int(raw["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_size=head_size,
        intermediate_size=int(raw.get("intermediate_size") or 4 * hidden_size),
        hidden_act=raw.get("hidden_act", "gelu"),
        norm_epsilon=float(raw.get("norm_epsilon", 1e-5)),
        max_position_embeddings=int(raw["max_position_embeddings"]),
        rotary_dim=rotary_dim if is_rotary else 0,
        rotary_base=float(raw.get("rotary_base", 10000.0)),
        rotary_local_base=raw.get("rope_local_base_freq"),
        rotary_scaling=_rotary_scaling(raw),
        attn_bias=bool(raw.get("attn_bias", raw.get("bias", False))),
        mlp_bias=bool(raw.get("mlp_bias", raw.get("bias", False))),
        query_divisor=float(raw.get("query_pre_attn_scalar") or head_size * float(raw.get("q_scaling", 1.0)) ** 2),
        attention_softcap=raw.get("attn_logit_softcapping"),
        final_softcap=raw.get("final_logit_softcapping"),
        inter_norms=bool(raw.get("inter_layernorms", False)),
        sliding_window=None if window is None else int(window),
        window_period=int(period or family.window_period),
        experts=_experts(raw.get("moe") or {}),
        tp=int(mapping.get("tp_size", 1)),
        pp=int(mapping.get("pp_size", 1)),
        embedding_split=int(raw.get("embedding_sharding_dim", 0)) if raw.get("use_parallel_embedding") else None,
        quantization=_quantization(raw.get("quantization") or {}),
    )


def _rotary_scaling(raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the scaling object; phi3 spreads that of its long context over keys of its own."""
    if "longrope_scaling_short_factors" in raw:
        return {
            "type": "longrope",
            "short_factor": raw["longrope_scaling_short_factors"],
            "long_factor": raw["longrope_scaling_long_factors"],
            "original_max_position_embeddings": raw["original_max_position_embeddings"],
            "max_position_embeddings": raw["max_position_embeddings"],
        }
    scaling: Mapping[str, Any] | None = raw.get("rotary_scaling")
    return scaling


def _experts(moe: Mapping[str, Any]) -> Experts | None:
    count, top_k = int(moe.get("num_experts") or 0), int(moe.get("top_k") or 0)
    if not count:
        return None
    mode = moe.get("normalization_mode")
    if mode not in (0, 1) or not 1 <= top_k <= count or moe.get("shared_expert_intermediate_size"):
        raise EngineError(
            f"moe has normalization_mode {mode}, top_k {top_k} of {count} experts and shared experts of size "
            f"{moe.get('shared_expert_intermediate_size')}; supported are modes 0 and 1 without shared experts"
        )
    return Experts(count, top_k, renormalize=mode == 1)


def _quantization(raw: Mapping[str, Any]) -> Quantization:
    exclude, clamp = raw.get("exclude_modules"), raw.get("clamp_val")
    default = Quantization()
    return Quantization(
        algo=raw.get("quant_algo"),
        kv_cache=raw.get("kv_cache_quant_algo"),
        group_size=int(raw.get("group_size") or default.group_size),
        clamp=(float(clamp[0]), float(clamp[1])) if clamp else None,
        exclude=default.exclude if exclude is None else tuple(exclude),
    )


def _check(config: ModelConfig, raw: Mapping[str, Any]) -> None:
    position = raw.get("position_embedding_type", "learned_absolute")
    known = {"rope_gpt_neox"}
    known |= {"learned_absolute"} if config.family.norm == "layer" else set()
    known |= {"long_rope"} if config.architecture.startswith("Phi3") else set()
    if position not in known:
        raise EngineError(
            f"position_embedding_type {position!r} is unknown for {config.architecture}: known is {' or '.join(known)}"
        )
    if config.heads % config.kv_heads:
        raise EngineError(f"{config.heads} attention heads are no multiple of {config.kv_heads} key/value heads")
    if config.heads % config.tp or (config.kv_heads % config.tp and config.tp % config.kv_heads):
        raise EngineError(f"{config.heads} heads, {config.kv_heads} of key/value, cannot be split over tp {config.tp}")
    if not 1 <= config.pp <= config.layers:
        raise EngineError(f"pp_size {config.pp} is not between 1 and the {config.layers} layers")
    for key in ("residual_mlp", "use_logn_attn", "fc_after_embed", "apply_query_key_layer_scaling", "embedding_scale"):
        if raw.get(key):
            raise EngineError(f"{key} is {raw[key]!r}; this engine knows only models without it")
    for key in ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "output_multiplier_scale"):
        if raw.get(key, 1.0) != 1.0:
            raise EngineError(f"{key} is {raw[key]!r}; this engine knows only 1.0")
    if (raw.get("mapping") or {}).get("moe_ep_size", 1) not in (-1, 1):
        raise EngineError("experts divided over ranks (moe_ep_size above 1) are not supported")
