"""What a TensorRT-LLM checkpoint says about itself, and what its architecture means.

Differences between architectures are data: one :class:`Family` row each. Everything else follows from ``config.json``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .errors import EngineError

MlpKind = Literal["gated", "plain", "fused", "experts"]


@dataclass(frozen=True, slots=True)
class Family:
    """How an architecture differs from llama.

    Attributes:
        mlp: ``gated``: act(fc) * gate in two tensors; ``fused``: one tensor ``fc`` of [gate; fc] rows; ``plain``:
            act(fc); ``experts``: a router over fused experts.
        norm: ``rms`` (weight) or ``layer`` (weight and bias).
        qk_norm: RMSNorm per head on q and k before the rotation.
        scale_embedding: The embedding is multiplied by sqrt(hidden_size).
        learned_positions: ``position_embedding`` is added; no rotation.
        dense_bias_with_qkv: ``attn_bias`` also means a bias of the attention output.
        sliding_window: The window of ``config.json`` is honoured.
    """

    mlp: MlpKind = "gated"
    norm: Literal["rms", "layer"] = "rms"
    qk_norm: bool = False
    scale_embedding: bool = False
    learned_positions: bool = False
    dense_bias_with_qkv: bool = True
    sliding_window: bool = False


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(),
}


@dataclass(frozen=True, slots=True)
class Quantization:
    """The ``quantization`` object; None for an algorithm means not quantized."""

    algo: str | None = None
    kv_cache: str | None = None
    group_size: int = 128
    exclude: tuple[str, ...] = ("*lm_head", "*router", "*vocab_embedding", "*position_embedding")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder described by ``config.json``. Sizes are of the whole model, not of a rank.

    Attributes:
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
    rotary_scaling: Mapping[str, Any] | None
    attn_bias: bool
    mlp_bias: bool
    tp: int
    pp: int
    embedding_split: int | None
    quantization: Quantization = field(default_factory=Quantization)

    @property
    def max_seq_len(self) -> int:
        """Tokens the positions are good for: stretched by linear scaling, as the builder deduces it."""
        scaling = self.rotary_scaling or {}
        stretch = scaling.get("factor", 1.0) if scaling.get("type", scaling.get("rope_type")) == "linear" else 1.0
        return round(self.max_position_embeddings * stretch)


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
    except ValueError as error:
        raise EngineError(f"{path}: not JSON ({error})") from error
    if not isinstance(raw, dict):
        raise EngineError(f"{path}: expected a JSON object")
    try:
        return _parse(raw)
    except EngineError as error:
        raise EngineError(f"{path}: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        what = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
        raise EngineError(f"{path}: {what}") from error


def _parse(raw: Mapping[str, Any]) -> ModelConfig:
    architecture = raw["architecture"]
    family = FAMILIES.get(architecture)
    if family is None:
        raise EngineError(f"architecture {architecture!r} is not supported; known are {', '.join(FAMILIES)}")
    heads = int(raw["num_attention_heads"])
    hidden_size = int(raw["hidden_size"])
    head_size = int(raw.get("head_size") or hidden_size // heads)
    mapping = raw.get("mapping") or {}
    config = ModelConfig(
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
        rotary_dim=int(raw.get("rotary_embedding_dim") or head_size * raw.get("rotary_pct", 1.0)),
        rotary_base=float(raw.get("rotary_base", 10000.0)),
        rotary_scaling=raw.get("rotary_scaling"),
        attn_bias=bool(raw.get("attn_bias", raw.get("bias", False))),
        mlp_bias=bool(raw.get("mlp_bias", raw.get("bias", False))),
        tp=int(mapping.get("tp_size", 1)),
        pp=int(mapping.get("pp_size", 1)),
        embedding_split=int(raw.get("embedding_sharding_dim", 0)) if raw.get("use_parallel_embedding") else None,
        quantization=_parse_quantization(raw.get("quantization") or {}),
    )
    _check(config, raw)
    return config


def _parse_quantization(raw: Mapping[str, Any]) -> Quantization:
    exclude = raw.get("exclude_modules")
    default = Quantization()
    return Quantization(
        algo=raw.get("quant_algo"),
        kv_cache=raw.get("kv_cache_quant_algo"),
        group_size=int(raw.get("group_size") or default.group_size),
        exclude=default.exclude if exclude is None else tuple(exclude),
    )


def _check(config: ModelConfig, raw: Mapping[str, Any]) -> None:
    expected = "learned_absolute" if config.family.learned_positions else "rope_gpt_neox"
    position = raw.get("position_embedding_type", "learned_absolute")
    if position != expected:
        raise EngineError(
            f"position_embedding_type {position!r} is unknown for {config.architecture}: it has {expected}"
        )
    if config.heads % config.kv_heads:
        raise EngineError(f"{config.heads} attention heads are no multiple of {config.kv_heads} key/value heads")
    if config.heads % config.tp or (config.kv_heads % config.tp and config.tp % config.kv_heads):
        raise EngineError(f"{config.heads} heads, {config.kv_heads} of key/value, cannot be split over tp {config.tp}")
    if not 1 <= config.pp <= config.layers:
        raise EngineError(f"pp_size {config.pp} is not between 1 and the {config.layers} layers")
    for key in ("residual_mlp", "use_logn_attn", "fc_after_embed"):
        if raw.get(key):
            raise EngineError(f"{key} is {raw[key]!r}; this engine knows only models without it")
