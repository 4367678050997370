from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from test_rules import change, found, gpu, job

from pipeline.config.compose import compose
from pipeline.config.engine_parts import Calibration, Lora, Speculative
from pipeline.config.sizing import budget_of, load_of
from pipeline.config.spec import Spec
from pipeline.errors import ConfigError


def heads(mode: str, path: str = "") -> Speculative:
    return Speculative(mode, 0, 0, 0, 0, None, None, 0, path)


def awq(**changes: object) -> Spec:
    return change(job("model=llama2", "precision=int4_awq", "hardware=h100_80g"), **changes)


def with_part(spec: Spec, **parts: object) -> Spec:
    return dataclasses.replace(spec, **parts)  # type: ignore[arg-type]


ERRORS: list[tuple[str, str, Callable[[], Spec]]] = [
    ("smoothquant-only", "precision.alpha", lambda: gpu(precision__alpha=0.5)),
    ("smoothquant-only", "precision.per_token", lambda: gpu(precision__per_token=True)),
    ("group-size-unused", "precision.group_size", lambda: gpu(precision__group_size=64)),
    (
        "native-speculative",
        "speculative.mode",
        lambda: with_part(gpu(converter__resolved="native"), speculative=heads("eagle")),
    ),
    ("medusa-heads", "speculative.path", lambda: with_part(gpu(), speculative=heads("medusa"))),
    ("path-missing", "speculative.path", lambda: with_part(gpu(), speculative=heads("medusa", "/not/there"))),
    ("lora-adapter", "lora.adapters", lambda: with_part(gpu(), lora=Lora(64, (), ("/not/there",), None, False))),
    (
        "path-missing",
        "calibration.path",
        lambda: with_part(gpu(), calibration=Calibration("/not/there", "text", 8, 8, 1)),
    ),
    ("path-missing", "build.timing_cache", lambda: gpu(build__timing_cache="/not/there")),
]


@pytest.mark.parametrize(("rule", "path", "make"), ERRORS, ids=[f"{rule}-{n}" for n, (rule, _, _) in enumerate(ERRORS)])
def test_rule_finds_an_error(rule: str, path: str, make: Callable[[], Spec]) -> None:
    finding = found(make(), rule)
    assert finding is not None
    assert (finding.severity, finding.path) == ("error", path)
    assert finding.message and finding.hint


@pytest.mark.parametrize(
    ("rule", "severity", "make"),
    [
        ("group-size-kernel", "warning", lambda: awq(precision__group_size=32)),
        ("workers-capped", "warning", lambda: gpu(build__workers=99)),
        ("vocabulary-padded", "info", lambda: change(job("model=phi3_mini", "hardware=h100_80g"), parallel__tp=7)),
    ],
)
def test_rule_says_what_upstream_changes(rule: str, severity: str, make: Callable[[], Spec]) -> None:
    finding = found(make(), rule)
    assert finding is not None and finding.severity == severity


def test_calibration_folder_has_no_other_column_for_nvidia(tmp_path: Path) -> None:
    spec = with_part(gpu(), calibration=Calibration(str(tmp_path), "body", 8, 8, 1))
    assert found(spec, "calibration-column") is not None
    (tmp_path / "data.csv").write_text("a")
    spec = with_part(gpu(), calibration=Calibration(str(tmp_path / "data.csv"), "text", 8, 8, 1))
    assert found(spec, "calibration-file") is not None


@pytest.mark.parametrize(
    ("argument", "rule"),
    [("speculative.max_draft_len=5", "draft-len-without-mode"), ("lora.dora=true", "lora-plugin-off")],
)
def test_parts_without_their_switch_are_refused(argument: str, rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["model=llama2", "hardware=h100_80g", argument])
    assert [finding.rule for finding in caught.value.findings] == [rule]


def test_group_size_follows_model_and_split() -> None:
    # Llama 2 7B: MLP width 11008 = 2 × 43 × 128: groups of 128 at tp 2, of 64 at tp 4, of neither at tp 8.
    sizes = [compose(["model=llama2", "precision=int4_awq", f"parallel.tp={tp}", "hardware=h100_80g"]) for tp in (2, 4)]
    assert [spec.precision.group_size for spec in sizes] == [128, 64]
    refused = found(compose(["model=llama2", "precision=int4_awq", "parallel=tp8", "hardware=h100_80g"]), "group-size")
    assert refused is not None and refused.severity == "error"
    asked = compose(["model=llama2", "precision=int4_awq", "precision.group_size=128", "parallel=tp4"])
    hint = found(asked, "group-size")
    assert hint is None or "precision.group_size=64" in hint.hint


def test_published_quantization_decides_algorithm_and_group() -> None:
    spec = compose(
        [
            "model=llama2",
            "precision=from_checkpoint",
            "model.quantization.kind=gptq",
            "model.quantization.group_size=64",
        ]
    )
    assert (spec.precision.quant_algo, spec.precision.group_size, spec.calibration) == ("W4A16_GPTQ", 64, None)


def test_memory_is_sized_for_drafts() -> None:
    # 7, 7, 7 gives 5 + 13 × 6 = 83 draft tokens.
    spec = compose(["model=llama2", "hardware=h100_80g", "speculative=lookahead", "limits.max_batch_size=128"])
    load = load_of(spec.limits, spec.speculative)
    assert load.max_seq_len == spec.limits.max_seq_len + 83
    assert load.max_num_tokens == 128 * 84


def test_ways_out_are_overrides_that_fit() -> None:
    spec = compose(["model=llama3_70b", "hardware=h100_80g", "parallel=tp2", "limits.max_seq_len=131072"])
    finding = found(spec, "memory-fit")
    assert finding is not None
    overrides = [way for way in finding.hint.split("; or ") if way.startswith(("limits.", "parallel."))]
    assert overrides
    for override in overrides:
        changed = compose(
            ["model=llama3_70b", "hardware=h100_80g", "parallel=tp2", "limits.max_seq_len=131072", override]
        )
        budget = budget_of(changed)
        assert budget is not None and budget.fits, override


def test_free_flags_are_typed_as_written() -> None:
    flags = [
        "fast_build=true",
        "opt_num_tokens=64",
        "gemm_plugin=fp8",
        "profiling_verbosity='1'",
        "lora_target_modules=[a,b]",
    ]
    spec = compose(["model=llama2", *(f"build.flags.{flag}" for flag in flags)])
    assert spec.build.flags == {
        "fast_build": True,
        "opt_num_tokens": 64,
        "gemm_plugin": "fp8",
        "profiling_verbosity": "1",
        "lora_target_modules": ("a", "b"),
    }
