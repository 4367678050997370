from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from pipeline.config.compose import conf_root
from pipeline.facts.architecture import Architecture
from pipeline.facts.hfconfig import FAMILIES, NotADecoder, architecture_of

# Parameters as the hub's model pages state them (safetensors metadata), biases and all.
PUBLISHED = {
    "llama2": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "mistral_7b": 7_248_023_552,
    "mixtral_8x7b": 46_702_792_704,
    "qwen2_5_7b": 7_615_616_512,
    "qwen3_8b": 8_190_735_360,
    "gemma2_9b": 9_241_705_984,
    "phi3_mini": 3_821_079_552,
    "tinyllama": 1_100_048_384,
    "smollm2": 134_515_008,
}

# Billions as the model cards print them.
PRINTED = {
    "qwen2_5_0_5b": 0.49,
    "qwen2_5_1_5b": 1.54,
    "qwen2_5_3b": 3.09,
    "qwen2_5_14b": 14.7,
    "qwen2_5_32b": 32.5,
    "qwen2_5_72b": 72.7,
    "qwen3_0_6b": 0.6,
    "qwen3_1_7b": 1.72,
    "qwen3_4b": 4.0,
    "qwen3_14b": 14.8,
    "qwen3_32b": 32.8,
    "gemma_7b": 8.54,
    "gemma2_2b": 2.61,
    "gemma2_27b": 27.2,
    "gemma3_1b": 1.0,
    "llama3_2_1b": 1.23,
    "llama3_2_3b": 3.21,
    "llama3_3_70b": 70.6,
    "mixtral_8x22b": 141.0,
    "phi3_medium": 14.0,
    "gpt2": 0.124,
}


@cache
def option(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((conf_root() / "model" / f"{name}.yaml").read_text(encoding="utf-8"))
    return loaded


@pytest.mark.parametrize("name", PUBLISHED)
def test_shape_of_a_shipped_model_has_the_published_number_of_parameters(name: str) -> None:
    shape = Architecture(**option(name)["architecture"])
    assert shape.parameters == pytest.approx(PUBLISHED[name], rel=1e-4)
    assert FAMILIES[shape.architecture] == option(name)["family"]
    assert option(name)["license"]


@pytest.mark.parametrize("name", PRINTED)
def test_shape_of_a_shipped_model_has_the_size_its_card_prints(name: str) -> None:
    shape = Architecture(**option(name)["architecture"])
    assert shape.parameters == pytest.approx(PRINTED[name] * 1e9, rel=0.01)
    assert FAMILIES[shape.architecture] == option(name)["family"]
    assert option(name)["license"]


def test_every_shipped_model_is_checked() -> None:
    assert {file.stem for file in conf_root().glob("model/*.yaml")} == {*PUBLISHED, *PRINTED, "hf"}


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}


def test_heads_and_head_size_default_to_plain_attention() -> None:
    shape = architecture_of({**LLAMA, "head_dim": None})
    assert (shape.num_kv_heads, shape.head_size) == (32, 128)


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        (None, 4096),
        ({"type": "linear", "factor": 4.0}, 16384),
        ({"rope_type": "llama3", "factor": 8.0}, 4096),
        ({"rope_type": "default"}, 4096),
        ({"type": "longrope", "factor": 32.0}, 4096),
    ],
)
def test_context_counts_rotary_scaling_unless_it_is_counted_already(rope: object, context: int) -> None:
    assert architecture_of({**LLAMA, "rope_scaling": rope}).context == context
    assert architecture_of({**LLAMA, "rope_parameters": rope}).context == context


def test_gpt2_spelling_is_read() -> None:
    shape = architecture_of(
        {"architectures": ["GPT2LMHeadModel"], "n_embd": 768, "n_head": 12, "n_layer": 12, "vocab_size": 50257}
    )
    assert (shape.num_layers, shape.intermediate_size, shape.gated_mlp) == (12, 3072, False)
    assert shape.tie_word_embeddings


def test_text_part_of_a_larger_model_is_taken() -> None:
    assert architecture_of({"architectures": ["X"], "text_config": LLAMA}).num_layers == 32


def test_missing_number_is_named() -> None:
    with pytest.raises(NotADecoder, match="num_hidden_layers"):
        architecture_of({key: value for key, value in LLAMA.items() if key != "num_hidden_layers"})


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_attention_heads": "4"}, "num_attention_heads is '4'"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"max_position_embeddings": -5}, "max_position_embeddings is -5"),
        ({"vocab_size": 3.5}, "vocab_size is 3.5"),
        ({"head_dim": True}, "head_dim is True"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor of rope_scaling is 0"),
        ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "factor of rope_scaling is nan"),
    ],
)
def test_values_that_no_model_has_are_named(value: dict[str, object], name: str) -> None:
    with pytest.raises(NotADecoder, match=re.escape(name)):
        architecture_of({**LLAMA, **value})


@pytest.mark.parametrize("architectures", [None, [], "LlamaForCausalLM"])
def test_class_that_is_not_named_is_left_open(architectures: object) -> None:
    assert architecture_of({**LLAMA, "architectures": architectures}).architecture == ""
