"""Quantized checkpoints beyond the golden references: numbers mean what they say, gaps are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_models import Tensors, config, llama_tensors, save, tiny_llama
from checkpoint_reading import load_checkpoint, same
from ml_dtypes import bfloat16, float8_e4m3fn
from safetensors.numpy import save_file

from pipeline.checkpoint import ConvertOptions, convert_checkpoint, verify_checkpoint
from pipeline.errors import ConfigError, SourceError

GOLDEN = Path(__file__).parents[2] / "data" / "golden" / "sources"


def converted(source: Path, out: Path, **options: Any) -> list[Tensors]:
    """Convert, verify, and return the ranks."""
    convert_checkpoint(source, out, options=ConvertOptions(**options))
    assert verify_checkpoint(out) == []
    return load_checkpoint(out)


def quantization(out: Path) -> dict[str, Any]:
    """Return the config's quantization object."""
    value: dict[str, Any] = json.loads((out / "config.json").read_text())["quantization"]
    return value


def ranges_file(path: Path, changes: dict[str, Any] | None = None) -> Path:
    """Save ranges that fit the tiny llama."""
    rng = np.random.default_rng(2)
    widths = {"self_attn.q_proj": (32, 32), "self_attn.k_proj": (32, 16), "self_attn.v_proj": (32, 16)}
    widths |= {
        "self_attn.o_proj": (32, 32),
        "mlp.gate_proj": (32, 48),
        "mlp.up_proj": (32, 48),
        "mlp.down_proj": (48, 32),
    }
    values = {}
    for i in range(3):
        for name, (inputs, outputs) in widths.items():
            values[f"model.layers.{i}.{name}.x"] = rng.uniform(0.5, 9, inputs).astype(np.float32)
            values[f"model.layers.{i}.{name}.y"] = rng.uniform(0.5, 9, outputs).astype(np.float32)
    save_file(values | (changes or {}), path)
    return path


@pytest.mark.parametrize(("quant", "algorithm"), [("int8", "W8A16"), ("int4", "W4A16")])
def test_weight_only_keeps_the_weights_and_names_the_algorithm(tmp_path: Path, quant: Any, algorithm: str) -> None:
    source = tiny_llama(tmp_path / "m")
    (plain,) = converted(source, tmp_path / "plain")
    (made,) = converted(source, tmp_path / "out", quant=quant)
    assert plain.keys() == made.keys()
    assert all(same(plain[name], made[name]) for name in plain)
    assert quantization(tmp_path / "out")["quant_algo"] == algorithm


def test_rowwise_fp8_scales_rows_of_what_each_rank_holds(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "m")
    ranks = converted(source, tmp_path / "out", quant="fp8_rowwise", tp=2)
    weight = llama_tensors(config())["model.layers.1.mlp.down_proj.weight"].astype(np.float32)
    for made, part in zip(ranks, np.split(weight, 2, axis=1), strict=True):
        at = "transformer.layers.1.mlp.proj."
        scale = made[f"{at}per_channel_scale"]
        assert np.array_equal(scale, np.abs(part).max(axis=1) / np.float32(448))
        restored = made[f"{at}weight"].astype(np.float32) * scale[:, None]
        # Three mantissa bits: half a unit in the last place is 1/16 of the value, or half the smallest step.
        assert (np.abs(restored - part) <= np.maximum(np.abs(part) / 16, scale[:, None] * 2**-10)).all()
        assert made[f"{at}weight"].dtype == float8_e4m3fn


def test_rowwise_fp8_of_zeros_and_of_values_beyond_the_clamp(tmp_path: Path) -> None:
    tensors = llama_tensors(config())
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name][0], tensors[name][1, 0] = 0.0, 5000.0
    (made,) = converted(save(tmp_path / "m", config(), tensors), tmp_path / "out", quant="fp8_rowwise")
    scale = made["transformer.layers.0.mlp.gate.per_channel_scale"]
    # Smallest scale and clamp of NVIDIA's row-wise FP8, checkpoint format facts 6.1.
    assert scale[0] == np.float32(1 / (448 * 512))
    assert scale[1] == np.float32(1200) / np.float32(448)


@pytest.mark.parametrize("per_token", [True, False])
def test_smoothquant_weights_mean_the_smoothed_weights(tmp_path: Path, per_token: bool) -> None:
    ranges = ranges_file(tmp_path / "r.safetensors")
    options = {
        "quant": "smoothquant",
        "per_channel": True,
        "per_token": per_token,
        "ranges": ranges,
        "dtype": "float16",
    }
    (made,) = converted(tiny_llama(tmp_path / "m"), tmp_path / "out", **options)
    at = "transformer.layers.2.mlp.proj."
    weight = llama_tensors(config())["model.layers.2.mlp.down_proj.weight"].astype(np.float32)
    smoothed = weight * made[f"{at}smoother"]
    amax = np.abs(smoothed).max(axis=1, keepdims=True)
    restored = made[f"{at}weight"].astype(np.float32) * amax / 127
    assert np.abs(restored - smoothed).max() <= amax.max() / 127
    assert (f"{at}act_scale" in made) == (not per_token)
    if per_token:
        assert np.allclose(made[f"{at}per_channel_scale"], amax.T / 127, rtol=2e-3)
    norm = llama_tensors(config())["model.layers.2.input_layernorm.weight"].astype(np.float32)
    assert not np.allclose(made["transformer.layers.2.input_layernorm.weight"].astype(np.float32), norm, rtol=0.01)


@pytest.mark.parametrize("quant", [None, "int8", "fp8_rowwise"])
def test_int8_kv_cache_scale_is_the_largest_output_of_q_k_and_v(tmp_path: Path, quant: Any) -> None:
    large = {"model.layers.1.self_attn.v_proj.y": np.full(16, 25.4, np.float32)}
    ranges = ranges_file(tmp_path / "r.safetensors", large)
    ranks = converted(tiny_llama(tmp_path / "m"), tmp_path / "out", kv_cache="int8", ranges=ranges, quant=quant, tp=2)
    for made in ranks:
        scale = made["transformer.layers.1.attention.kv_cache_scaling_factor"]
        assert same(scale, np.array([np.float32(25.4) / np.float32(127)], np.float32))
        assert scale != made["transformer.layers.0.attention.kv_cache_scaling_factor"]
    assert quantization(tmp_path / "out")["kv_cache_quant_algo"] == "INT8"


def test_fp8_kv_cache_without_measurement_says_so(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "m")
    report = convert_checkpoint(source, tmp_path / "out", options=ConvertOptions(kv_cache="fp8"))
    assert [w for w in report.warnings if "1.0 is used" in w]
    assert load_checkpoint(tmp_path / "out")[0]["transformer.layers.0.attention.kv_cache_scaling_factor"] == 1.0
    large = {"model.layers.0.self_attn.k_proj.y": np.full(16, 896.0, np.float32)}
    ranges = ranges_file(tmp_path / "r.safetensors", large)
    (made,) = converted(source, tmp_path / "measured", kv_cache="fp8", ranges=ranges)
    scales = [made[f"transformer.layers.{i}.attention.kv_cache_scaling_factor"][0] for i in range(2)]
    assert scales == [2.0, 1.0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.layers.1.mlp.down_proj.x": np.zeros(48, np.float32)}, "all zero: calibration had no effect"),
        ({"model.layers.1.mlp.down_proj.x": np.full(48, np.nan, np.float32)}, "negative or not finite"),
        ({"model.layers.1.mlp.down_proj.y": -np.ones(32, np.float32)}, "negative or not finite"),
        ({"model.layers.1.mlp.down_proj.x": np.ones(48, np.float16)}, r"lacks model\.layers\.1\.mlp\.down_proj\.x"),
    ],
)
def test_ranges_that_measured_nothing_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    ranges = ranges_file(tmp_path / "r.safetensors", changes)
    options = ConvertOptions(quant="smoothquant", ranges=ranges)
    with pytest.raises(SourceError, match=message):
        convert_checkpoint(tiny_llama(tmp_path / "m"), tmp_path / "out", options=options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        ({"quant": "smoothquant"}, {}, "expected measured ranges"),
        ({"kv_cache": "int8"}, {}, "expected measured ranges"),
        ({"quant": "fp8"}, {}, "expected measured ranges, or a source"),
        ({"quant": "smoothquant", "ranges": True}, {"head_dim": 16}, "do not add up"),
        ({"quant": "smoothquant", "ranges": True, "tp": 4}, {}, "expected a divisor of 2 kv heads"),
        (
            {"quant": "fp8_rowwise"},
            {"architectures": ["Starcoder2ForCausalLM"], "hidden_act": "gelu_new"},
            "not supported",
        ),
        ({"quant": "int8"}, {"num_local_experts": 2, "architectures": ["MixtralForCausalLM"]}, "mixture of experts"),
    ],
)
def test_scheme_that_does_not_fit_is_refused_before_writing(
    tmp_path: Path, options: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    if options.get("ranges"):
        options = {**options, "ranges": ranges_file(tmp_path / "r.safetensors")}
    with pytest.raises(ConfigError, match=message):
        convert_checkpoint(tiny_llama(tmp_path / "m", **changes), tmp_path / "out", options=ConvertOptions(**options))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("bad", [{"quant": "awq"}, {"kv_cache": "int4"}, {"alpha": 1.5}, {"per_token": True}])
def test_quantization_options_out_of_range_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        ConvertOptions(**bad)


def fp8_source(folder: Path, drop: str = "", **changes: Any) -> Path:
    """Save the tiny llama with float8 weights and a scale per tensor."""
    rng = np.random.default_rng(4)
    tensors = llama_tensors(config(**changes))
    for name in [n for n in tensors if "_proj.weight" in n]:
        stem = name.removesuffix("weight")
        tensors[name] = (tensors[name].astype(np.float32) * 100).astype(float8_e4m3fn)
        tensors[f"{stem}weight_scale"] = np.array(rng.uniform(0.005, 0.02), np.float32)
        tensors[f"{stem}input_scale"] = np.array(rng.uniform(0.01, 0.05), np.float32)
    return save(folder, config(**changes), {n: t for n, t in tensors.items() if n != drop})


def test_fp8_source_is_recognised_and_its_values_kept(tmp_path: Path) -> None:
    ranks = converted(fp8_source(tmp_path / "m"), tmp_path / "out", tp=4)
    assert quantization(tmp_path / "out")["quant_algo"] == "FP8"
    at = "transformer.layers.0.attention.qkv."
    scale = ranks[0][f"{at}weights_scaling_factor"][0]
    for rank, made in enumerate(ranks):
        # tp 4 over 2 key/value heads: ranks 0, 1 hold head 0 and ranks 2, 3 head 1.
        k = llama_tensors(config())["model.layers.0.self_attn.k_proj.weight"].astype(np.float32)
        head = k[8 * (rank // 2) : 8 * (rank // 2) + 8]
        stored = made[f"{at}weight"][8:16].astype(np.float32) * scale
        ratio = np.median(stored[np.abs(head) > 0.3] / head[np.abs(head) > 0.3])
        assert 0.5 <= ratio <= 2.0
        assert made[f"{at}weights_scaling_factor"][0] == scale


@pytest.mark.parametrize("kind", ["weight_scale", "input_scale"])
def test_fp8_source_without_a_scale_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    name = f"model.layers.1.self_attn.v_proj.{kind}"
    with pytest.raises(SourceError, match=f"missing tensors: {name}"):
        convert_checkpoint(fp8_source(tmp_path / "m", drop=name), tmp_path / "out")


def test_fp8_source_with_another_scheme_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="already are FP8"):
        convert_checkpoint(fp8_source(tmp_path / "m"), tmp_path / "out", options=ConvertOptions(quant="int8"))


def test_fp8_weight_in_a_place_that_takes_none_is_refused(tmp_path: Path) -> None:
    source = fp8_source(tmp_path / "m")
    tensors = llama_tensors(config())
    broken = {**tensors, "lm_head.weight": tensors["lm_head.weight"].astype(float8_e4m3fn)}
    with pytest.raises(SourceError, match=r"lm_head\.weight is float8_e4m3fn|q_proj\.weight is bfloat16"):
        convert_checkpoint(save(source, config(), broken), tmp_path / "out")


def test_kv_scales_of_an_fp8_source_are_used_on_request_and_reported_otherwise(tmp_path: Path) -> None:
    source = GOLDEN / "llama_fp8hf"
    report = convert_checkpoint(source, tmp_path / "out")
    assert any("ask for kv_cache fp8" in warning for warning in report.warnings)
    assert any(name.endswith("k_scale") for name in report.ignored_tensors)


def test_packed_weights_are_refused_with_the_name_of_their_method(tmp_path: Path) -> None:
    tensors = llama_tensors(config())
    del tensors["model.layers.0.mlp.up_proj.weight"]
    tensors["model.layers.0.mlp.up_proj.qweight"] = np.ones((4, 48), np.int32)
    source = save(tmp_path / "m", config(quantization_config={"quant_method": "aqlm"}), tensors)
    with pytest.raises(SourceError, match="quantized by aqlm"):
        convert_checkpoint(source, tmp_path / "out")


def test_smoothquant_in_bfloat16_converts_weights_before_quantizing(tmp_path: Path) -> None:
    options = {"quant": "smoothquant", "per_channel": True, "per_token": True}
    ranges = ranges_file(tmp_path / "r.safetensors")
    source = tiny_llama(tmp_path / "m", np.float16)
    half = converted(source, tmp_path / "h", dtype="float16", ranges=ranges, **options)[0]
    brain = converted(source, tmp_path / "b", dtype="bfloat16", ranges=ranges, **options)[0]
    at = "transformer.layers.0."
    assert same(half[f"{at}attention.qkv.weight"], brain[f"{at}attention.qkv.weight"])
    assert not same(half[f"{at}mlp.proj.weight"], brain[f"{at}mlp.proj.weight"])
    assert brain[f"{at}input_layernorm.weight"].dtype == bfloat16


def test_smoothquant_keeps_rows_of_zeros_and_refuses_rows_too_small_for_their_scale(tmp_path: Path) -> None:
    options = {"quant": "smoothquant", "per_channel": True, "per_token": True, "dtype": "float16"}
    ranges = ranges_file(tmp_path / "r.safetensors")
    tensors = llama_tensors(config())
    tensors["model.layers.0.mlp.up_proj.weight"][5] = 0.0
    (made,) = converted(save(tmp_path / "m", config(), tensors), tmp_path / "out", ranges=ranges, **options)
    assert not made["transformer.layers.0.mlp.gate.weight"][5].any()
    assert np.isfinite(made["transformer.layers.0.mlp.gate.per_channel_scale"]).all()
    tensors["model.layers.0.mlp.up_proj.weight"][5] = 1e-5
    source = save(tmp_path / "n", config(), tensors)
    with pytest.raises(SourceError, match=r"up_proj\.weight: a smoothed row has magnitudes of at most"):
        convert_checkpoint(source, tmp_path / "other", options=ConvertOptions(ranges=ranges, **options))


def test_layer_without_kv_scale_among_others_is_named(tmp_path: Path) -> None:
    tensors = llama_tensors(config())
    tensors["model.layers.0.self_attn.k_proj.k_scale"] = np.array(0.5, np.float32)
    source = save(tmp_path / "m", config(), tensors)
    with pytest.raises(SourceError, match=r"model\.layers\.1\.self_attn has no scale"):
        convert_checkpoint(source, tmp_path / "out", options=ConvertOptions(kv_cache="fp8"))
