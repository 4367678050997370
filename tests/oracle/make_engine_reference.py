"""Make the tiny checkpoints and transformers' logits that the reference engine's tests compare with.

Run with torch and transformers (the ``oracle`` extra) from the project root:

    python tests/oracle/make_engine_reference.py [CASE ...]

Each case is a seeded random model, its weights rounded to the checkpoint's type. ``tests/data/engine/<case>/`` gets a
TensorRT-LLM checkpoint (``config.json``, ``rank0.safetensors``), written by this script without the project's
converter, and ``reference.safetensors`` with ``token_ids`` and transformers' float32 ``logits``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

OUT = Path(__file__).parents[1] / "data" / "engine"
Tensors = dict[str, torch.Tensor]

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Case:
    """One model: its transformers config and how it becomes a checkpoint."""

    config_class: str
    architecture: str
    options: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    convert: Callable[[Tensors, Any], Tensors] | None = None
    tokens: int = 24
    dtype: torch.dtype = torch.bfloat16


CASES: dict[str, Case] = {
    "llama_mha": Case("LlamaConfig", "LlamaForCausalLM", {"num_key_value_heads": 4}, dtype=torch.float16),
    "llama_gqa": Case("LlamaConfig", "LlamaForCausalLM"),
    "llama_headdim": Case("LlamaConfig", "LlamaForCausalLM", {"head_dim": 16}),
    "llama_rope_linear": Case(
        "LlamaConfig", "LlamaForCausalLM", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, tokens=150
    ),
    "llama_rope_llama3": Case(
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            "rope_theta": 10000.0,
            "max_position_embeddings": 256,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
        tokens=200,
    ),
    "llama_tied": Case("LlamaConfig", "LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama_biases": Case("LlamaConfig", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
}


def llama_tensors(state: Tensors, config: Any) -> Tensors:
    """Rename and join the tensors of a llama-like model; biases come along where there are any."""
    out = {
        "transformer.vocab_embedding.weight": state["model.embed_tokens.weight"],
        "transformer.ln_f.weight": state["model.norm.weight"],
        "lm_head.weight": state["lm_head.weight"].clone(),
    }
    renamed = {
        "self_attn.o_proj": "attention.dense",
        "mlp.gate_proj": "mlp.fc",
        "mlp.up_proj": "mlp.gate",
        "mlp.down_proj": "mlp.proj",
        "input_layernorm": "input_layernorm",
        "post_attention_layernorm": "post_layernorm",
    }
    for index in range(config.num_hidden_layers):
        source, target = f"model.layers.{index}", f"transformer.layers.{index}"
        for kind in ("weight", "bias"):
            for old, new in renamed.items():
                if f"{source}.{old}.{kind}" in state:
                    out[f"{target}.{new}.{kind}"] = state[f"{source}.{old}.{kind}"]
            parts = [f"{source}.self_attn.{part}_proj.{kind}" for part in "qkv"]
            if parts[0] in state:
                out[f"{target}.attention.qkv.{kind}"] = torch.cat([state[part] for part in parts])
    return out


def checkpoint_config(case: Case, config: Any) -> dict[str, Any]:
    """Return ``config.json`` of the checkpoint."""
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {
        "architecture": case.architecture,
        "dtype": str(case.dtype).removeprefix("torch."),
        "logits_dtype": "float32",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "intermediate_size": config.intermediate_size,
        "head_size": head_size,
        "hidden_act": config.hidden_act,
        "norm_epsilon": config.rms_norm_eps,
        "position_embedding_type": "rope_gpt_neox",
        "max_position_embeddings": config.max_position_embeddings,
        "rotary_embedding_dim": head_size,
        "rotary_base": config.rope_theta,
        "rotary_scaling": getattr(config, "rope_scaling", None),
        "attn_bias": getattr(config, "attention_bias", False),
        "mlp_bias": getattr(config, "mlp_bias", False),
        "use_parallel_embedding": False,
        "embedding_sharding_dim": 0,
        "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
        **case.extra,
    }


def make(name: str, case: Case) -> None:
    """Write one case."""
    torch.manual_seed(sum(map(ord, name)))
    config = getattr(transformers, case.config_class)(**{**TINY, **case.options})
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            # Wide enough that every part shows in the logits; gains around one, biases around nought.
            spread = torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.15)
            is_gain = "norm" in key and key.endswith("weight")
            parameter.copy_((spread + (1.0 if is_gain else 0.0)).to(case.dtype).float())
        token_ids = torch.randint(0, config.vocab_size, (case.tokens,))
        logits = model(token_ids[None]).logits[0].float().contiguous()
    folder = OUT / name
    folder.mkdir(parents=True, exist_ok=True)
    state = {key: value.detach() for key, value in model.state_dict().items()}
    tensors = (case.convert or llama_tensors)(state, config)
    stored = {
        key: value.to(torch.float32 if "router" in key else case.dtype).contiguous() for key, value in tensors.items()
    }
    save_file(stored, folder / "rank0.safetensors")
    save_file({"token_ids": token_ids, "logits": logits}, folder / "reference.safetensors")
    text = json.dumps(checkpoint_config(case, config), indent=4)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    print(name, tuple(logits.shape), f"largest logit {logits.abs().max():.2f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for chosen in sys.argv[1:] or CASES:
        make(chosen, CASES[chosen])
