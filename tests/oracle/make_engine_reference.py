"""Make the tiny checkpoints and transformers' logits that the reference engine's tests compare with.

Run with torch and transformers (the ``oracle`` extra) from the project root:

    python tests/oracle/make_engine_reference.py [CASE ...]

Each case is a seeded random model, its weights rounded to the checkpoint's type. ``tests/data/engine/<case>/`` gets a
TensorRT-LLM checkpoint (``config.json``, ``rank0.safetensors``), written by this script without the project's
converter, and ``reference.safetensors`` with ``token_ids`` and transformers' float32 ``logits`` of the last positions.
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

LOGITS_KEPT = 40
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
    """One model: its transformers config and how it becomes a checkpoint.

    Attributes:
        extra: Fields of the checkpoint's ``config.json`` beyond the common ones.
        convert: Makes the checkpoint's tensors from the state dict.
        norms_grow: The checkpoint holds norm weights plus one.
    """

    config_class: str
    architecture: str
    options: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    convert: Callable[[Tensors, Any], Tensors] | None = None
    tokens: int = 24
    dtype: torch.dtype = torch.bfloat16
    norms_grow: bool = False


LLAMA_NAMES = {
    "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.q_layernorm",
    "self_attn.k_norm": "attention.k_layernorm",
    "mlp.gate_proj": "mlp.fc",
    "mlp.up_proj": "mlp.gate",
    "mlp.down_proj": "mlp.proj",
    "mlp.c_fc": "mlp.fc",
    "mlp.c_proj": "mlp.proj",
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "post_layernorm",
    "pre_feedforward_layernorm": "pre_feedforward_layernorm",
    "post_feedforward_layernorm": "post_feedforward_layernorm",
    "block_sparse_moe.gate": "mlp.router",
}


def llama_tensors(state: Tensors, config: Any) -> Tensors:
    """Rename and join the tensors of a llama-like model; biases come along where there are any."""
    out = {"lm_head.weight": state["lm_head.weight"].clone()}
    for kind in ("weight", "bias"):
        for old, new in (("model.embed_tokens", "vocab_embedding"), ("model.norm", "ln_f")):
            if f"{old}.{kind}" in state:
                out[f"transformer.{new}.{kind}"] = state[f"{old}.{kind}"]
        for index in range(config.num_hidden_layers):
            source, target = f"model.layers.{index}", f"transformer.layers.{index}"
            for old, new in LLAMA_NAMES.items():
                if f"{source}.{old}.{kind}" in state:
                    out[f"{target}.{new}.{kind}"] = state[f"{source}.{old}.{kind}"]
            parts = [f"{source}.self_attn.{part}_proj.{kind}" for part in "qkv"]
            if parts[0] in state:
                out[f"{target}.attention.qkv.{kind}"] = torch.cat([state[part] for part in parts])
    return out


def mixtral_tensors(state: Tensors, config: Any) -> Tensors:
    """Stack the experts: rows of w3, then of w1."""
    out = llama_tensors(state, config)
    for index in range(config.num_hidden_layers):
        experts = [f"model.layers.{index}.block_sparse_moe.experts.{e}" for e in range(config.num_local_experts)]
        both = [torch.cat([state[f"{e}.w3.weight"], state[f"{e}.w1.weight"]]) for e in experts]
        out[f"transformer.layers.{index}.mlp.fc.weight"] = torch.stack(both)
        out[f"transformer.layers.{index}.mlp.proj.weight"] = torch.stack([state[f"{e}.w2.weight"] for e in experts])
    return out


def phi3_tensors(state: Tensors, config: Any) -> Tensors:
    """Keep the fused qkv; swap the halves of the fused MLP."""
    out = llama_tensors(state, config)
    for index in range(config.num_hidden_layers):
        source, target = f"model.layers.{index}", f"transformer.layers.{index}"
        out[f"{target}.attention.qkv.weight"] = state[f"{source}.self_attn.qkv_proj.weight"]
        gate, up = state[f"{source}.mlp.gate_up_proj.weight"].chunk(2)
        out[f"{target}.mlp.fc.weight"] = torch.cat([up, gate])
    return out


def gpt2_tensors(state: Tensors, config: Any) -> Tensors:
    """Transpose the Conv1D weights and rename."""
    out = {
        "lm_head.weight": state["lm_head.weight"].clone(),
        "transformer.vocab_embedding.weight": state["transformer.wte.weight"],
        "transformer.position_embedding.weight": state["transformer.wpe.weight"],
    }
    names = {
        "attn.c_attn": "attention.qkv",
        "attn.c_proj": "attention.dense",
        "mlp.c_fc": "mlp.fc",
        "mlp.c_proj": "mlp.proj",
        "ln_1": "input_layernorm",
        "ln_2": "post_layernorm",
    }
    for kind in ("weight", "bias"):
        out[f"transformer.ln_f.{kind}"] = state[f"transformer.ln_f.{kind}"]
        for index in range(config.n_layer):
            for old, new in names.items():
                value = state[f"transformer.h.{index}.{old}.{kind}"]
                out[f"transformer.layers.{index}.{new}.{kind}"] = value.T if value.ndim == 2 else value
    return out


MLP_BIASES = {"attention_bias": True, "mlp_bias": True}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
ONE_LAYER = {"num_hidden_layers": 1}
GEMMA_ACT = "gelu_pytorch_tanh"
GEMMA2 = {
    "query_pre_attn_scalar": 16,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 3.0,
    "sliding_window": 8,
}
LONG = [1.0 + 0.5 * n for n in range(4)]
SHORT = [1.0 + 0.1 * n for n in range(4)]

CASES: dict[str, Case] = {
    "llama_mha": Case("LlamaConfig", "LlamaForCausalLM", {"num_key_value_heads": 4}, dtype=torch.float16),
    "llama_gqa": Case("LlamaConfig", "LlamaForCausalLM"),
    "llama_headdim": Case("LlamaConfig", "LlamaForCausalLM", {"head_dim": 16, **ONE_LAYER}),
    "llama_rope_linear": Case(
        "LlamaConfig",
        "LlamaForCausalLM",
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, **ONE_LAYER},
        tokens=150,
    ),
    "llama_rope_llama3": Case(
        "LlamaConfig",
        "LlamaForCausalLM",
        {"rope_theta": 10000.0, "max_position_embeddings": 256, "rope_scaling": LLAMA3_SCALING},
        tokens=200,
    ),
    "llama_tied": Case("LlamaConfig", "LlamaForCausalLM", {"tie_word_embeddings": True, **ONE_LAYER}),
    "llama_biases": Case(
        "LlamaConfig", "LlamaForCausalLM", {**MLP_BIASES, **ONE_LAYER}, {"attn_bias": True, "mlp_bias": True}
    ),
    "mistral_window": Case(
        "MistralConfig", "MistralForCausalLM", {"sliding_window": 10, **ONE_LAYER}, {"sliding_window": 10}, tokens=40
    ),
    "mixtral": Case(
        "MixtralConfig",
        "MixtralForCausalLM",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 24,
            "sliding_window": None,
            **ONE_LAYER,
        },
        {"hidden_act": "swiglu", "moe": {"num_experts": 4, "top_k": 2, "normalization_mode": 1}},
        mixtral_tensors,
    ),
    "qwen2": Case("Qwen2Config", "Qwen2ForCausalLM", ONE_LAYER, {"attn_bias": True}),
    "qwen3": Case("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16, **ONE_LAYER}),
    "gemma": Case(
        "GemmaConfig",
        "GemmaForCausalLM",
        {"head_dim": 16, "hidden_activation": GEMMA_ACT, "tie_word_embeddings": True, **ONE_LAYER},
        {"hidden_act": GEMMA_ACT},
        norms_grow=True,
    ),
    "gemma2": Case(
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {"head_dim": 8, "tie_word_embeddings": True, **GEMMA2},
        {"hidden_act": GEMMA_ACT, "inter_layernorms": True, **GEMMA2},
        norms_grow=True,
    ),
    "gemma3": Case(
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "head_dim": 8,
            "tie_word_embeddings": True,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 8,
            "query_pre_attn_scalar": 16,
            "rope_theta": 100000.0,
            "rope_local_base_freq": 500.0,
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        },
        {
            "hidden_act": GEMMA_ACT,
            "inter_layernorms": True,
            "query_pre_attn_scalar": 16,
            "sliding_window": 8,
            "sliding_window_pattern": 2,
            "rope_local_base_freq": 500.0,
        },
        norms_grow=True,
    ),
    "phi3": Case(
        "Phi3Config",
        "Phi3ForCausalLM",
        {"sliding_window": None, "pad_token_id": 0, **ONE_LAYER},
        {"hidden_act": "swiglu"},
        phi3_tensors,
    ),
    "phi3_longrope": Case(
        "Phi3Config",
        "Phi3ForCausalLM",
        {
            "sliding_window": None,
            "pad_token_id": 0,
            "original_max_position_embeddings": 32,
            "rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG},
            **ONE_LAYER,
        },
        {
            "hidden_act": "swiglu",
            "position_embedding_type": "long_rope",
            "rotary_scaling": None,
            "longrope_scaling_short_factors": SHORT,
            "longrope_scaling_long_factors": LONG,
            "original_max_position_embeddings": 32,
        },
        phi3_tensors,
        tokens=60,
    ),
    "gpt2": Case(
        "GPT2Config",
        "GPT2LMHeadModel",
        {"max_position_embeddings": 64, "tie_word_embeddings": True, **ONE_LAYER},
        {
            "hidden_act": "gelu_new",
            "position_embedding_type": "learned_absolute",
            "num_key_value_heads": 4,
            "intermediate_size": 128,
            "max_position_embeddings": 64,
            "bias": True,
        },
        gpt2_tensors,
    ),
    "starcoder2": Case(
        "Starcoder2Config",
        "Starcoder2ForCausalLM",
        {"sliding_window": None, "use_bias": True, "hidden_act": GEMMA_ACT, **ONE_LAYER},
        {"bias": True},
    ),
}


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
        "num_key_value_heads": getattr(config, "num_key_value_heads", None),
        "intermediate_size": getattr(config, "intermediate_size", None),
        "head_size": head_size,
        "hidden_act": getattr(config, "hidden_act", None),
        "norm_epsilon": next(
            getattr(config, name)
            for name in ("rms_norm_eps", "norm_epsilon", "layer_norm_epsilon")
            if hasattr(config, name)
        ),
        "position_embedding_type": "rope_gpt_neox",
        "max_position_embeddings": config.max_position_embeddings,
        "rotary_embedding_dim": head_size,
        "rotary_base": getattr(config, "rope_theta", 10000.0),
        "rotary_scaling": getattr(config, "rope_scaling", None),
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
            is_gain = key.endswith("weight") and any(mark in key for mark in ("norm", "ln_"))
            value = spread + (1.0 if is_gain else 0.0)
            if is_gain and case.norms_grow:
                # Rounded so that the checkpoint's type holds the stored value, one more than the parameter, exactly.
                parameter.copy_(value.to(case.dtype).float() - 1)
            else:
                parameter.copy_(
                    value.to(torch.float32 if "gate.weight" in key and "moe" in key else case.dtype).float()
                )
        token_ids = torch.randint(0, config.vocab_size, (case.tokens,))
        logits = model(token_ids[None]).logits[0].float()[-LOGITS_KEPT:].contiguous()
    folder = OUT / name
    folder.mkdir(parents=True, exist_ok=True)
    state = {key: value.detach() for key, value in model.state_dict().items()}
    tensors = (case.convert or llama_tensors)(state, config)
    if case.norms_grow:
        tensors = {key: value + 1 if "norm" in key or "ln_f" in key else value for key, value in tensors.items()}
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
