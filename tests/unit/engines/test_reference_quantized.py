"""Quantized checkpoints: against modelopt's exports, and against integer arithmetic done the long way."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file

from pipeline.engines.reference import EngineError, ReferenceEngine
from pipeline.engines.reference.config import read_config
from pipeline.engines.reference.quantized import LinearSource, read_experts, read_linear
from pipeline.engines.reference.rounding import DynamicFp8, DynamicInt8, KvInt8, StaticFp8, round_e4m3
from pipeline.engines.reference.safetensors_file import SafetensorsFile
from pipeline.engines.reference.threads import Workers
from pipeline.engines.reference.weights import Checkpoint

DATA = Path(__file__).parents[2] / "data" / "engine"
MODELOPT = DATA / "quantized"
CASES = sorted(path.parent.name for path in MODELOPT.glob("*/layers.safetensors"))
RANDOM = np.random.default_rng(11)
PREFIX = "transformer.layers.0.mlp.fc"
WORKERS = Workers(1)
NAMES = {np.dtype(ml_dtypes.bfloat16): "BF16", np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3"}
NAMES |= {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16", np.dtype(np.int8): "I8", np.dtype(np.uint8): "U8"}

Array = npt.NDArray[Any]


def write(path: Path, tensors: dict[str, Array]) -> None:
    """Write a safetensors file with the narrow types, which the numpy interface of the package lacks."""
    header, data = {}, b""
    for name, value in tensors.items():
        raw = np.ascontiguousarray(value).tobytes()
        entry = {"dtype": NAMES[value.dtype], "shape": value.shape, "data_offsets": [len(data), len(data) + len(raw)]}
        header[name], data = entry, data + raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def read(path: Path) -> dict[str, Array]:
    file = SafetensorsFile(path)
    return {name: file.tensor(name) for name in file.names()}


def modelopt_checkpoint(case: str, folder: Path) -> Path:
    shutil.copy(MODELOPT / case / "config.json", folder)
    write(
        folder / "rank0.safetensors",
        {**read(MODELOPT / "shared.safetensors"), **read(MODELOPT / case / "layers.safetensors")},
    )
    return folder


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_an_independent_forward_of_modelopts_export(case: str, tmp_path: Path) -> None:
    # Largest difference seen: 2e-6; the schemes differ from the unquantized model by 0.2 to 0.9.
    expected = load_file(MODELOPT / case / "reference.safetensors")
    engine = ReferenceEngine.load(modelopt_checkpoint(case, tmp_path), threads=1)
    logits = engine.logits(expected["token_ids"].tolist())[-len(expected["logits"]) :]
    assert np.abs(logits - expected["logits"]).max() < 1e-4


def linear_source(
    folder: Path, algo: str, tensors: dict[str, Array], shape: tuple[int, int], **options: Any
) -> LinearSource:
    """Return a layer as if it came from a one-rank llama checkpoint that holds nothing else."""
    config = json.loads((DATA / "llama_mha" / "config.json").read_text())
    config["quantization"] = {"quant_algo": algo, "group_size": 16, "clamp_val": options.pop("clamp", None)}
    (folder / "config.json").write_text(json.dumps(config))
    write(folder / "rank0.safetensors", tensors)
    parsed = read_config(folder)
    join = options.pop("join", "rows")
    return LinearSource(Checkpoint(folder, parsed), parsed, options.pop("prefix", PREFIX), shape, join, "input_scale")


def test_smoothquant_with_static_scales_is_the_integer_product(tmp_path: Path) -> None:
    weight = RANDOM.integers(-127, 128, (6, 8), np.int8)
    x = RANDOM.normal(0, 3, (8, 5)).astype(np.float32)
    x[0, 0] = 1000  # saturates
    to_int, act_scale = np.float32(20.0), np.float32(0.05)
    per_channel = RANDOM.uniform(0.001, 0.01, (1, 6)).astype(np.float32)
    tensors = {
        f"{PREFIX}.weight": weight,
        f"{PREFIX}.per_channel_scale": per_channel,
        f"{PREFIX}.act_scale": np.full((1, 1), act_scale),
        "input_scale": np.array([to_int]),
    }
    linear = read_linear(linear_source(tmp_path, "W8A8_SQ_PER_CHANNEL_PER_TENSOR_PLUGIN", tensors, (6, 8)))
    codes = np.clip(np.rint(x * to_int), -128, 127).astype(np.int64)
    expected = (weight.astype(np.int64) @ codes) * per_channel.T.astype(np.float64) * act_scale
    np.testing.assert_allclose(linear(x, WORKERS), expected, rtol=1e-5)


def test_smoothquant_per_token_divides_by_the_smoother_first(tmp_path: Path) -> None:
    prefix = "transformer.layers.0.mlp.proj"
    weight = RANDOM.integers(-127, 128, (6, 8), np.int8)
    x = RANDOM.normal(0, 3, (8, 5)).astype(np.float32)
    x[:, 4] = 0  # a token of zeros has no scale of its own
    smoother = RANDOM.uniform(0.5, 2, (1, 8)).astype(np.float32)
    tensors = {
        f"{prefix}.weight": weight,
        f"{prefix}.per_channel_scale": np.full((1, 1), 0.01, np.float32),
        f"{prefix}.smoother": smoother,
    }
    algo = "W8A8_SQ_PER_TENSOR_PER_TOKEN_PLUGIN"
    linear = read_linear(linear_source(tmp_path, algo, tensors, (6, 8), join="columns", prefix=prefix))
    smoothed = x / smoother.T
    scale = np.maximum(np.abs(smoothed).max(axis=0), 1e-20) / 127
    expected = (weight.astype(np.int64) @ np.rint(smoothed / scale).astype(np.int64)) * scale * 0.01
    np.testing.assert_allclose(linear(x, WORKERS), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("algo", "largest"), [("W8A16", 128), ("W4A16", 8)])
def test_weight_only_rounds_as_the_builder_does(algo: str, largest: int, tmp_path: Path) -> None:
    weight = RANDOM.normal(0, 1, (6, 16)).astype(np.float16)
    weight[2] = 0
    linear = read_linear(linear_source(tmp_path, algo, {f"{PREFIX}.weight": weight}, (6, 16)))
    for row, got in zip(weight.astype(np.float64), linear.weight, strict=True):
        scale = np.abs(row).max() / largest or 1.0
        codes = [
            min(largest - 1, int(np.floor(abs(v) / scale + 0.5))) * np.sign(v)
            if v > 0
            else -min(largest, int(np.floor(abs(v) / scale + 0.5)))
            for v in row
        ]
        np.testing.assert_allclose(got, np.array(codes) * float(np.float16(scale)), rtol=1e-6)


def test_rowwise_fp8_clamps_before_it_scales(tmp_path: Path) -> None:
    weight = RANDOM.normal(0, 1, (6, 8)).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    scale = RANDOM.uniform(0.5, 2, 6).astype(np.float32)
    tensors = {f"{PREFIX}.weight": weight, f"{PREFIX}.per_channel_scale": scale}
    source = linear_source(tmp_path, "FP8_PER_CHANNEL_PER_TOKEN", tensors, (6, 8), clamp=[-1200.0, 1200.0])
    x = np.ones((8, 1), np.float32)
    x[0] = 1e6
    clamped = x.copy()
    clamped[0] = 1200
    linear = read_linear(source)
    np.testing.assert_array_equal(linear(x, WORKERS), linear(clamped, WORKERS))
    np.testing.assert_array_equal(linear.weight, weight.astype(np.float32) * scale[:, None])


def test_fp8_bytes_typed_int8_are_the_same(tmp_path: Path) -> None:
    weight = RANDOM.normal(0, 1, (6, 8)).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    one = np.ones(1, np.float32)
    scales: dict[str, Array] = {f"{PREFIX}.weights_scaling_factor": one, f"{PREFIX}.activation_scaling_factor": one}
    results = [
        read_linear(linear_source(tmp_path, "FP8", {f"{PREFIX}.weight": stored, **scales}, (6, 8))).weight
        for stored in (weight, weight.view(np.int8))
    ]
    np.testing.assert_array_equal(results[0], results[1])


def test_fp8_experts_have_a_scale_each(tmp_path: Path) -> None:
    weight = RANDOM.normal(0, 1, (3, 6, 8)).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    scales = np.array([0.5, 1.0, 2.0], np.float32)
    tensors = {
        f"{PREFIX}.weight": weight,
        f"{PREFIX}.weights_scaling_factor": scales,
        f"{PREFIX}.activation_scaling_factor": np.ones(1, np.float32),
    }
    experts = read_experts(linear_source(tmp_path, "FP8", tensors, (6, 8), join="halves"), 3)
    for expert, stored, scale in zip(experts, weight, scales, strict=True):
        np.testing.assert_array_equal(expert.weight, stored.astype(np.float32) * scale)


def test_layers_named_by_exclude_modules_stay_as_they_are(tmp_path: Path) -> None:
    source = linear_source(tmp_path, "FP8", {f"{PREFIX}.weight": np.eye(4, dtype=np.float16)}, (4, 4))
    with pytest.raises(EngineError, match=r"mlp.fc \(FP8\): a float8 weight is stored as float16"):
        read_linear(source)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization"]["exclude_modules"] = ["lm_head", "*.mlp.*"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    parsed = read_config(tmp_path)
    linear = read_linear(LinearSource(Checkpoint(tmp_path, parsed), parsed, PREFIX, (4, 4), "rows", ""))
    np.testing.assert_array_equal(linear.weight, np.eye(4))


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf])
def test_a_scale_that_is_no_scale_is_named(value: float, tmp_path: Path) -> None:
    tensors: dict[str, Array] = {
        f"{PREFIX}.weight": np.zeros((2, 2), np.int8),
        f"{PREFIX}.weights_scaling_factor": np.array([value], np.float32),
    }
    with pytest.raises(EngineError, match=r"weights_scaling_factor is .*; expected a positive number"):
        read_linear(linear_source(tmp_path, "FP8", tensors, (2, 2)))


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({"quant_algo": "W4A8_QSERVE"}, "quant_algo 'W4A8_QSERVE' is not supported"),
        ({"kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo 'NVFP4' is not supported"),
        ({"kv_cache_quant_algo": "INT8"}, r"layers.0.attention.kv_cache_scaling_factor is missing"),
        ({"quant_algo": "FP8", "exclude_modules": []}, "a quantized lm_head is not supported"),
    ],
    ids=["algorithm", "kv", "kv scale", "head"],
)
def test_quantization_that_cannot_run_is_explained(quantization: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(DATA / "llama_mha", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization": quantization}))
    with pytest.raises(EngineError, match=words):
        ReferenceEngine.load(folder, threads=1)


def test_int8_cache_rounds_keys_and_values(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(DATA / "llama_mha", folder)
    plain = ReferenceEngine.load(folder, threads=1).logits(range(20))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization": {"kv_cache_quant_algo": "INT8"}}))
    differences = []
    for largest in (4.0, 40.0):
        tensors = load_file(DATA / "llama_mha" / "rank0.safetensors")
        for layer in range(2):
            name = f"transformer.layers.{layer}.attention.kv_cache_scaling_factor"
            tensors[name] = np.array([largest / 127], np.float32)
        save_file(tensors, folder / "rank0.safetensors")
        differences.append(np.abs(ReferenceEngine.load(folder, threads=1).logits(range(20)) - plain).mean())
    # Ten times coarser steps, about ten times the error.
    assert 1e-5 < differences[0] < 0.02
    assert 3 < differences[1] / differences[0] < 30


def test_roundings_saturate_and_keep_codes() -> None:
    x = np.array([[500.0], [-1e9], [0.3], [0.0]], np.float32)
    # 0.3 lies between 0.28125 and 0.3125, the e4m3 neighbours
    np.testing.assert_array_equal(round_e4m3(x), [[448.0], [-448.0], [0.3125], [0.0]])
    codes = np.arange(-128, 128, dtype=np.float32)[:, None] * np.float32(0.25)
    np.testing.assert_array_equal(KvInt8(0.25)(codes), codes)
    np.testing.assert_array_equal(StaticFp8(0.5)(StaticFp8(0.5)(x)), StaticFp8(0.5)(x))
    zeros = np.zeros((4, 2), np.float32)
    np.testing.assert_array_equal(DynamicInt8()(zeros), zeros)
    np.testing.assert_array_equal(DynamicFp8(None)(zeros), zeros)
