"""Families beyond the golden references: each target against the source tensors it is made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_models import Tensors, config, llama_tensors, save
from checkpoint_reading import load_checkpoint, same
from ml_dtypes import bfloat16

from pipeline.checkpoint import ConvertOptions, convert_checkpoint, verify_checkpoint
from pipeline.checkpoint.families import family_of, supported_architectures
from pipeline.errors import ConfigError, SourceError


def converted(source: Path, out: Path, **options: Any) -> tuple[list[Tensors], dict[str, Any]]:
    """Convert, verify, and return ranks and config."""
    convert_checkpoint(source, out, options=ConvertOptions(**options))
    assert verify_checkpoint(out) == []
    return load_checkpoint(out), json.loads((out / "config.json").read_text())


def extra(shapes: dict[str, tuple[int, ...]], seed: int = 9, dtype: Any = bfloat16) -> Tensors:
    """Return further random tensors."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(0, 0.5, shape).astype(np.float32).astype(dtype) for name, shape in shapes.items()}


def per_layer(shapes: dict[str, tuple[int, ...]], layers: int = 3) -> Tensors:
    """Return random tensors of every layer."""
    return extra({f"model.layers.{i}.{name}": shape for i in range(layers) for name, shape in shapes.items()})


GEMMA = {"head_dim": 16, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 16}
INNER = {"pre_feedforward_layernorm.weight": (32,), "post_feedforward_layernorm.weight": (32,)}


def gemma(folder: Path, version: int, **changes: Any) -> tuple[Path, Tensors]:
    """Save a tiny Gemma of a version; the head is tied by default."""
    names = {1: "GemmaForCausalLM", 2: "Gemma2ForCausalLM", 3: "Gemma3ForCausalLM"}
    types = {1: "gemma", 2: "gemma2", 3: "gemma3_text"}
    chosen = config(architectures=[names[version]], model_type=types[version], **{**GEMMA, **changes})
    del chosen["tie_word_embeddings"]
    tensors = llama_tensors({**chosen, "tie_word_embeddings": True})
    if version > 1:
        tensors |= per_layer(INNER)
    if version > 2:
        tensors |= per_layer({"self_attn.q_norm.weight": (16,), "self_attn.k_norm.weight": (16,)})
    return save(folder, chosen, tensors), tensors


@pytest.mark.parametrize("version", [1, 2, 3])
def test_gemma_adds_one_to_every_norm(tmp_path: Path, version: int) -> None:
    source, tensors = gemma(tmp_path / "m", version)
    (made,), _ = converted(source, tmp_path / "out")
    norms = {"input_layernorm": "input_layernorm", "post_layernorm": "post_attention_layernorm"}
    if version > 1:
        norms |= {name.removesuffix(".weight"): name.removesuffix(".weight") for name in INNER}
    if version > 2:
        norms |= {"attention.q_layernorm": "self_attn.q_norm", "attention.k_layernorm": "self_attn.k_norm"}
    for target, name in norms.items():
        expected = (tensors[f"model.layers.1.{name}.weight"].astype(np.float32) + 1).astype(bfloat16)
        assert same(made[f"transformer.layers.1.{target}.weight"], expected)
    expected = (tensors["model.norm.weight"].astype(np.float32) + 1).astype(bfloat16)
    assert same(made["transformer.ln_f.weight"], expected)


def test_gemma_config_carries_what_the_versions_add(tmp_path: Path) -> None:
    caps = {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0, "sliding_window": 64}
    _, two = converted(gemma(tmp_path / "2", 2, **caps)[0], tmp_path / "o2")
    assert (two["inter_layernorms"], two["query_pre_attn_scalar"], two["attn_logit_softcapping"]) == (True, 16, 50.0)
    assert (two["sliding_window"], two["_sliding_window_pattern"], two["final_logit_softcapping"]) == (64, 2, 30.0)
    rope = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}, "sliding_attention": {"rope_theta": 2e4}}
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    changes = {"rope_parameters": rope, "layer_types": kinds, "sliding_window_pattern": 3, "sliding_window": 64}
    _, three = converted(gemma(tmp_path / "3", 3, rope_theta=None, **changes)[0], tmp_path / "o3")
    assert (three["rotary_base"], three["rope_local_base_freq"], three["_sliding_window_pattern"]) == (1e6, 2e4, 3)
    assert "attn_logit_softcapping" not in three


def test_gemma_splits_the_embedding_over_ranks_whatever_was_asked(tmp_path: Path) -> None:
    source, tensors = gemma(tmp_path / "m", 1)
    ranks, made = converted(source, tmp_path / "out", tp=2)
    joined = np.concatenate([rank["transformer.vocab_embedding.weight"] for rank in ranks])
    assert same(joined[:61], tensors["model.embed_tokens.weight"])
    assert (made["use_parallel_embedding"], made["embedding_sharding_dim"]) == (True, 0)
    with pytest.raises(ConfigError, match="splits the embedding by vocabulary"):
        converted(source, tmp_path / "other", tp=2, embedding_sharding="hidden")


def phi3(folder: Path, **changes: Any) -> tuple[Path, Tensors]:
    """Save a tiny Phi-3: 4 heads, 2 key/value heads of 8."""
    chosen = config(architectures=["Phi3ForCausalLM"], model_type="phi3", **changes)
    plain = llama_tensors(chosen)
    tensors = {
        name: t for name, t in plain.items() if not any(p in name for p in ("q_proj", "k_proj", "v_proj", "gate", "up"))
    }
    tensors |= per_layer({"self_attn.qkv_proj.weight": (64, 32), "mlp.gate_up_proj.weight": (96, 32)})
    return save(folder, chosen, tensors), tensors


def test_phi3_cuts_each_part_of_its_fused_tensors(tmp_path: Path) -> None:
    source, tensors = phi3(tmp_path / "m")
    (whole,), made = converted(source, tmp_path / "one")
    ranks, _ = converted(source, tmp_path / "two", tp=2)
    gate, up = np.split(tensors["model.layers.1.mlp.gate_up_proj.weight"], 2)
    q, k, v = np.split(tensors["model.layers.1.self_attn.qkv_proj.weight"], [32, 48])
    at = "transformer.layers.1."
    assert same(whole[f"{at}mlp.fc.weight"], np.concatenate([up, gate]))
    assert same(whole[f"{at}attention.qkv.weight"], np.concatenate([q, k, v]))
    for rank, tensors_of in enumerate(ranks):
        assert same(tensors_of[f"{at}mlp.fc.weight"], np.concatenate([np.split(half, 2)[rank] for half in (up, gate)]))
        assert same(tensors_of[f"{at}attention.qkv.weight"], np.concatenate([np.split(p, 2)[rank] for p in (q, k, v)]))
    assert (made["hidden_act"], made["rotary_pct"], made["rotary_scaling"]) == ("swiglu", 1.0, None)


@pytest.mark.parametrize("kind", ["longrope", "su"])
def test_phi3_long_rope_has_keys_of_its_own(tmp_path: Path, kind: str) -> None:
    scaling = {"type": kind, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    changes = {"rope_scaling": scaling, "original_max_position_embeddings": 64, "partial_rotary_factor": 0.5}
    _, made = converted(phi3(tmp_path / "m", **changes)[0], tmp_path / "out")
    assert (made["position_embedding_type"], made["original_max_position_embeddings"]) == ("long_rope", 64)
    assert (made["longrope_scaling_short_factors"], made["longrope_scaling_long_factors"]) == ([1.0] * 4, [2.0] * 4)
    assert made["rotary_embedding_dim"] == 4


def starcoder2(folder: Path, **changes: Any) -> tuple[Path, Tensors]:
    """Save a tiny StarCoder2."""
    base = {
        "architectures": ["Starcoder2ForCausalLM"],
        "model_type": "starcoder2",
        "norm_epsilon": 1e-4,
        "rms_norm_eps": None,
    }
    chosen = config(**{**base, "hidden_act": "gelu_pytorch_tanh", "use_bias": True, **changes})
    bias = chosen["use_bias"]
    tensors = llama_tensors({**chosen, "attention_bias": bias})
    tensors = {name: tensor for name, tensor in tensors.items() if ".mlp." not in name}
    shapes: dict[str, tuple[int, ...]] = {"mlp.c_fc.weight": (48, 32), "mlp.c_proj.weight": (32, 48)}
    shapes |= {"input_layernorm.bias": (32,), "post_attention_layernorm.bias": (32,)}
    if bias:
        shapes |= {"mlp.c_fc.bias": (48,), "mlp.c_proj.bias": (32,)}
    return save(folder, chosen, tensors | per_layer(shapes) | extra({"model.norm.bias": (32,)}, 3)), tensors


@pytest.mark.parametrize("bias", [True, False])
def test_starcoder2_has_layer_norm_biases_and_a_plain_mlp(tmp_path: Path, bias: bool) -> None:
    source, tensors = starcoder2(tmp_path / "m", use_bias=bias)
    ranks, made = converted(source, tmp_path / "out", tp=2)
    qkv = [np.split(tensors[f"model.layers.0.self_attn.{p}_proj.weight"], 2)[1] for p in "qkv"]
    assert same(ranks[1]["transformer.layers.0.attention.qkv.weight"], np.concatenate(qkv))
    assert ("transformer.layers.0.mlp.fc.bias" in ranks[0]) == bias
    assert "transformer.ln_f.bias" in ranks[0]
    assert (made["gpt_variant"], made["bias"], made["hidden_act"], made["norm_epsilon"]) == (
        "starcoder2",
        bias,
        "gelu",
        1e-4,
    )


def gpt2_tensors(prefix: str) -> Tensors:
    """Return a tiny GPT-2 with masks, as old files have them."""
    shapes: dict[str, tuple[int, ...]] = {
        "wte.weight": (61, 32),
        "wpe.weight": (128, 32),
        "ln_f.weight": (32,),
        "ln_f.bias": (32,),
    }
    for i in range(2):
        linears = {"attn.c_attn": (32, 96), "attn.c_proj": (32, 32), "mlp.c_fc": (32, 128), "mlp.c_proj": (128, 32)}
        for name, shape in linears.items():
            shapes[f"h.{i}.{name}.weight"], shapes[f"h.{i}.{name}.bias"] = shape, shape[1:]
        for name in ("ln_1", "ln_2"):
            shapes[f"h.{i}.{name}.weight"] = shapes[f"h.{i}.{name}.bias"] = (32,)
    tensors = {prefix + name: tensor for name, tensor in extra(shapes).items()}
    tensors[f"{prefix}h.0.attn.bias"] = np.ones((1, 1, 4, 4), np.uint8)
    return tensors


GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "torch_dtype": "bfloat16",
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 128,
    "vocab_size": 61,
}


@pytest.mark.parametrize("prefix", ["transformer.", ""])
def test_gpt2_is_transposed_in_blocks_of_any_size(tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.checkpoint.blocks.BLOCK_VALUES", 70)
    tensors = gpt2_tensors(prefix)
    (made,), _ = converted(save(tmp_path / "m", GPT2, tensors), tmp_path / "out")
    for target, name in {"attention.qkv": "attn.c_attn", "mlp.fc": "mlp.c_fc", "mlp.proj": "mlp.c_proj"}.items():
        expected = np.ascontiguousarray(tensors[f"{prefix}h.1.{name}.weight"].T)
        assert same(made[f"transformer.layers.1.{target}.weight"], expected)
    assert same(made["lm_head.weight"], tensors[f"{prefix}wte.weight"])


def test_mixtral_router_is_float32_and_experts_are_up_then_gate(tmp_path: Path) -> None:
    moe = {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": None}
    chosen = config(architectures=["MixtralForCausalLM"], model_type="mixtral", **moe)
    tensors = {name: tensor for name, tensor in llama_tensors(chosen).items() if ".mlp." not in name}
    at = "block_sparse_moe."
    shapes: dict[str, tuple[int, ...]] = {f"{at}gate.weight": (3, 32)}
    for e in range(3):
        shapes |= {f"{at}experts.{e}.w{i}.weight": (32, 48) if i == 2 else (48, 32) for i in (1, 2, 3)}
    tensors |= per_layer(shapes)
    ranks, made = converted(save(tmp_path / "m", chosen, tensors), tmp_path / "out", tp=2, dtype="float16")
    for rank, stored in enumerate(ranks):
        router = tensors["model.layers.2.block_sparse_moe.gate.weight"]
        assert same(stored["transformer.layers.2.mlp.router.weight"], router.astype(np.float32))
        for e in range(3):
            w1, w2, w3 = (tensors[f"model.layers.2.{at}experts.{e}.w{i}.weight"].astype(np.float16) for i in (1, 2, 3))
            fc = np.concatenate([np.split(w3, 2)[rank], np.split(w1, 2)[rank]])
            assert same(stored["transformer.layers.2.mlp.fc.weight"][e], fc)
            assert same(stored["transformer.layers.2.mlp.proj.weight"][e], np.split(w2, 2, axis=1)[rank])
    assert (made["hidden_act"], made["moe"]["num_experts"], made["moe"]["top_k"]) == ("swiglu", 3, 2)


REFUSED = [
    ({"partial_rotary_factor": 0.5}, "LlamaForCausalLM", "partial_rotary_factor 0.5"),
    (
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}},
        "LlamaForCausalLM",
        "partial_rotary_factor",
    ),
    (
        {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"] * 2},
        "MistralForCausalLM",
        "some of",
    ),
    (
        {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 2},
        "Qwen2ForCausalLM",
        "some of the layers",
    ),
    ({"attention_bias": True}, "Qwen3ForCausalLM", "attention_bias"),
    ({"attention_bias": True}, "GemmaForCausalLM", "attention_bias"),
    ({"rope_scaling": {"type": "linear", "factor": 8.0}}, "Gemma3ForCausalLM", "rope scaling"),
    ({"layer_types": ["full_attention"] * 3}, "Gemma2ForCausalLM", "layer_types"),
    ({"use_bidirectional_attention": True}, "Gemma3ForCausalLM", "bidirectional"),
    ({"rope_scaling": {"type": "yarn", "factor": 8.0}}, "Phi3ForCausalLM", "rope scaling type 'yarn'"),
    ({"rope_scaling": {"type": "longrope"}}, "Phi3ForCausalLM", "short_factor"),
    ({"scale_attn_by_inverse_layer_idx": True}, "GPT2LMHeadModel", "scale_attn_by_inverse_layer_idx"),
    ({"hidden_act": "relu"}, "Starcoder2ForCausalLM", "hidden_act relu"),
]


@pytest.mark.parametrize(("changes", "architecture", "what"), REFUSED)
def test_variant_that_a_checkpoint_cannot_express_is_refused(
    tmp_path: Path, changes: dict[str, Any], architecture: str, what: str
) -> None:
    source = save(tmp_path / "m", config(architectures=[architecture], **changes), llama_tensors(config()))
    with pytest.raises(SourceError, match=what):
        convert_checkpoint(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": False, "max_window_layers": 1},
        {"use_sliding_window": True, "max_window_layers": 3},
        {"layer_types": ["full_attention"] * 3},
    ],
)
def test_window_that_no_layer_uses_is_not_carried(tmp_path: Path, changes: dict[str, Any]) -> None:
    chosen = config(architectures=["Qwen2ForCausalLM"], model_type="qwen2", sliding_window=9, **changes)
    biased = llama_tensors({**chosen, "attention_bias": True})
    tensors = {name: tensor for name, tensor in biased.items() if not name.endswith("o_proj.bias")}
    _, made = converted(save(tmp_path / "m", chosen, tensors), tmp_path / "out")
    assert "sliding_window" not in made


def test_every_architecture_has_a_contract_and_one_family() -> None:
    for name in supported_architectures():
        assert name in family_of(name).architectures
    with pytest.raises(SourceError, match="cannot be converted") as caught:
        family_of("Qwen2ForCausalLm")
    assert "Qwen2ForCausalLM" in caught.value.hint
