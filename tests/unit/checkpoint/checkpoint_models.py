"""Tiny seeded models on disk. Biases and norms are not trivial, so that a forgotten one shows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from ml_dtypes import bfloat16
from safetensors.numpy import save_file

Tensors = dict[str, npt.NDArray[Any]]

CONFIG: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def config(**changes: Any) -> dict[str, Any]:
    """Return the tiny llama's config with changes."""
    return {**CONFIG, **changes}


def llama_tensors(config: Mapping[str, Any], dtype: Any = bfloat16, seed: int = 5) -> Tensors:
    """Return random tensors that fit a llama-like config, biases where the config has them."""
    rng = np.random.default_rng(seed)
    hidden, width, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head = config.get("head_dim") or hidden // heads
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        linears = {
            "self_attn.q_proj": (heads * head, hidden),
            "self_attn.k_proj": (kv_heads * head, hidden),
            "self_attn.v_proj": (kv_heads * head, hidden),
            "self_attn.o_proj": (hidden, heads * head),
            "mlp.gate_proj": (width, hidden),
            "mlp.up_proj": (width, hidden),
            "mlp.down_proj": (hidden, width),
        }
        for name, shape in linears.items():
            shapes[f"{at}{name}.weight"] = shape
            if config.get("mlp_bias" if name.startswith("mlp") else "attention_bias"):
                shapes[f"{at}{name}.bias"] = shape[:1]
        shapes[f"{at}input_layernorm.weight"] = (hidden,)
        shapes[f"{at}post_attention_layernorm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocab, hidden)
    return {name: rng.normal(0, 0.5, shape).astype(np.float32).astype(dtype) for name, shape in shapes.items()}


def save(folder: Path, config: Mapping[str, Any], tensors: Tensors, shards: int = 1) -> Path:
    """Save a model folder, in shards with an index if more than one."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {}
    names = sorted(tensors)
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        chosen = names[shard::shards]
        save_file({name: tensors[name] for name in chosen}, folder / file)
        weight_map.update(dict.fromkeys(chosen, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def tiny_llama(folder: Path, dtype: Any = bfloat16, shards: int = 1, **changes: Any) -> Path:
    """Save a tiny llama."""
    chosen = config(**changes)
    return save(folder, chosen, llama_tensors(chosen, dtype), shards)
