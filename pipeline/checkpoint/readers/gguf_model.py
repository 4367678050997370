"""Names and config of a GGUF model, in Hugging Face terms."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pipeline.checkpoint.readers.gguf_header import GgufHeader
from pipeline.errors import SourceError

# GGUF name inside a block -> Hugging Face name inside a layer.
_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

# general.architecture -> (model class, model_type, whether q and k rows are stored interleaved).
_CLASSES = {
    "llama": ("LlamaForCausalLM", "llama", True),
}


def hf_name(name: str, config: Mapping[str, Any], where: str) -> str:
    """Return the Hugging Face name of a GGUF tensor.

    Raises:
        SourceError: The tensor has no counterpart; names it.
    """
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match:
        layer, part, kind = match.groups()
        known = (_MODEL if layer is None else _LAYER).get(part)
        if known and layer is None:
            return f"{known}.{kind}"
        if known and int(layer) < config["num_hidden_layers"]:
            return f"model.layers.{layer}.{known}.{kind}"
    raise SourceError(
        f"{where}: tensor {name} is not known in a {config['model_type']} model",
        hint="rope_freqs holds rope factors that a TensorRT-LLM checkpoint cannot carry; use the Hugging Face model"
        if name.startswith("rope_freqs")
        else "use the Hugging Face model instead of its GGUF form",
    )


def rotary_heads(name: str, config: Mapping[str, Any]) -> int:
    """Return the number of heads whose rows are stored interleaved in this tensor, 0 if its rows are in order."""
    if not config["gguf_interleaved"]:
        return 0
    if ".self_attn.q_proj." in name:
        return int(config["num_attention_heads"])
    if ".self_attn.k_proj." in name:
        return int(config["num_key_value_heads"])
    return 0


def gguf_config(header: GgufHeader, dtype: str, where: str) -> dict[str, Any]:
    """Build the Hugging Face style config from the metadata.

    Numbers are taken as stored: a rope base or an epsilon is the float32 value of the file.

    Raises:
        SourceError: The architecture is not supported, a key is missing, or rope scaling is of an unknown kind.
    """
    metadata = header.metadata
    kind = metadata.get("general.architecture")
    if kind not in _CLASSES:
        raise SourceError(
            f"{where}: GGUF architecture {kind!r} is not supported; expected one of {', '.join(_CLASSES)}",
            hint="convert the Hugging Face form of this model",
        )

    def need(key: str) -> Any:
        if f"{kind}.{key}" not in metadata:
            raise SourceError(f"{where}: metadata lacks {kind}.{key}")
        return metadata[f"{kind}.{key}"]

    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise SourceError(f"{where}: tensor token_embd.weight is missing")
    architecture, model_type, interleaved = _CLASSES[kind]
    heads, hidden = need("attention.head_count"), need("embedding_length")
    head_dim = metadata.get(f"{kind}.attention.key_length", hidden // heads)
    rotary = metadata.get(f"{kind}.rope.dimension_count", head_dim)
    if rotary != head_dim:
        raise SourceError(f"{where}: rotates {rotary} of {head_dim} values per head; expected all of them")
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "dtype": dtype,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get(f"{kind}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": need("feed_forward_length"),
        "hidden_act": "silu",
        "rms_norm_eps": need("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": need("context_length"),
        "rope_theta": metadata.get(f"{kind}.rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(metadata, kind, where),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_output.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
        "sliding_window": metadata.get(f"{kind}.attention.sliding_window"),
        "gguf_interleaved": interleaved,
    }
    for name in ("bos", "eos", "unknown", "padding"):
        token = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token is not None:
            config[{"unknown": "unk", "padding": "pad"}.get(name, name) + "_token_id"] = token
    return config


def _rope_scaling(metadata: Mapping[str, Any], kind: str, where: str) -> dict[str, Any] | None:
    scaling = metadata.get(f"{kind}.rope.scaling.type", "none")
    if scaling == "none":
        return None
    if scaling == "linear":
        return {"rope_type": "linear", "factor": metadata[f"{kind}.rope.scaling.factor"]}
    raise SourceError(
        f"{where}: rope scaling type {scaling!r} of a GGUF file; expected none or linear, no other is carried",
        hint="convert the Hugging Face form of this model",
    )
