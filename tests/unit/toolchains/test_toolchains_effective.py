"""What upstream changes by itself: final values and one finding per change."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from toolchain_jobs import job, only, rules_of

from pipeline.toolchains.effective import attention_options, change_findings, silent_changes
from pipeline.toolchains.job import Limits, Speculative, find_family
from pipeline.toolchains.options import BuildView
from pipeline.toolchains.release import load_release

SMALL = Limits(max_batch_size=8, max_input_len=512, max_seq_len=1024, max_num_tokens=32, max_beam_width=1)


def view(algorithm: str = "none", *, release: str = "1.2.1", family: str = "llama", **values: Any) -> BuildView:
    """Make the view of a build with a given algorithm."""
    found = find_family(family)
    assert found is not None
    return BuildView.of(job(family=family, **values), found, load_release(release), algorithm)


def final(build: BuildView) -> tuple[bool, bool]:
    """Return paged and FP8 context attention as upstream leaves them."""
    options, _ = attention_options(build)
    return options["use_paged_context_fmha"] == "enable", options["use_fp8_context_fmha"] == "enable"


def flags_of(build: BuildView) -> dict[str, Any]:
    """Return the changed flags and what they become."""
    return {change.flag: change.final for change in silent_changes(build)}


# Worked out by hand from the builder's code: paged and FP8 context attention in the end; both default to on.
@pytest.mark.parametrize(
    ("algorithm", "kv", "sm", "expected"),
    [
        ("none", "auto", 90, (True, False)),
        ("none", "fp8", 90, (False, False)),
        ("none", "int8", 90, (False, False)),
        ("W8A16", "auto", 80, (True, False)),
        ("FP8_PER_CHANNEL_PER_TOKEN", "fp8", 90, (False, False)),
        ("FP8", "auto", 90, (True, False)),
        ("FP8", "fp8", 90, (True, True)),
        ("FP8", "int8", 90, (False, False)),
        ("W4A8_AWQ", "fp8", 89, (True, True)),
        ("NVFP4", "fp8", 100, (True, True)),
        ("FP8", "fp8", 86, (False, False)),
        ("FP8", "auto", 86, (True, False)),
    ],
)
def test_attention_options_end_as_the_builder_leaves_them(
    algorithm: str, kv: str, sm: int, expected: tuple[bool, bool]
) -> None:
    assert final(view(algorithm, kv_cache=kv, sm=sm)) == expected


def test_attention_options_follow_an_independent_reading_of_the_builder() -> None:
    """A second formulation, straight down the builder's code, agrees on every combination."""
    words = ("enable", "disable")
    builds: Any = itertools.product(
        ("none", "W8A16", "FP8", "NVFP4"), ("auto", "int8", "fp8"), (80, 90), words, words, words, (False, True)
    )
    for algorithm, kv, sm, context, paged, fp8, eagle in builds:
        build = view(
            algorithm,
            kv_cache=kv,
            sm=sm,
            speculative=Speculative("eagle", 4) if eagle else None,
            flags={"context_fmha": context, "use_paged_context_fmha": paged, "use_fp8_context_fmha": fp8},
        )
        assert final(build) == _straight(algorithm, kv, sm, context, paged, fp8, eagle), build.job


def _straight(algorithm: str, kv: str, sm: int, context: str, paged: str, fp8: str, eagle: bool) -> tuple[bool, bool]:
    use_paged, use_fp8 = paged == "enable", fp8 == "enable"
    if context == "disable":
        use_fp8 = use_paged = False
    elif algorithm not in ("FP8", "W4A8_AWQ", "NVFP4") or sm < 89:
        use_fp8 = False
        if kv == "fp8":
            use_paged = False
    elif use_paged:
        use_fp8 = kv == "fp8"
    if kv == "int8":
        use_paged = False
    return use_paged or eagle, use_fp8


@pytest.mark.parametrize(
    ("algorithm", "values", "rule"),
    [
        ("FP8", {"flags": {"context_fmha": "disable"}}, "fp8-context-fmha-needs-context-fmha"),
        ("FP8", {"flags": {"context_fmha": "disable"}}, "paged-context-fmha-needs-context-fmha"),
        ("none", {}, "fp8-context-fmha-needs-fp8-weights"),
        ("none", {"kv_cache": "fp8"}, "paged-context-fmha-needs-fp8-weights"),
        ("FP8", {"sm": 80}, "fp8-context-fmha-needs-sm89"),
        ("FP8", {"sm": 80, "kv_cache": "fp8"}, "paged-context-fmha-needs-sm89"),
        ("FP8", {}, "fp8-context-fmha-needs-fp8-kv"),
        ("FP8", {"kv_cache": "fp8", "flags": {"use_fp8_context_fmha": "disable"}}, "fp8-context-fmha-turned-on"),
        ("none", {"kv_cache": "int8"}, "paged-context-fmha-int8-kv"),
        (
            "none",
            {"speculative": Speculative("eagle", 4), "flags": {"use_paged_context_fmha": False}},
            "paged-context-fmha-eagle",
        ),
        ("none", {"flags": {"reduce_fusion": True}}, "reduce-fusion-off"),
        ("none", {"family": "qwen2", "tp": 2, "flags": {"reduce_fusion": True}}, "reduce-fusion-off"),
        ("FP8", {"tp": 2, "flags": {"user_buffer": True}}, "user-buffer-off"),
        ("NVFP4", {"tp": 2, "flags": {"norm_quant_fusion": True, "reduce_fusion": True}}, "norm-quant-fusion-off"),
        ("FP8", {"flags": {"norm_quant_fusion": True}}, "norm-quant-fusion-off"),
        ("NVFP4", {"family": "mixtral", "flags": {"norm_quant_fusion": True}}, "norm-quant-fusion-off"),
        ("W8A16", {}, "fused-mlp-off"),
        ("FP8", {"family": "recurrentgemma"}, "fused-mlp-off"),
        ("none", {"flags": {"nccl_plugin": "float16"}}, "nccl-plugin-set"),
        ("none", {"tp": 2, "flags": {"nccl_plugin": "disable"}}, "nccl-plugin-set"),
        ("NVFP4", {"sm": 100}, "gemm-plugin-nvfp4"),
        ("none", {"flags": {"remove_input_padding": False}}, "num-tokens-ignored"),
        ("none", {"flags": {"context_fmha": False}, "limits": SMALL}, "num-tokens-raised-to-input"),
        ("none", {"flags": {"tokens_per_block": 64}, "limits": SMALL}, "num-tokens-raised-to-block"),
        ("none", {"flags": {"opt_num_tokens": 9000}}, "opt-num-tokens-capped"),
        ("none", {"speculative": Speculative("draft_tokens_external", 5)}, "sequence-grows-with-drafts"),
        ("none", {"speculative": Speculative("draft_tokens_external", 2000)}, "num-tokens-raised-for-drafts"),
    ],
)
def test_change_is_reported_under_its_id(algorithm: str, values: dict[str, Any], rule: str) -> None:
    finding = only(change_findings(view(algorithm, **values)), rule)
    assert finding.severity in ("info", "warning")
    assert "ends as" in finding.message and finding.path


@pytest.mark.parametrize(
    ("algorithm", "values"),
    [
        ("none", {"tp": 2, "flags": {"reduce_fusion": True, "user_buffer": True}}),
        ("FP8", {"tp": 2, "kv_cache": "fp8", "family": "gemma2", "flags": {"reduce_fusion": True}}),
        ("NVFP4", {"sm": 100, "kv_cache": "fp8", "flags": {"norm_quant_fusion": True, "gemm_plugin": "disable"}}),
        ("none", {"tp": 2, "flags": {"nccl_plugin": "auto"}}),
    ],
)
def test_nothing_is_reported_where_upstream_changes_nothing(algorithm: str, values: dict[str, Any]) -> None:
    attention = {"use_paged_context_fmha", "use_fp8_context_fmha", "use_fused_mlp"}
    assert set(flags_of(view(algorithm, **values))) <= attention


def test_change_is_a_warning_where_the_user_asked_for_the_value() -> None:
    default = only(change_findings(view("none")), "fp8-context-fmha-needs-fp8-weights")
    asked = only(
        change_findings(view("none", flags={"use_fp8_context_fmha": True})), "fp8-context-fmha-needs-fp8-weights"
    )
    assert (default.severity, asked.severity) == ("info", "warning")
    assert "defaults to enable" in default.message and "was set to enable" in asked.message


def test_losing_cache_reuse_is_a_warning_even_by_default() -> None:
    finding = only(change_findings(view("none", kv_cache="int8")), "paged-context-fmha-int8-kv")
    assert finding.severity == "warning" and "no KV cache reuse" in finding.message


def test_old_releases_have_nothing_to_turn_off() -> None:
    # Both options default to disable up to 0.18.
    assert rules_of(change_findings(view("none", release="0.18.2", kv_cache="int8"))) == set()


def test_drafts_enlarge_sizes_by_the_stated_amount() -> None:
    # 4096 + 5 drafts; 8 sequences × (2000 + 1).
    assert flags_of(view(speculative=Speculative("draft_tokens_external", 5)))["max_seq_len"] == 4101
    assert flags_of(view(speculative=Speculative("draft_tokens_external", 2000)))["max_num_tokens"] == 16008
    # 8 sequences × 4096 tokens, padded.
    assert flags_of(view(flags={"remove_input_padding": False}))["max_num_tokens"] == 32768
    # EAGLE adds its layers.
    assert flags_of(view(speculative=Speculative("eagle", 5, eagle_layers=4)))["max_seq_len"] == 4105
