"""Conversion as a whole: determinism, sharding, configs of both styles, reports."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from checkpoint_models import config, llama_tensors, save, sparse_llama, tiny_llama
from checkpoint_reading import digests, load_checkpoint, same

from pipeline.checkpoint import ConvertOptions, convert_checkpoint, verify_checkpoint
from pipeline.checkpoint.sharder import stage_layers
from pipeline.errors import ConfigError, SourceError, StoreError


@pytest.mark.parametrize("workers", [1, 3, 16])
def test_bytes_do_not_depend_on_workers_or_shards(
    tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ConvertOptions(dtype="float16", tp=2, pp=3)
    convert_checkpoint(tiny_llama(tmp_path / "one"), tmp_path / "a", options=options)
    # Blocks of a few rows, so that many threads write into one tensor.
    monkeypatch.setattr("pipeline.checkpoint.blocks.BLOCK_VALUES", 100)
    many = ConvertOptions(dtype="float16", tp=2, pp=3, workers=workers)
    convert_checkpoint(tiny_llama(tmp_path / "four", shards=4), tmp_path / "b", options=many)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")


def test_ranks_joined_give_the_single_rank_checkpoint(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "m", attention_bias=True, mlp_bias=True, head_dim=12)
    convert_checkpoint(source, tmp_path / "whole")
    convert_checkpoint(source, tmp_path / "parts", options=ConvertOptions(tp=2, pp=2))
    (whole,) = load_checkpoint(tmp_path / "whole")
    ranks = load_checkpoint(tmp_path / "parts")
    for layer, (stage, local) in enumerate([(0, 0), (0, 1), (1, 0)]):
        at, here = f"transformer.layers.{layer}.", f"transformer.layers.{local}."
        pair = ranks[2 * stage], ranks[2 * stage + 1]
        for kind in ("weight", "bias"):
            # 2 query heads and 1 key/value head of 12 rows per rank.
            cut = [np.split(rank[f"{here}attention.qkv.{kind}"], [24, 36]) for rank in pair]
            joined = np.concatenate([part[i] for i in range(3) for part in cut])
            assert same(joined, whole[f"{at}attention.qkv.{kind}"])
            for name in ("mlp.fc", "mlp.gate"):
                joined = np.concatenate([rank[f"{here}{name}.{kind}"] for rank in pair])
                assert same(joined, whole[f"{at}{name}.{kind}"])
        for name in ("attention.dense", "mlp.proj"):
            joined = np.concatenate([rank[f"{here}{name}.weight"] for rank in pair], axis=1)
            assert same(joined, whole[f"{at}{name}.weight"])
            assert all(same(rank[f"{here}{name}.bias"], whole[f"{at}{name}.bias"]) for rank in pair)
    assert not any(name.startswith("transformer.vocab") for name in ranks[2])
    assert not any(name.startswith(("lm_head", "transformer.ln_f")) for name in ranks[0])


def test_gate_proj_is_fc_and_up_proj_is_gate(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "m", mlp_bias=True)
    convert_checkpoint(source, tmp_path / "out")
    (made,) = load_checkpoint(tmp_path / "out")
    tensors = llama_tensors(config(mlp_bias=True))
    for kind in ("weight", "bias"):
        assert same(made[f"transformer.layers.1.mlp.fc.{kind}"], tensors[f"model.layers.1.mlp.gate_proj.{kind}"])
        assert same(made[f"transformer.layers.1.mlp.gate.{kind}"], tensors[f"model.layers.1.mlp.up_proj.{kind}"])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["mlp_bias"] is True


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_key_value_heads_are_repeated_when_there_are_more_ranks(tmp_path: Path, dtype: str) -> None:
    source = tiny_llama(tmp_path / "m")
    convert_checkpoint(source, tmp_path / "one", options=ConvertOptions(dtype=dtype))
    convert_checkpoint(source, tmp_path / "four", options=ConvertOptions(dtype=dtype, tp=4))
    q, k, v = np.split(load_checkpoint(tmp_path / "one")[0]["transformer.layers.0.attention.qkv.weight"], [32, 48])
    for rank, tensors in enumerate(load_checkpoint(tmp_path / "four")):
        head = slice(8 * (rank // 2), 8 * (rank // 2) + 8)
        expected = np.concatenate([q[8 * rank : 8 * rank + 8], k[head], v[head]])
        assert same(tensors["transformer.layers.0.attention.qkv.weight"], expected)
    assert json.loads((tmp_path / "four" / "config.json").read_text())["num_key_value_heads"] == 2


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 8}, {"tp": 4}, "expected one of 1, 2, 3, 6"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}, {"tp": 2}, "3 key/value heads neither"),
        ({"intermediate_size": 46}, {"tp": 4}, "intermediate_size 46"),
        ({}, {"pp": 4}, "expected at most the 3 layers"),
        ({"hidden_size": 34, "head_dim": 8}, {"tp": 4, "embedding_sharding": "hidden"}, "hidden_size 34"),
    ],
)
def test_sizes_that_cannot_be_divided_are_refused_with_those_that_can(
    tmp_path: Path, changes: dict[str, int], options: dict[str, object], message: str
) -> None:
    source = tiny_llama(tmp_path / "m", **changes)
    with pytest.raises(ConfigError, match=message):
        convert_checkpoint(source, tmp_path / "out", options=ConvertOptions(**options))  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "bad", [{"dtype": "fp8"}, {"tp": 0}, {"pp": -1}, {"workers": 0}, {"embedding_sharding": "rows"}]
)
def test_options_out_of_range_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        ConvertOptions(**bad)  # type: ignore[arg-type]


def test_vocabulary_is_padded_in_head_and_split_embedding_only(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "m")
    embedding = llama_tensors(config())["model.embed_tokens.weight"]
    convert_checkpoint(source, tmp_path / "whole", options=ConvertOptions(tp=2))
    convert_checkpoint(source, tmp_path / "split", options=ConvertOptions(tp=2, embedding_sharding="vocab"))
    for rank, (whole, split) in enumerate(
        zip(load_checkpoint(tmp_path / "whole"), load_checkpoint(tmp_path / "split"), strict=True)
    ):
        assert whole["lm_head.weight"].shape == (31, 32)
        assert same(whole["transformer.vocab_embedding.weight"], embedding)
        padded = np.concatenate([embedding, np.zeros((1, 32), embedding.dtype)])
        assert same(split["transformer.vocab_embedding.weight"], padded[31 * rank : 31 * rank + 31])
    assert json.loads((tmp_path / "split" / "config.json").read_text())["vocab_size"] == 61


def test_more_ranks_than_vocabulary_rows_leave_empty_ranks_zero(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "m", vocab_size=5, num_attention_heads=4, num_key_value_heads=4)
    convert_checkpoint(source, tmp_path / "out", options=ConvertOptions(tp=4))
    heads = [tensors["lm_head.weight"] for tensors in load_checkpoint(tmp_path / "out")]
    assert [head.shape for head in heads] == [(2, 32)] * 4
    assert not heads[3].astype(np.float32).any()


@pytest.mark.parametrize(("layers", "pp", "sizes"), [(5, 2, [3, 2]), (5, 4, [2, 1, 1, 1]), (3, 3, [1, 1, 1])])
def test_first_stages_take_the_layers_left_over(layers: int, pp: int, sizes: list[int]) -> None:
    # Source: the rule of TensorRT-LLM 1.x, checkpoint format facts 4.3.
    ranges = stage_layers(layers, pp)
    assert [len(stage) for stage in ranges] == sizes
    assert [layer for stage in ranges for layer in stage] == list(range(layers))


def both_styles(scaling: dict[str, object] | None) -> tuple[dict[str, object], dict[str, object]]:
    """Return a config in the style of transformers 4 and the same in the style of transformers 5."""
    old = config(rope_theta=500000.0, rope_scaling=scaling)
    new = config(rope_parameters={"rope_theta": 500000.0, **(scaling or {"rope_type": "default"})}, dtype="bfloat16")
    for key in ("rope_theta", "torch_dtype"):
        del new[key]
    return old, new


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    "scaling", [None, LLAMA3, {"rope_type": "linear", "factor": 4.0}], ids=["none", "llama3", "linear"]
)
def test_configs_of_transformers_4_and_5_give_the_same(tmp_path: Path, scaling: dict[str, object] | None) -> None:
    tensors = llama_tensors(config())
    for name, chosen in zip(("old", "new"), both_styles(scaling), strict=True):
        convert_checkpoint(save(tmp_path / name, chosen, tensors), tmp_path / f"{name}-out")
    assert digests(tmp_path / "old-out") == digests(tmp_path / "new-out")
    made = json.loads((tmp_path / "old-out" / "config.json").read_text())
    assert (made["rotary_base"], made["rotary_scaling"]) == (500000.0, scaling)


@pytest.mark.parametrize("scaling", [{"rope_type": "default"}, {"type": "default", "factor": 1.0}])
def test_rope_scaling_of_the_default_type_becomes_null(tmp_path: Path, scaling: dict[str, object]) -> None:
    convert_checkpoint(tiny_llama(tmp_path / "m", rope_scaling=scaling), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rotary_scaling"] is None


def test_head_dim_null_is_derived_and_stated_is_obeyed(tmp_path: Path) -> None:
    convert_checkpoint(tiny_llama(tmp_path / "m", head_dim=None), tmp_path / "a")
    convert_checkpoint(tiny_llama(tmp_path / "n", head_dim=16), tmp_path / "b")
    made = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("a", "b")]
    assert [(c["head_size"], c["rotary_embedding_dim"]) for c in made] == [(8, 8), (16, 16)]


@pytest.mark.parametrize(("window", "carried"), [(64, 64), (128, None), (None, None)])
def test_sliding_window_is_carried_when_it_is_shorter_than_the_context(
    tmp_path: Path, window: int | None, carried: int | None
) -> None:
    source = tiny_llama(
        tmp_path / "m", architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=window
    )
    report = convert_checkpoint(source, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text()).get("sliding_window") == carried
    assert bool(report.warnings) == (carried is not None)


def test_report_and_progress_agree_with_the_files(tmp_path: Path) -> None:
    seen: list[tuple[float, float | None, str]] = []
    report = convert_checkpoint(
        tiny_llama(tmp_path / "m"), tmp_path / "out", progress=lambda *values: seen.append(values)
    )
    tensors = load_checkpoint(tmp_path / "out")[0]
    assert report.target_tensors == len(tensors)
    assert report.target_bytes == sum(tensor.nbytes for tensor in tensors.values()) == seen[-1][0] == seen[-1][1]
    assert report.parameters == sum(tensor.size for tensor in llama_tensors(config()).values())
    assert report.dtypes == {"matrix": ("bfloat16",), "norm": ("bfloat16",)}


def test_source_digest_follows_content_not_place(tmp_path: Path) -> None:
    reports = [
        convert_checkpoint(tiny_llama(tmp_path / name, rms_norm_eps=eps), tmp_path / f"{name}-out").source_digest
        for name, eps in (("a", 1e-5), ("b", 1e-5), ("c", 1e-6))
    ]
    assert reports[0] == reports[1] != reports[2]


@pytest.mark.parametrize(
    ("damage", "rule"),
    [
        (lambda out: (out / "rank1.safetensors").unlink(), "missing-rank"),
        (lambda out: (out / "rank2.safetensors").write_bytes(b""), "unexpected-file"),
        (
            lambda out: (out / "rank1.safetensors").write_bytes((out / "rank1.safetensors").read_bytes()[:-5]),
            "damaged-file",
        ),
        (
            lambda out: (out / "config.json").write_text((out / "config.json").read_text().replace("61", "99")),
            "wrong-shape",
        ),
        (lambda out: (out / "config.json").unlink(), "checkpoint-config"),
    ],
    ids=["missing rank", "extra rank", "cut", "other vocabulary", "no config"],
)
def test_verify_finds_damage_to_a_finished_checkpoint(tmp_path: Path, damage: object, rule: str) -> None:
    out = tmp_path / "out"
    convert_checkpoint(tiny_llama(tmp_path / "m"), out, options=ConvertOptions(tp=2))
    assert verify_checkpoint(out) == []
    damage(out)  # type: ignore[operator]
    assert rule in {finding.rule for finding in verify_checkpoint(out)}


MEASURE = """
import sys
from pathlib import Path
from pipeline.checkpoint.convert import convert_checkpoint
from pipeline.checkpoint.options import ConvertOptions
def peak():
    return int(next(l for l in open('/proc/self/status') if l.startswith('VmHWM')).split()[1]) / 1024
before = peak()
options = ConvertOptions(dtype='float16', tp=int(sys.argv[3]), embedding_sharding='vocab')
convert_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]), options=options)
print(peak() - before)
"""


def memory_of_conversion(source: Path, out: Path, tp: int) -> float:
    """Convert in a process of its own; returns its peak above the imports in MiB."""
    argv = [sys.executable, "-c", MEASURE, str(source), str(out), str(tp)]
    return float(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)


def test_memory_stays_below_the_largest_tensor_whatever_tp(tmp_path: Path) -> None:
    # One tensor of 128 MiB. The bound for any model is 300 MB; blocks of a million values need far less.
    source = sparse_llama(tmp_path / "m", vocab_size=1 << 21, shards=1)
    peaks = [memory_of_conversion(source, tmp_path / f"out{tp}", tp) for tp in (1, 4)]
    assert max(peaks) < 64
    assert abs(peaks[0] - peaks[1]) < 16


@pytest.mark.soak
@pytest.mark.parametrize("tp", [1, 8])
def test_memory_is_bounded_for_two_gigabytes_with_a_tensor_of_one(tmp_path: Path, tp: int) -> None:
    changes = {"hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 8192, "num_hidden_layers": 20}
    source = sparse_llama(tmp_path / "m", vocab_size=1 << 20, shards=6, **changes)
    total = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    assert total > 1.5e9
    assert memory_of_conversion(source, tmp_path / "out", tp) < 300


def test_full_disk_leaves_nothing_that_looks_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny_llama(tmp_path / "m")
    written = 0
    real = os.pwrite

    def full(descriptor: int, data: bytes, offset: int) -> int:
        nonlocal written
        written += len(data)
        if written > 20_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data, offset)

    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(StoreError, match="the disk is full"):
        convert_checkpoint(source, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_source_that_shrinks_while_it_is_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny_llama(tmp_path / "m")

    def shrink(*_: object) -> None:
        os.truncate(source / "model.safetensors", 5000)

    monkeypatch.setattr("pipeline.checkpoint.convert._prepare_folder", lambda out, plan: (out.mkdir(), shrink()))
    with pytest.raises(SourceError, match=r"model\.safetensors: .*file ends at byte 5000"):
        convert_checkpoint(source, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_conversion_can_be_repeated_after_a_kill(tmp_path: Path) -> None:
    source = sparse_llama(tmp_path / "m", vocab_size=1 << 20, shards=1)
    out = tmp_path / "out"
    child = subprocess.Popen([sys.executable, "-c", MEASURE, str(source), str(out), "2"], stdout=subprocess.DEVNULL)
    while not list(out.glob("*.partial")) and child.poll() is None:
        time.sleep(0.001)
    child.kill()
    child.wait()
    if child.returncode < 0:
        assert not (out / "config.json").exists()
        assert verify_checkpoint(out)[0].rule == "checkpoint-config"
        options = ConvertOptions(tp=2)
        convert_checkpoint(source, out, options=options)
    assert verify_checkpoint(out) == []
    assert sorted(file.name for file in out.iterdir()) == ["config.json", "rank0.safetensors", "rank1.safetensors"]
