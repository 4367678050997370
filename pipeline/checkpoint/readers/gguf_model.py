"""Names and config of a GGUF model, in Hugging Face terms."""

from __future__ import annotations

import re
import sys
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
        SourceError: The architecture is not supported, a key is missing or out of range, or rope scaling is of an
            unknown kind.
    """
    metadata = header.metadata
    kind = metadata.get("general.architecture")
    if not isinstance(kind, str) or kind not in _CLASSES:
        raise SourceError(
            f"{where}: GGUF architecture {kind!r} is not supported; expected one of {', '.join(_CLASSES)}",
            hint="convert the Hugging Face form of this model",
        )

    numbers = _Numbers(metadata, kind, where)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise SourceError(f"{where}: tensor token_embd.weight is missing")
    if len(embedding.shape) != 2:
        raise SourceError(f"{where}: token_embd.weight has {len(embedding.shape)} dimensions; expected 2")
    architecture, model_type, interleaved = _CLASSES[kind]
    layers = numbers.whole("block_count")
    if layers > len(header.tensors):
        count = len(header.tensors)
        raise SourceError(f"{where}: {kind}.block_count is {layers}; expected no more than the {count} tensors there")
    heads, hidden = numbers.whole("attention.head_count"), numbers.whole("embedding_length")
    head_dim = numbers.whole("attention.key_length", hidden // heads)
    rotary = numbers.whole("rope.dimension_count", head_dim)
    if rotary != head_dim:
        raise SourceError(f"{where}: rotates {rotary} of {head_dim} values per head; expected all of them")
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "dtype": dtype,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": numbers.whole("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": numbers.whole("feed_forward_length"),
        "hidden_act": "silu",
        "rms_norm_eps": numbers.positive("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": numbers.whole("context_length"),
        "rope_theta": numbers.positive("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(numbers),
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


class _Numbers:
    """Typed access to the numbers of an architecture, with errors that name file and key."""

    def __init__(self, metadata: Mapping[str, Any], kind: str, where: str) -> None:
        self.metadata = metadata
        self.kind = kind
        self.where = where

    def whole(self, key: str, default: int | None = None) -> int:
        value = self._stated(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._wrong(key, value, "a whole number from 1")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self._stated(key, default)
        known = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not known or not 0 < value <= sys.float_info.max:
            raise self._wrong(key, value, "a number above 0")
        return value  # type: ignore[no-any-return]  # a number, see above

    def _stated(self, key: str, default: Any) -> Any:
        value = self.metadata.get(f"{self.kind}.{key}", default)
        if value is None:
            raise SourceError(f"{self.where}: metadata lacks {self.kind}.{key}")
        return value

    def _wrong(self, key: str, value: Any, expected: str) -> SourceError:
        return SourceError(f"{self.where}: {self.kind}.{key} is {value!r}; expected {expected}")


def _rope_scaling(numbers: _Numbers) -> dict[str, Any] | None:
    scaling = numbers.metadata.get(f"{numbers.kind}.rope.scaling.type", "none")
    if scaling == "none":
        return None
    if scaling == "linear":
        return {"rope_type": "linear", "factor": numbers.positive("rope.scaling.factor")}
    raise SourceError(
        f"{numbers.where}: rope scaling type {scaling!r} of a GGUF file; expected none or linear, no other is carried",
        hint="convert the Hugging Face form of this model",
    )
