"""A tiny random llama checkpoint, a tiny byte-level tokenizer and their repository, made on the spot."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.triton.repository import RepositorySettings, emit_repository

BOS, EOS, IM_END = 0, 1, 2
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("U", "s"), ("Us", "e"), ("Use", "r"), ("User", ":"), ("Ċ", "User:")]
VOCAB_SIZE = 3 + 256 + len(MERGES)
MAX_SEQ_LEN = 256
SLOW_SEQ_LEN = 8192


@dataclass(frozen=True)
class Model:
    """Folders of the tiny model."""

    checkpoint: Path
    tokenizer: Path


def write_tokenizer(folder: Path) -> Path:
    """Write a byte-level tokenizer that adds BOS and has two end ids, one of them named by generation_config alone."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    specials = ["<s>", "</s>", "<|im_end|>"]
    vocab = {text: index for index, text in enumerate(specials + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for left, right in MERGES:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in specials])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, IM_END]}))
    return folder


def write_checkpoint(folder: Path, *, layers: int = 2, hidden: int = 32, positions: int = MAX_SEQ_LEN) -> Path:
    """Write a random float32 llama checkpoint in TensorRT-LLM's format."""
    from safetensors.numpy import save_file

    heads, kv_heads, mlp = 4, 2, 64
    size = hidden // heads
    random = np.random.default_rng(7)

    def normal(*shape: int) -> np.ndarray:
        return random.normal(0, 0.15, shape).astype(np.float32)

    tensors = {
        "transformer.vocab_embedding.weight": random.normal(0, 1, (VOCAB_SIZE, hidden)).astype(np.float32),
        "transformer.ln_f.weight": np.ones(hidden, np.float32),
        "lm_head.weight": normal(VOCAB_SIZE, hidden),
    }
    for layer in range(layers):
        prefix = f"transformer.layers.{layer}."
        tensors |= {
            prefix + "attention.qkv.weight": normal((heads + 2 * kv_heads) * size, hidden),
            prefix + "attention.dense.weight": normal(hidden, hidden),
            prefix + "mlp.fc.weight": normal(mlp, hidden),
            prefix + "mlp.gate.weight": normal(mlp, hidden),
            prefix + "mlp.proj.weight": normal(hidden, mlp),
            prefix + "input_layernorm.weight": np.ones(hidden, np.float32),
            prefix + "post_layernorm.weight": np.ones(hidden, np.float32),
        }
    config = {
        "architecture": "LlamaForCausalLM",
        "dtype": "float32",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_size": size,
        "intermediate_size": mlp,
        "hidden_act": "silu",
        "norm_epsilon": 1e-5,
        "position_embedding_type": "rope_gpt_neox",
        "rotary_base": 10000.0,
        "rotary_scaling": None,
        "max_position_embeddings": positions,
        "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
        "tie_word_embeddings": False,
        "logits_dtype": "float32",
        "attn_bias": False,
        "mlp_bias": False,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "rank0.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def emit(folder: Path, model: Model, **changes: Any) -> Path:
    """Emit a repository of ``model``."""
    settings = {"max_batch_size": 4, "max_seq_len": MAX_SEQ_LEN, "threads": 1, **changes}
    emit_repository(
        folder, checkpoint=model.checkpoint, tokenizer=model.tokenizer, settings=RepositorySettings(**settings)
    )
    return folder
