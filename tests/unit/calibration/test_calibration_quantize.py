"""Quantization from end to end on the trained tiny model: measured, resumed, checked, and refused where it must be."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calibration_models import QUICK, TINY, encoder, multiply_scales, quantize, quantized, rewrite, tensors_of
from safetensors.numpy import load_file

from pipeline.calibration import quantize as quantize_module
from pipeline.calibration.alpha import choose_alpha, divergence
from pipeline.calibration.quantize import needs_calibration
from pipeline.calibration.ranges import load_state
from pipeline.calibration.sanity import check_ranges, check_scales
from pipeline.calibration.texts import TextOptions
from pipeline.checkpoint import ConvertOptions, convert_checkpoint, verify_checkpoint
from pipeline.engines.reference import ReferenceEngine
from pipeline.errors import ConfigError, SourceError

GOLDEN = Path(__file__).parents[2] / "data" / "golden"
SCHEMES: list[dict[str, Any]] = [
    {"quant": "fp8"},
    {"quant": "fp8", "kv_cache": "fp8", "tp": 2},
    {"quant": "smoothquant", "alpha": 0.7},
    {"quant": "smoothquant", "per_channel": True, "per_token": True, "alpha": 0.7},
    {"quant": "int8_sq", "alpha": 0.8, "tp": 2, "pp": 2},
    {"quant": "int4_awq", "group_size": 16, "tp": 2},
    {"quant": "w4a8_awq", "group_size": 32},
    {"quant": "nvfp4"},
    {"quant": "int8", "kv_cache": "int8"},
]
IDS = ["-".join(str(value) for value in scheme.values()) for scheme in SCHEMES]


@pytest.fixture(scope="module")
def plain_logits(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    out = tmp_path_factory.mktemp("plain") / "checkpoint"
    convert_checkpoint(TINY, out, options=ConvertOptions(dtype="bfloat16"))
    return ReferenceEngine.load(out, threads=1).logits(range(5, 69))


@pytest.mark.parametrize("scheme", SCHEMES, ids=IDS)
def test_scheme_gives_a_sound_checkpoint_that_answers_like_the_model(
    scheme: dict[str, Any], tmp_path: Path, plain_logits: np.ndarray
) -> None:
    out, report = quantized(tmp_path, **scheme)
    assert verify_checkpoint(out) == []
    logits = ReferenceEngine.load(out, threads=1).logits(range(5, 69))
    assert not np.array_equal(logits, plain_logits)
    # The logits have a deviation of 2.3; the coarsest scheme here, NVFP4, moves them by 0.3 on average.
    assert np.abs(logits - plain_logits).mean() < 0.5
    assert report.calibration["text"]["samples"] == 8


def test_calibration_changes_no_byte_with_batch_size_or_threads(tmp_path: Path) -> None:
    one = quantize(tmp_path / "one", quant="int4_awq", group_size=32)
    other = quantize(tmp_path / "other", quant="int4_awq", group_size=32)
    assert (one / "rank0.safetensors").read_bytes() == (other / "rank0.safetensors").read_bytes()
    one = quantize(tmp_path / "a", quant="fp8")
    other = quantize(tmp_path / "b", quant="fp8", text=dataclasses.replace(QUICK, batch_size=8))
    for name, value in tensors_of(one / "rank0.safetensors").items():
        assert np.array_equal(value.view("u1"), tensors_of(other / "rank0.safetensors")[name].view("u1")), name


def test_killed_calibration_goes_on_where_it_was(tmp_path: Path) -> None:
    text = dataclasses.replace(QUICK, batch_size=1)
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import os, signal
from pathlib import Path
from calibration_models import quantize
from pipeline.calibration import ranges
from pipeline.calibration.texts import TextOptions
save = ranges.save_state
def save_and_die(path, key, values, notes):
    save(path, key, values, notes)
    if notes.get("batches_done") == "3":
        os.kill(os.getpid(), signal.SIGKILL)
ranges.save_state = save_and_die
quantize(Path({str(tmp_path / "killed")!r}), quant="fp8", text=TextOptions(samples=8, seq_len=64, batch_size=1))
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "OPENBLAS_NUM_THREADS": "1"}, check=False
    )
    assert ended.returncode == -signal.SIGKILL
    seen: list[float] = []
    request = quantize_module.QuantizationRequest(
        TINY,
        tmp_path / "killed" / "checkpoint",
        ConvertOptions(dtype="bfloat16", quant="fp8"),
        text,
        None,
        None,
        tmp_path / "killed" / "work",
        threads=1,
    )

    def progress(done: float, total: float | None, unit: str) -> None:
        if unit == "sequences":
            seen.append(done)

    quantize_module.quantize_checkpoint(request, encoder(tmp_path / "killed"), progress=progress)
    assert seen == [4, 5, 6, 7, 8]
    whole = quantize(tmp_path / "whole", quant="fp8", text=text)
    killed = tmp_path / "killed" / "checkpoint" / "rank0.safetensors"
    assert killed.read_bytes() == (whole / "rank0.safetensors").read_bytes()


def test_state_of_another_request_is_not_used(tmp_path: Path) -> None:
    quantize(tmp_path, quant="fp8")
    assert load_state(tmp_path / "work" / "measured.safetensors", "other") is None
    (tmp_path / "work" / "measured.safetensors").write_bytes(b"damaged")
    assert load_state(tmp_path / "work" / "measured.safetensors", "other") is None


def test_ranges_have_the_form_of_the_goldens_and_scales_differ_between_layers(tmp_path: Path) -> None:
    out = quantize(tmp_path, quant="fp8", kv_cache="fp8")
    ranges = load_file(tmp_path / "work" / "ranges.safetensors")
    name = "model.layers.1.mlp.down_proj"
    assert [ranges[f"{name}.{kind}"].shape for kind in "xyw"] == [(256,), (64,), (64,)]
    tensors = tensors_of(out / "rank0.safetensors")
    for kind in ("attention.kv_cache_scaling_factor", "mlp.proj.activation_scaling_factor"):
        assert len({float(tensors[f"transformer.layers.{i}.{kind}"][0]) for i in range(2)}) == 2


def test_group_size_auto_takes_the_largest_that_fits_and_says_so(tmp_path: Path) -> None:
    # Hidden size 64: no multiple of 128.
    out, report = quantized(tmp_path, quant="int4_awq")
    assert report.calibration["group_size"] == 64
    assert json.loads((out / "config.json").read_text())["quantization"]["group_size"] == 64


def test_group_size_that_does_not_divide_a_rank_is_refused_before_measuring(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"group_size is 64: attention.dense has 32 inputs on a rank at tp 2"
    ) as caught:
        quantized(tmp_path, quant="int4_awq", group_size=64, tp=2)
    assert "32, 16" in caught.value.hint
    assert not (tmp_path / "work" / "measured.safetensors").exists()


def test_alpha_auto_takes_the_least_loss_of_the_calibration_text(tmp_path: Path) -> None:
    out, report = quantized(tmp_path, quant="int8_sq")
    losses = report.calibration["alpha"]["losses"]
    value = report.calibration["alpha"]["value"]
    assert losses[f"{value:g}"] == min(losses.values())
    assert json.loads((out / "config.json").read_text())["quantization"]["smoothquant_val"] == value


def test_choice_of_alpha_refines_around_the_best() -> None:
    best, losses = choose_alpha(lambda alpha: (alpha - 0.74) ** 2)
    assert best == 0.75
    assert sorted(losses) == [0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.9, 1.0]


def test_divergence_is_zero_for_equal_logits_and_known_for_a_coin() -> None:
    even, biased = np.log(np.array([[0.5, 0.5]], np.float32)), np.log(np.array([[0.25, 0.75]], np.float32))
    assert divergence([even], [even]) == 0
    # 0.5 ln(0.5/0.25) + 0.5 ln(0.5/0.75)
    assert divergence([even], [biased]) == pytest.approx(0.143841, abs=1e-6)


@pytest.mark.parametrize("text", ["", " \n "], ids=["empty", "blank"])
def test_calibration_on_nothing_is_an_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(text)
    with pytest.raises(SourceError, match="holds no text to calibrate on"):
        quantize(tmp_path, quant="fp8", text=TextOptions(tmp_path / "t.txt"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: np.zeros_like(values), "is zero everywhere"),
        (lambda values: values * np.float32(np.nan), "holds NaN or infinite"),
        (lambda values: np.full_like(values, np.inf), "holds NaN or infinite"),
    ],
    ids=["zero", "nan", "inf"],
)
def test_ranges_that_no_model_gives_name_the_module(change: Any, message: str) -> None:
    values = {f"model.layers.{i}.x": np.arange(1, 4, dtype=np.float32) * (i + 1) for i in range(3)}
    check_ranges(values)
    values["model.layers.1.x"] = change(values["model.layers.1.x"])
    with pytest.raises(SourceError, match=rf"model.layers.1.x {message}.*modules: model.layers.1.x"):
        check_ranges(values)


def test_ranges_that_are_all_alike_are_an_error() -> None:
    with pytest.raises(SourceError, match=r"is 1, as everywhere; modules: a\.x, b\.x"):
        check_ranges({"a.x": np.ones(3, np.float32), "b.x": np.ones(5, np.float32)})


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf, -1.0])
def test_scale_that_cannot_be_meant_is_named_right_after_quantizing(value: float, tmp_path: Path) -> None:
    out = quantize(tmp_path, quant="fp8")
    check_scales(out)
    tensors = tensors_of(out / "rank0.safetensors")
    name = "transformer.layers.1.mlp.fc.activation_scaling_factor"
    tensors[name] = np.array([value], np.float32)
    rewrite(out / "rank0.safetensors", tensors)
    with pytest.raises(SourceError, match=rf"modules: {name}"):
        check_scales(out)


def test_scales_that_are_one_everywhere_are_an_error(tmp_path: Path) -> None:
    out = quantize(tmp_path, quant="fp8", kv_cache="fp8")
    tensors = tensors_of(out / "rank0.safetensors")
    names = [name for name in tensors if name.endswith("kv_cache_scaling_factor")]
    rewrite(out / "rank0.safetensors", {**tensors, **{name: np.ones(1, np.float32) for name in names}})
    check_scales(out, floors=True)
    with pytest.raises(SourceError, match=f"is 1, as everywhere; modules: {', '.join(names)}"):
        check_scales(out, floors=False)


def test_missing_scale_is_named_with_its_rank(tmp_path: Path) -> None:
    out = quantize(tmp_path, quant="int8_sq", alpha=0.8, tp=2)
    tensors = tensors_of(out / "rank1.safetensors")
    lost = "transformer.layers.0.mlp.proj.prequant_scaling_factor"
    del tensors[lost]
    rewrite(out / "rank1.safetensors", tensors)
    with pytest.raises(SourceError, match=f"{lost} is missing; .*modules: rank1.safetensors"):
        check_scales(out)


def test_what_the_source_brings_is_not_measured_again() -> None:
    fp8 = ConvertOptions(quant="fp8")
    assert needs_calibration(fp8, ["a.weight"])
    assert not needs_calibration(fp8, ["a.weight", "a.input_scale"])
    assert needs_calibration(ConvertOptions(kv_cache="fp8"), ["a.weight"])
    assert not needs_calibration(ConvertOptions(kv_cache="fp8"), ["a.k_scale"])
    assert not needs_calibration(ConvertOptions(quant="int8"), ["a.weight"])
    assert not needs_calibration(ConvertOptions(quant="fp8", ranges=Path("r")), ["a.weight"])


def test_own_calibration_agrees_with_nvidias_on_the_same_tokens(tmp_path: Path) -> None:
    """Source of the file: TensorRT-LLM's own converter; it ran in float16, so its ranges are off by up to 1e-2."""
    expected = tensors_of(GOLDEN / "sources" / "sq_llama_gqa" / "calibration.safetensors")
    ids = [expected[name][0].tolist() for name in sorted(expected) if name.startswith("input_ids")]
    (tmp_path / "ids.jsonl").write_text("".join(json.dumps({"ids": row}) + "\n" for row in ids))
    request = quantize_module.QuantizationRequest(
        GOLDEN / "sources" / "sq_llama_gqa",
        tmp_path / "checkpoint",
        ConvertOptions(dtype="float16", kv_cache="int8"),
        TextOptions(tmp_path / "ids.jsonl", "ids"),
        None,
        None,
        tmp_path / "work",
        threads=1,
    )
    quantize_module.quantize_checkpoint(request, lambda text: [])
    measured = load_file(tmp_path / "work" / "ranges.safetensors")
    names = [name for name in expected if name.endswith((".x", ".y")) and not name.startswith("lm_head")]
    assert len(names) == 28
    for name in names:
        assert np.abs(measured[name] - expected[name]).max() < 1e-2 * expected[name].max(), name


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"quant": "fp8"}, "weights_scaling_factor"),
        ({"quant": "int8_sq", "alpha": 0.8}, "weights_scaling_factor"),
        ({"quant": "int4_awq", "group_size": 32}, "weights_scaling_factor"),
        ({"quant": "smoothquant", "alpha": 0.7, "per_channel": True, "per_token": True}, "per_channel_scale"),
    ],
    ids=["fp8", "int8_sq", "int4_awq", "smoothquant"],
)
def test_gate_fails_a_checkpoint_whose_scales_were_multiplied_by_four(
    options: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    from gate_of_tiny import verdict_of

    out = quantize(tmp_path, **options)
    assert verdict_of(out, options["quant"], tmp_path) == "passed"
    multiply_scales(out, kind, 4.0)
    assert verdict_of(out, options["quant"], tmp_path) == "failed"
