"""Make the ``config.json`` of a TensorRT-LLM checkpoint.

Only keys that every release accepts are written; in ``mapping`` an unknown key stops the load.
"""

from __future__ import annotations

from typing import Any

from pipeline.checkpoint.families.base import Family
from pipeline.checkpoint.hfconfig import Architecture
from pipeline.checkpoint.options import DTYPES, ConvertOptions
from pipeline.errors import SourceError


def resolve_dtype(architecture: Architecture, options: ConvertOptions) -> str:
    """Return the type of the weights to write.

    Raises:
        SourceError: The source states a type that a checkpoint cannot have.
    """
    if options.dtype != "auto":
        return options.dtype
    if architecture.dtype in ("", "float32"):
        return "float16"
    if architecture.dtype not in DTYPES:
        raise SourceError(
            f"config.json: dtype is {architecture.dtype!r}; expected float16, bfloat16 or float32",
            hint="state the type to write: dtype bfloat16",
        )
    return architecture.dtype


def target_config(architecture: Architecture, family: Family, dtype: str, options: ConvertOptions) -> dict[str, Any]:
    """Return the config of the checkpoint.

    ``sliding_window`` is an extra key, written only when the window is shorter than the context: the model class does
    not read it, but what serves the engine must set its attention window from it.
    """
    config: dict[str, Any] = {
        "architecture": architecture.name,
        "dtype": dtype,
        "logits_dtype": "float32",
        "vocab_size": architecture.vocab_size,
        "hidden_size": architecture.hidden_size,
        "num_hidden_layers": architecture.num_layers,
        "num_attention_heads": architecture.num_heads,
        "num_key_value_heads": architecture.num_kv_heads,
        "intermediate_size": architecture.intermediate_size,
        "head_size": architecture.head_dim,
        "hidden_act": architecture.hidden_act,
        "norm_epsilon": architecture.norm_eps,
        "position_embedding_type": "rope_gpt_neox",
        "max_position_embeddings": architecture.max_positions,
        "rotary_embedding_dim": int(architecture.head_dim * architecture.rotary_factor),
        "qk_layernorm": False,
        "use_parallel_embedding": options.embedding_sharding != "none",
        "embedding_sharding_dim": 1 if options.embedding_sharding == "hidden" else 0,
        "mapping": _mapping(options),
        "quantization": _quantization(),
        "runtime_defaults": None,
    }
    if effective_window(architecture) is not None:
        config["sliding_window"] = architecture.sliding_window
    own = dict(family.config(architecture))
    config["quantization"] |= own.pop("quantization", {})
    return config | own


def effective_window(architecture: Architecture) -> int | None:
    """Return the sliding window if it is shorter than the context."""
    window = architecture.sliding_window
    if window is None or (architecture.max_positions is not None and window >= architecture.max_positions):
        return None
    return window


def _mapping(options: ConvertOptions) -> dict[str, int]:
    return {
        "world_size": options.tp * options.pp,
        "gpus_per_node": 8,
        "cp_size": 1,
        "tp_size": options.tp,
        "pp_size": options.pp,
        "moe_tp_size": options.tp,
        "moe_ep_size": 1,
    }


def _quantization() -> dict[str, Any]:
    return {
        "quant_algo": None,
        "kv_cache_quant_algo": None,
        "group_size": 128,
        "smoothquant_val": 0.5,
        "clamp_val": None,
        "use_meta_recipe": False,
        "has_zero_point": False,
        "pre_quant_scale": False,
        "exclude_modules": None,
    }
