from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.compose import compose
from pipeline.config.rules import check
from pipeline.config.rules.parallel import valid_tp
from pipeline.config.spec import Spec
from pipeline.errors import Finding


@cache
def job(*arguments: str) -> Spec:
    return compose(arguments)


def gpu(**changes: Any) -> Spec:
    """Llama 2 7B on an H100, with changes given as part__field=value."""
    return change(job("model=llama2", "precision=fp8", "hardware=h100_80g"), **changes)


def rehearsal(**changes: Any) -> Spec:
    return change(job("target=reference", "hardware=cpu"), **changes)


def change(spec: Spec, **changes: Any) -> Spec:
    for key, value in changes.items():
        part, _, name = key.partition("__")
        spec = dataclasses.replace(spec, **{part: dataclasses.replace(getattr(spec, part), **{name: value})})
    return spec


def shaped(spec: Spec, **changes: Any) -> Spec:
    assert spec.model.architecture is not None
    return change(spec, model__architecture=dataclasses.replace(spec.model.architecture, **changes))


def found(spec: Spec, rule: str) -> Finding | None:
    return next((finding for finding in check(spec) if finding.rule == rule), None)


def test_sound_jobs_have_no_errors() -> None:
    for spec in (gpu(), rehearsal()):
        assert [finding for finding in check(spec) if finding.severity != "info"] == []


def test_errors_come_first_and_all_at_once() -> None:
    spec = gpu(parallel__tp=3, hardware__sm=80, limits__max_input_len=9000)
    severities = [finding.severity for finding in check(spec)]
    assert severities.count("error") >= 3
    assert severities == sorted(severities, key=["error", "warning", "info"].index)


ERRORS: list[tuple[str, str, Callable[[], Spec]]] = [
    ("release-without-engines", "toolchain", lambda: gpu(toolchain__release="1.3.0rc21")),
    ("release-without-engines", "toolchain", lambda: gpu(toolchain__release="latest")),
    ("release-without-engines", "toolchain", lambda: gpu(toolchain__release="1.4.0")),
    ("release-without-llmapi", "toolchain", lambda: gpu(target__resolved="llmapi", toolchain__release="0.21.0")),
    ("target-needs-gpu", "hardware", lambda: rehearsal(target__resolved="engine")),
    ("gpu-too-old", "hardware", lambda: gpu(hardware__sm=75)),
    ("policy-auto-target", "target", lambda: gpu(policy__allow_auto_target=False)),
    ("policy-reference", "target", lambda: rehearsal(policy__allow_reference=False)),
    ("source-path", "model.path", lambda: rehearsal(source__kind="local")),
    ("source-path", "model.path", lambda: rehearsal(source__kind="local", source__path="/not/there")),
    ("source-id", "model.id", lambda: gpu(source__id="")),
    ("source-wheel", "source", lambda: rehearsal(source__wheel=None)),
    ("converter", "converter", lambda: rehearsal(converter__resolved="nvidia")),
    ("port-twice", "triton.grpc_port", lambda: rehearsal(triton__grpc_port=8000)),
    ("gate-stride", "gate.stride", lambda: rehearsal(gate__stride=1024)),
    ("gate-window", "gate.window", lambda: rehearsal(limits__max_seq_len=512)),
    ("native-precision", "precision", lambda: rehearsal(precision__quant_algo="W8A16", model__family="mixtral")),
    ("native-precision", "precision", lambda: rehearsal(precision__quant_algo="FP8", model__family="phi3")),
    ("native-precision", "precision.kv_cache", lambda: rehearsal(precision__kv_cache="INT8", model__family="gpt2")),
    ("native-precision", "precision.quantize_lm_head", lambda: rehearsal(precision__quantize_lm_head=True)),
    ("precision-gpu", "precision", lambda: gpu(hardware__sm=80)),
    ("precision-gpu", "precision", lambda: gpu(precision__quant_algo="NVFP4")),
    ("precision-gpu", "precision", lambda: gpu(precision__quant_algo="W8A16", hardware__sm=100)),
    ("kv-cache-gpu", "precision.kv_cache", lambda: gpu(precision__kv_cache="INT8", hardware__sm=100)),
    (
        "kv-cache-precision",
        "precision.kv_cache",
        lambda: gpu(precision__quant_algo="NVFP4", precision__kv_cache="INT8"),
    ),
    ("tp-heads", "parallel.tp", lambda: gpu(parallel__tp=3)),
    ("tp-kv-heads", "parallel.tp", lambda: shaped(gpu(parallel__tp=4), num_kv_heads=6)),
    ("tp-hidden", "parallel.tp", lambda: shaped(gpu(parallel__tp=4), hidden_size=4098)),
    ("tp-mlp", "parallel.tp", lambda: shaped(gpu(parallel__tp=4), intermediate_size=11006)),
    ("pp-layers", "parallel.pp", lambda: gpu(parallel__pp=3, toolchain__release="0.20.0")),
    ("pp-family", "parallel.pp", lambda: gpu(parallel__pp=2, model__family="phi3")),
    ("cp-heads", "parallel.cp", lambda: gpu(parallel__tp=32, parallel__cp=2)),
    ("width-16", "parallel.tp", lambda: shaped(gpu(), intermediate_size=11000)),
    ("reference-ranks", "parallel.cp", lambda: rehearsal(parallel__cp=3)),
    ("input-length", "limits.max_input_len", lambda: gpu(limits__max_input_len=4096, limits__max_seq_len=4096)),
    ("tensor-volume", "limits.max_num_tokens", lambda: gpu(limits__max_num_tokens=2**17)),
    ("reference-beams", "limits.max_beam_width", lambda: rehearsal(limits__max_beam_width=2)),
    ("memory-fit", "limits", lambda: gpu(hardware__memory_bytes=8 * 2**30)),
    ("kv-overcommit", "limits.max_batch_size", lambda: gpu(limits__max_batch_size=500)),
]

WARNINGS: list[tuple[str, Callable[[], Spec]]] = [
    ("release-deprecated", lambda: gpu(toolchain__release="1.3.0rc10")),
    ("driver-old", lambda: gpu(hardware__driver="580.10")),
    ("model-shape-unknown", lambda: gpu(model__architecture=None)),
    ("precision-gpu-unverified", lambda: gpu(precision__quant_algo="W8A16", hardware__sm=120)),
    ("pp-layers", lambda: gpu(parallel__pp=3)),
    ("gpu-count", lambda: gpu(parallel__tp=16)),
    ("context-exceeded", lambda: gpu(limits__max_seq_len=8192)),
    ("context-shortened", lambda: gpu(limits__max_seq_len=2048)),
    ("max-num-tokens-capped", lambda: gpu(limits__max_batch_size=1, limits__max_num_tokens=8192)),
    ("max-num-tokens-raised", lambda: gpu(limits__max_num_tokens=16)),
    ("max-num-tokens-batch", lambda: gpu(limits__max_num_tokens=32, limits__max_batch_size=64)),
    ("max-num-tokens-large", lambda: gpu(limits__max_num_tokens=32768)),
]


@pytest.mark.parametrize(("rule", "path", "make"), ERRORS, ids=[f"{rule}-{n}" for n, (rule, _, _) in enumerate(ERRORS)])
def test_rule_finds_an_error(rule: str, path: str, make: Callable[[], Spec]) -> None:
    finding = found(make(), rule)
    assert finding is not None
    assert (finding.severity, finding.path) == ("error", path)
    assert finding.message and finding.hint


@pytest.mark.parametrize(("rule", "make"), WARNINGS, ids=[f"{rule}-{n}" for n, (rule, _) in enumerate(WARNINGS)])
def test_rule_warns(rule: str, make: Callable[[], Spec]) -> None:
    finding = found(make(), rule)
    assert finding is not None
    assert finding.severity == "warning"


@pytest.mark.parametrize("release", ["1.3.0rc21", "latest"])
def test_release_without_engines_shows_both_ways_on(release: str) -> None:
    finding = found(gpu(toolchain__release=release), "release-without-engines")
    assert finding is not None
    assert "trtllm_1_2_1" in finding.hint and "target=llmapi" in finding.hint
    assert found(gpu(toolchain__release=release, target__resolved="llmapi"), "release-without-engines") is None


def test_heads_that_do_not_divide_list_the_valid_sizes() -> None:
    # Requirement: 6 heads at tp 4 names 1, 2, 3, 6.
    spec = shaped(gpu(parallel__tp=4), num_heads=6, num_kv_heads=6, hidden_size=768, intermediate_size=1536)
    finding = found(spec, "tp-heads")
    assert finding is not None
    assert finding.hint.endswith("1, 2, 3, 6")


def test_key_value_heads_may_be_repeated() -> None:
    shape = gpu().model.architecture
    assert shape is not None
    assert 8 in valid_tp(dataclasses.replace(shape, num_kv_heads=2))


def test_group_that_does_not_divide_names_what_would() -> None:
    # Llama 2's MLP of 11008 has 86 groups of 128: two ranks at most.
    spec = gpu(precision__quant_algo="W4A16_AWQ", precision__group_size=128, parallel__tp=8)
    finding = found(spec, "group-size")
    assert finding is not None
    assert "1376" in finding.message and finding.hint == "parallel.tp of 1, 2"


def test_memory_that_is_short_comes_with_overrides_that_fit() -> None:
    spec = gpu(hardware__memory_bytes=24 * 2**30, precision__quant_algo=None, limits__max_seq_len=65536)
    finding = found(spec, "memory-fit")
    assert finding is not None
    override = finding.hint.split("; or ")[0]
    assert override.startswith("limits.max_seq_len=")
    fixed = change(spec, limits__max_seq_len=int(override.partition("=")[2]))
    assert found(fixed, "memory-fit") is None


@pytest.mark.parametrize(("batch", "is_refused"), [(192, True), (8, False)])
def test_7b_at_16_bits_on_40_gb_takes_8_sequences_not_192(batch: int, is_refused: bool) -> None:
    spec = gpu(
        precision__quant_algo=None,
        hardware__memory_bytes=40 * 2**30,
        limits__max_seq_len=4096,
        limits__max_batch_size=batch,
    )
    errors = [finding for finding in check(spec) if finding.severity == "error"]
    assert bool(errors) is is_refused
    if errors:
        most = int(errors[0].hint.partition(";")[0].partition("=")[2])
        assert found(change(spec, limits__max_batch_size=most), "kv-overcommit").severity == "info"  # type: ignore[union-attr]


def test_local_source_that_exists_is_fine(tmp_path: Path) -> None:
    assert found(rehearsal(source__kind="local", source__path=str(tmp_path)), "source-path") is None
