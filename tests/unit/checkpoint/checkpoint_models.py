"""Tiny seeded models on disk. Biases and norms are not trivial, so that a forgotten one shows."""

from __future__ import annotations

import json
import math
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
    shapes = llama_shapes(config)
    return {name: rng.normal(0, 0.5, shape).astype(np.float32).astype(dtype) for name, shape in shapes.items()}


def llama_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a llama-like config."""
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
    return shapes


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


def tiny_gguf(
    path: Path,
    *,
    kind: str = "f32",
    pre: str = "smollm",
    tokenizer_model: str = "gpt2",
    eot: int | None = None,
    extra: Mapping[str, npt.NDArray[Any]] | None = None,
) -> Path:
    """Save the tiny llama as GGUF with a byte-level tokenizer; q and k rows interleaved as llama files have them."""
    from gguf import GGMLQuantizationType, GGUFWriter, quantize

    chosen = config(tie_word_embeddings=True, intermediate_size=64)
    writer = GGUFWriter(str(path), "llama")
    writer.add_block_count(chosen["num_hidden_layers"])
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    tokens = ["<|start|>", "<|end|>", "a", "b", "1", "2", "Ġ", "ab", "12", "Ã", "©"]
    writer.add_tokenizer_model(tokenizer_model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(["a b", "1 2"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    if eot is not None:
        writer.add_eot_token_id(eot)
    writer.add_chat_template("{{ messages }}")
    quantized = {"q8_0": GGMLQuantizationType.Q8_0, "q4_1": GGMLQuantizationType.Q4_1}.get(kind)
    for name, tensor in {**gguf_tensors(), **(extra or {})}.items():
        if tensor.ndim < 2:
            writer.add_tensor(name, tensor)
        elif quantized is not None:
            writer.add_tensor(name, quantize(tensor, quantized), raw_dtype=quantized)
        else:
            writer.add_tensor(name, tensor.astype(np.float16 if kind == "f16" else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_tensors() -> Tensors:
    """Return the tensors of the tiny GGUF model in GGUF names and row order."""
    from_hf = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
    }
    renamed = {}
    for name, tensor in gguf_source_tensors().items():
        layer = name.split(".")[2] if name.startswith("model.layers.") else None
        stem = name.removesuffix(".weight").removeprefix(f"model.layers.{layer}.")
        if stem.endswith(("q_proj", "k_proj")):
            heads = tensor.shape[0] // 8
            # Half-split rows (first halves, then second halves) become pairs.
            tensor = tensor.reshape(heads, 2, 4, 32).swapaxes(1, 2).reshape(tensor.shape)
        renamed[(f"blk.{layer}." if layer else "") + from_hf[stem] + ".weight"] = tensor
    return renamed


def gguf_source_tensors() -> Tensors:
    """Return the Hugging Face tensors of the tiny GGUF model, float32."""
    return llama_tensors(config(tie_word_embeddings=True, intermediate_size=64), np.float32)


def sparse_llama(folder: Path, *, shards: int, **changes: Any) -> Path:
    """Save a tied llama of zeros as sparse files: of any size, and nothing is written."""
    chosen = config(tie_word_embeddings=True, **changes)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(chosen))
    shapes = sorted(llama_shapes(chosen).items())
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors" if shards > 1 else "model.safetensors"
        header, end = {}, 0
        for name, shape in shapes[shard::shards]:
            begin, end = end, end + 2 * math.prod(shape)
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
            weight_map[name] = file
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + end)
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder
