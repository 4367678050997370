"""Rules of the engine build, and the support matrix: each finds what it is for, and is silent otherwise."""

from __future__ import annotations

from typing import Any

import pytest
from toolchain_jobs import job, only, rules_of, run

from pipeline.toolchains.adapter import build_command
from pipeline.toolchains.job import Limits, Lora, Speculative, find_family
from pipeline.toolchains.release import load_release
from pipeline.toolchains.support import algorithm_support, gpu_class, kv_cache_support

EXTERNAL = Speculative("draft_tokens_external", 5)
BIG = Limits(max_batch_size=600, max_input_len=512, max_seq_len=1024, max_num_tokens=8192, max_beam_width=1)
BEAMS = Limits(max_batch_size=4, max_input_len=512, max_seq_len=1024, max_num_tokens=8192, max_beam_width=4)

LONG = Limits(max_batch_size=8, max_input_len=9000, max_seq_len=9999, max_num_tokens=8192, max_beam_width=1)
CONTEXT = {"gather_context_logits": True}
ALL_LOGITS = {"gather_all_token_logits": True}
SHORT = Speculative("lookahead_decoding", 82, 7, 7, 7)
NO_MLP = {"gemm_swiglu_plugin": "fp8", "use_fused_mlp": False}
AUTO = {"gemm_plugin": "auto"}
OPT = {"opt_num_tokens": 8}
FAST_WITHOUT_PLUGIN = {"flags": {"fast_build": True}, "converter_flags": {"disable_weight_only_quant_plugin": True}}

# rule, severity, algorithm, release, job
CASES: list[tuple[str, str, str, str, dict[str, Any]]] = [
    ("paged-context-needed", "error", "none", "1.2.1", {"kv_cache": "int8", "reuse_kv": True}),
    ("long-prompts-fail", "warning", "none", "1.2.1", {"kv_cache": "int8", "limits": LONG}),
    ("paged-context-needed", "error", "none", "0.18.2", {"chunked_context": True}),
    ("input-len-needed", "error", "none", "1.2.1", {"limits": Limits(8), "flags": {"context_fmha": False}}),
    ("tokens-per-block", "warning", "none", "1.2.1", {"flags": {"tokens_per_block": 48}}),
    ("moe-sizes", "error", "none", "1.2.1", {"family": "mixtral", "tp": 8, "moe_ep": 3}),
    ("moe-sizes", "error", "none", "1.2.1", {"family": "mixtral", "tp": 8, "moe_tp": 2, "moe_ep": 2}),
    ("moe-with-cp", "error", "none", "1.2.1", {"family": "mixtral", "tp": 4, "moe_ep": 4, "cp": 2}),
    ("moe-experts", "warning", "none", "1.2.1", {"family": "mixtral", "tp": 4, "moe_ep": 4, "experts": 6}),
    ("context-logits-with-drafts", "error", "none", "1.2.1", {"speculative": EXTERNAL, "flags": CONTEXT}),
    ("context-logits-with-drafts", "error", "none", "1.2.1", {"speculative": EXTERNAL, "flags": ALL_LOGITS}),
    ("context-logits-kv-reuse", "warning", "none", "1.2.1", {"reuse_kv": True, "flags": CONTEXT}),
    ("generation-logits-no-effect", "warning", "none", "1.2.1", {"flags": {"gather_generation_logits": True}}),
    ("profiles-with-opt-num-tokens", "error", "none", "1.2.1", {"multiple_profiles": True, "flags": OPT}),
    ("multiple-profiles-cost", "info", "none", "1.2.1", {"multiple_profiles": True}),
    ("lora-plugin-off", "warning", "none", "1.2.1", {"flags": {"max_lora_rank": 8}}),
    ("lora-rank-too-small", "error", "none", "1.2.1", {"lora": Lora(8, ("attn_q",), adapter_rank=16)}),
    ("lora-modules-missing", "error", "none", "1.2.1", {"lora": Lora()}),
    ("draft-len-without-mode", "error", "none", "1.2.1", {"flags": {"max_draft_len": 4}}),
    ("draft-len-missing", "error", "none", "1.2.1", {"speculative": Speculative("draft_tokens_external")}),
    ("draft-len-missing", "error", "none", "1.2.1", {"speculative": Speculative("lookahead_decoding")}),
    ("lookahead-draft-len", "warning", "none", "1.2.1", {"speculative": SHORT}),
    ("medusa-beam", "error", "none", "1.2.1", {"speculative": Speculative("medusa"), "limits": BEAMS}),
    ("medusa-family", "error", "none", "1.2.1", {"speculative": Speculative("medusa"), "family": "qwen2"}),
    ("eagle-limits", "error", "none", "1.2.1", {"speculative": Speculative("eagle", 4), "limits": BIG}),
    ("eagle-limits", "error", "none", "1.2.1", {"speculative": Speculative("eagle", 257)}),
    ("draft-paged-context", "warning", "none", "1.2.1", {"speculative": EXTERNAL, "kv_cache": "int8"}),
    ("draft-two-engines", "info", "none", "1.2.1", {"speculative": EXTERNAL}),
    ("pp-reduce-scatter-mixtral", "error", "none", "1.2.1", {"flags": {"pp_reduce_scatter": True}}),
    ("streamingllm-removed", "error", "none", "1.2.1", {"flags": {"streamingllm": True}}),
    ("swiglu-needs-fused-mlp", "error", "FP8", "1.2.1", {"flags": NO_MLP}),
    ("swiglu-needs-fp8", "error", "none", "1.2.1", {"flags": {"low_latency_gemm_swiglu_plugin": "fp8"}}),
    ("fast-build-weight-only", "error", "W8A16", "1.2.1", FAST_WITHOUT_PLUGIN),
    ("sm100-plugin", "error", "FP8", "1.2.1", {"sm": 100, "flags": {"low_latency_gemm_plugin": "fp8"}}),
    ("sm100-plugin", "warning", "FP8", "1.2.1", {"sm": 103, "flags": {"low_latency_gemm_plugin": "fp8"}}),
    ("weight-streaming-gemm-plugin", "warning", "none", "1.2.1", {"weight_streaming": True, "flags": AUTO}),
    ("gemm-plugin-weights", "error", "none", "1.2.1", {"flags": {"gemm_plugin": "fp8"}}),
    ("gemm-plugin-fp8", "info", "FP8", "1.2.1", {}),
    ("build-config-wins", "warning", "none", "1.2.1", {"flags": {"build_config": "b.json"}}),
]  # fmt: skip


def check(algorithm: str, release: str, **values: Any) -> set[tuple[str, str]]:
    """Return rule and severity of everything the build rules find."""
    made = job(**values)
    family = find_family(made.family)
    assert family is not None
    findings = build_command(made, family, load_release(release), algorithm)[1]
    for finding in findings:
        assert finding.message and finding.path
        assert finding.hint or finding.severity != "error", finding
    return {(finding.rule, finding.severity) for finding in findings}


@pytest.mark.parametrize(("rule", "severity", "algorithm", "release", "values"), CASES)
def test_rule_finds_what_it_is_for(
    rule: str, severity: str, algorithm: str, release: str, values: dict[str, Any]
) -> None:
    assert (rule, severity) in check(algorithm, release, **values)


@pytest.mark.parametrize(
    ("rule", "algorithm", "release", "values"),
    [
        ("paged-context-needed", "FP8", "1.2.1", {"kv_cache": "fp8", "reuse_kv": True, "chunked_context": True}),
        ("long-prompts-fail", "none", "1.2.1", {"limits": LONG}),
        ("input-len-needed", "none", "1.2.1", {"flags": {"context_fmha": False}}),
        ("tokens-per-block", "none", "1.2.1", {"flags": {"tokens_per_block": 64}}),
        ("moe-sizes", "none", "1.2.1", {"family": "mixtral", "tp": 8, "moe_ep": 4, "experts": 8}),
        ("moe-experts", "none", "1.2.1", {"family": "mixtral", "tp": 8, "moe_ep": 4, "experts": 8}),
        ("context-logits-with-drafts", "none", "1.2.1", {"flags": {"gather_context_logits": True}}),
        ("profiles-with-opt-num-tokens", "none", "1.2.1", {"flags": {"opt_num_tokens": 8}}),
        ("lora-plugin-off", "none", "1.2.1", {"lora": Lora(8, ("attn_q",))}),
        ("lora-rank-too-small", "none", "1.2.1", {"lora": Lora(16, ("attn_q",), adapter_rank=16)}),
        ("draft-len-missing", "none", "1.2.1", {"speculative": Speculative("medusa")}),
        ("lookahead-draft-len", "none", "1.2.1", {"speculative": Speculative("lookahead_decoding", 83, 7, 7, 7)}),
        ("medusa-family", "none", "1.2.1", {"speculative": Speculative("medusa")}),
        ("eagle-limits", "none", "1.2.1", {"speculative": Speculative("eagle", 256)}),
        ("pp-reduce-scatter-mixtral", "none", "1.2.1", {"family": "mixtral", "flags": {"pp_reduce_scatter": True}}),
        ("streamingllm-removed", "none", "1.1.0", {"flags": {"streamingllm": True}}),
        ("swiglu-needs-fused-mlp", "FP8", "1.2.1", {"flags": {"gemm_swiglu_plugin": "fp8"}}),
        ("fast-build-weight-only", "W8A16", "1.2.1", {"flags": {"fast_build": True}}),
        ("sm100-plugin", "FP8", "1.2.1", {"sm": 90, "flags": {"low_latency_gemm_plugin": "fp8"}}),
        ("weight-streaming-gemm-plugin", "none", "1.2.1", {"weight_streaming": True}),
        ("gemm-plugin-weights", "FP8", "1.2.1", {"flags": {"gemm_plugin": "fp8"}}),
    ],
)
def test_rule_is_silent_when_all_is_well(rule: str, algorithm: str, release: str, values: dict[str, Any]) -> None:
    assert rule not in {found for found, _ in check(algorithm, release, **values)}


def test_dora_needs_the_flag_of_its_release() -> None:
    lora = Lora(8, ("attn_q",), dora=True)
    assert only(run("0.18.2", lora=lora)[1], "unknown-flag").path == "lora.dora"
    assert "unknown-flag" not in rules_of(run("0.19.0", lora=lora)[1])


def test_lora_module_of_a_newer_release_is_refused() -> None:
    lora = Lora(8, ("mlp_gate_up",))
    assert only(run("0.18.2", lora=lora)[1], "flag-choice").path == "lora.target_modules"
    assert "flag-choice" not in rules_of(run("0.19.0", lora=lora)[1])


@pytest.mark.parametrize(
    ("precision", "sm", "rule", "severity"),
    [
        ("fp8", 80, "precision-gpu", "error"),
        ("nvfp4", 90, "precision-gpu", "error"),
        ("int8", 100, "precision-gpu", "error"),
        ("int4_awq", 103, "precision-gpu", "error"),
        ("smoothquant", 100, "precision-gpu", "error"),
        ("fp8_rowwise", 100, "precision-gpu", "error"),
        ("int8", 120, "precision-gpu-unverified", "warning"),
        ("w4a8_awq", 100, "precision-gpu-unverified", "warning"),
        ("fp16", 75, "gpu-too-old", "error"),
        ("fp16", 110, "gpu-unlisted", "warning"),
    ],
)
def test_precision_and_gpu_are_checked_against_the_matrix(precision: str, sm: int, rule: str, severity: str) -> None:
    assert only(run(precision=precision, sm=sm)[1], rule).severity == severity


def test_kv_cache_and_gpu_are_checked_against_the_matrix() -> None:
    assert only(run(kv_cache="int8", sm=100)[1], "kv-cache-gpu").severity == "error"
    assert only(run(kv_cache="int8", sm=120)[1], "kv-cache-gpu-unverified").severity == "warning"
    assert only(run(precision="nvfp4", sm=100, kv_cache="int8")[1], "kv-cache-precision").severity == "error"


def test_gpu_and_family_must_be_known_to_the_release() -> None:
    assert "1.1.0" in only(run("1.0.0", sm=103)[1], "gpu-newer-than-release").message
    assert "gpu-newer-than-release" not in rules_of(run("1.1.0", sm=103)[1])
    assert only(run("0.19.0", family="qwen3")[1], "family-newer-than-release").severity == "error"
    assert only(run("0.21.0", family="qwen3_moe")[1], "family-unverified").severity == "warning"
    assert "family-unverified" not in rules_of(run("1.0.0", family="qwen3_moe")[1])


def test_matrix_gaps_are_warnings_and_statements_are_errors() -> None:
    # The matrix is example-based: quantize.py makes FP8 for Qwen without a tick.
    assert only(run(family="qwen2", precision="fp8")[1], "precision-unverified").severity == "warning"
    assert "precision-unverified" not in rules_of(run(family="llama", precision="fp8")[1])
    # NVFP4 engines: Llama and Mixtral only, in so many words.
    assert only(run(family="qwen2", precision="nvfp4", sm=100)[1], "precision-family").severity == "error"
    assert only(run(family="starcoder2", precision="fp8")[1], "route-unverified").severity == "warning"


def test_doubtful_flag_of_a_release_is_a_warning() -> None:
    commands, findings = run("0.20.0", family="qwen2", precision="fp8_rowwise")
    assert commands and only(findings, "flag-unverified").severity == "warning"
    assert "flag-unverified" not in rules_of(run("0.21.0", family="qwen2", precision="fp8_rowwise")[1])


def test_support_lookups_cover_the_listed_gpus() -> None:
    assert [gpu_class(sm) for sm in (80, 86, 89, 90, 100, 103, 120, 121)] == [
        "ampere", "ampere", "ada", "hopper", "blackwell_dc", "blackwell_dc", "blackwell_rtx", "blackwell_rtx",
    ]  # fmt: skip
    assert (algorithm_support("FP8", 89), algorithm_support("FP8", 86)) == ("yes", "no")
    assert (kv_cache_support("fp8", 80), kv_cache_support("auto", 80)) == ("yes", "yes")
