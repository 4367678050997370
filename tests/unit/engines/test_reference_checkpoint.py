"""What the engine says about checkpoints it cannot run, and how it joins ranks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pipeline.engines.reference import EngineError, ReferenceEngine

DATA = Path(__file__).parents[2] / "data" / "engine"
# float16, since the numpy interface of safetensors writes it in every version
CHECKPOINT = DATA / "llama_mha"
Tensors = dict[str, np.ndarray[Any, Any]]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(CHECKPOINT, tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "rank0.safetensors")
    change(tensors)
    save_file(tensors, folder / "rank0.safetensors")


def split_over_ranks(folder: Path, tp: int, pp: int, kv_heads: int) -> None:
    """Cut a tp 1 checkpoint, after the format description; written apart from the engine's joining."""
    config = json.loads((folder / "config.json").read_text())
    whole = load_file(folder / "rank0.safetensors")
    heads, size, layers = config["num_attention_heads"], config["head_size"], config["num_hidden_layers"]
    vocab = config["vocab_size"]
    for rank in range(tp * pp):
        stage, part = divmod(rank, tp)
        out: Tensors = {}
        for name, value in whole.items():
            new = name
            if name.startswith("transformer.layers."):
                layer = int(name.split(".")[2])
                if layer // (layers // pp) != stage:
                    continue
                new = name.replace(f"layers.{layer}.", f"layers.{layer % (layers // pp)}.")
            elif stage != (0 if "vocab_embedding" in name else pp - 1):
                continue
            if ".qkv." in name:
                q, k, v = np.split(value, [heads * size, (heads + kv_heads) * size])
                mine = slice(part * kv_heads // tp * size, (part * kv_heads // tp + max(1, kv_heads // tp)) * size)
                value = np.concatenate([np.split(q, tp)[part], k[mine], v[mine]])
            elif ".fc." in name or ".gate." in name:
                value = np.split(value, tp)[part]
            elif ".dense." in name or ".proj." in name:
                value = np.split(value, tp, axis=1)[part]
            elif name == "lm_head.weight":
                rows = -(-vocab // tp)
                padded = np.zeros((rows * tp, value.shape[1]), value.dtype)
                padded[:vocab] = value
                value = np.split(padded, tp)[part]
            out[new] = np.ascontiguousarray(value)
        save_file(out, folder / f"rank{rank}.safetensors")
    edit_config(folder, mapping={"world_size": tp * pp, "tp_size": tp, "pp_size": pp})


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2), (4, 1)])
def test_joined_ranks_equal_the_whole(copy: Path, tp: int, pp: int) -> None:
    def shorten(tensors: Tensors) -> None:
        # 63 tokens divide by nothing, so the head is padded
        for name in ("lm_head.weight", "transformer.vocab_embedding.weight"):
            tensors[name] = tensors[name][:63].copy()

    edit_config(copy, vocab_size=63)
    edit_tensors(copy, shorten)
    expected = ReferenceEngine.load(copy, threads=1).logits([1, 2, 3, 62])
    split_over_ranks(copy, tp, pp, kv_heads=4)
    logits = ReferenceEngine.load(copy, threads=1).logits([1, 2, 3, 62])
    np.testing.assert_array_equal(logits, expected)


def test_repeated_kv_heads_are_taken_once(copy: Path) -> None:
    def keep_two_heads(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".qkv." in name]:
            q, k, v = np.split(tensors[name], 3)
            tensors[name] = np.concatenate([q, k[:16], v[:16]])

    edit_config(copy, num_key_value_heads=2)
    edit_tensors(copy, keep_two_heads)
    expected = ReferenceEngine.load(copy, threads=1).logits([1, 2, 3])
    split_over_ranks(copy, 4, 1, kv_heads=2)
    np.testing.assert_array_equal(ReferenceEngine.load(copy, threads=1).logits([1, 2, 3]), expected)


def test_embedding_split_over_columns_is_joined(copy: Path) -> None:
    expected = ReferenceEngine.load(copy, threads=1).logits([1, 2, 3])
    split_over_ranks(copy, 2, 1, kv_heads=4)
    for rank in range(2):
        path = copy / f"rank{rank}.safetensors"
        tensors = load_file(path)
        name = "transformer.vocab_embedding.weight"
        tensors[name] = np.ascontiguousarray(np.split(tensors[name], 2, axis=1)[rank])
        save_file(tensors, path)
    edit_config(copy, use_parallel_embedding=True, embedding_sharding_dim=1)
    np.testing.assert_array_equal(ReferenceEngine.load(copy, threads=1).logits([1, 2, 3]), expected)


def test_copies_that_differ_between_ranks_are_refused(copy: Path) -> None:
    split_over_ranks(copy, 2, 1, kv_heads=4)
    tensors = load_file(copy / "rank1.safetensors")
    tensors["transformer.ln_f.weight"] = tensors["transformer.ln_f.weight"] * 2
    save_file(tensors, copy / "rank1.safetensors")
    with pytest.raises(EngineError, match=r"ln_f.weight must be equal on all ranks; rank 1 differs"):
        ReferenceEngine.load(copy, threads=1)


def test_a_missing_head_is_the_embedding(copy: Path) -> None:
    edit_tensors(copy, lambda tensors: tensors.pop("lm_head.weight"))
    model = ReferenceEngine.load(copy, threads=1).model
    assert model.head is model.embedding


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("transformer.layers.1.mlp.fc.weight"), r"transformer.layers.1.mlp.fc.weight is missing"),
        (
            lambda t: t.update({"transformer.layers.0.attention.dense.weight": np.zeros((32, 31), np.float16)}),
            r"dense.weight has shape \(32, 31\); the config expects \(32, 32\)",
        ),
        (
            lambda t: t.update({"transformer.layers.0.mlp.fc.bias": np.zeros(48, np.float16)}),
            r"no place for rank0.safetensors: transformer.layers.0.mlp.fc.bias",
        ),
    ],
    ids=["missing", "shape", "left-over"],
)
def test_tensors_that_do_not_fit_are_named(copy: Path, change: Callable[[Tensors], object], words: str) -> None:
    edit_tensors(copy, change)
    with pytest.raises(EngineError, match=words):
        ReferenceEngine.load(copy, threads=1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architecture": "BloomForCausalLM"}, "architecture 'BloomForCausalLM' is not supported"),
        ({"quantization": {"quant_algo": "W4A8_QSERVE_PER_GROUP"}}, "W4A8_QSERVE_PER_GROUP"),
        ({"rotary_scaling": {"type": "yarn", "factor": 2.0}}, "type 'yarn' is not supported"),
        ({"rotary_scaling": {"type": "llama3", "factor": 2.0}}, "lacks 'low_freq_factor'"),
        ({"num_key_value_heads": 3}, "4 attention heads are no multiple of 3"),
        ({"hidden_act": "relu6"}, "relu6"),
        ({"position_embedding_type": "alibi"}, "'alibi' is unknown for LlamaForCausalLM"),
        ({"mapping": {"tp_size": 2}}, "rank1.safetensors: the file is missing"),
        ({"residual_mlp": True}, "residual_mlp is True"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_configs_that_cannot_run_are_explained(copy: Path, changes: dict[str, object], words: str) -> None:
    edit_config(copy, **changes)
    with pytest.raises(EngineError, match=words):
        ReferenceEngine.load(copy, threads=1)


def test_damaged_files_are_named(copy: Path) -> None:
    path = copy / "rank0.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    with pytest.raises(EngineError, match=r"rank0.safetensors: truncated"):
        ReferenceEngine.load(copy, threads=1)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(EngineError, match=r"rank0.safetensors: not a safetensors file"):
        ReferenceEngine.load(copy, threads=1)
    nested = b"[" * 100_000
    path.write_bytes(len(nested).to_bytes(8, "little") + nested)
    with pytest.raises(EngineError, match=r"rank0.safetensors: the safetensors header is not JSON"):
        ReferenceEngine.load(copy, threads=1)
    for content in ("{", nested.decode()):
        (copy / "config.json").write_text(content)
        with pytest.raises(EngineError, match=r"config.json: not JSON"):
            ReferenceEngine.load(copy, threads=1)
    with pytest.raises(EngineError, match=r"config.json: missing"):
        ReferenceEngine.load(copy.parent, threads=1)


@pytest.mark.parametrize("option", ["max_batch_size", "max_num_tokens", "max_seq_len", "threads"])
def test_limits_out_of_range_are_refused(option: str) -> None:
    with pytest.raises(EngineError, match="0"):
        ReferenceEngine.load(CHECKPOINT, **{"threads": 1, option: 0})


def test_weights_that_give_nan_end_the_request_with_an_error(copy: Path) -> None:
    def spoil(tensors: Tensors) -> None:
        tensors["transformer.layers.0.mlp.proj.weight"][0, 0] = np.nan

    edit_tensors(copy, spoil)
    from pipeline.engines.reference import Request

    with pytest.raises(EngineError, match="the logit of token 0 is nan"):
        ReferenceEngine.load(copy, threads=1).generate([Request("a", (1,), 1)])
