"""The commands of single jobs: the right tool, the right flags, the right mounts, the right words when it cannot be."""

from __future__ import annotations

from typing import Any

import pytest
from toolchain_jobs import job, only, rules_of, run, value_after

from pipeline.errors import Finding
from pipeline.facts.published import source_quantization
from pipeline.toolchains.adapter import commands_for, without_known
from pipeline.toolchains.job import SMOOTHQUANT, Calibration, Lora, SourceQuantization, Speculative
from pipeline.toolchains.release import load_release

SCRIPTS = "/app/tensorrt_llm/examples"
GPTQ = ("--use_weight_only", "--weight_only_precision")


@pytest.mark.parametrize(
    ("family", "precision", "tool", "script"),
    [
        ("llama", "fp16", "convert/llama", f"{SCRIPTS}/models/core/llama/convert_checkpoint.py"),
        ("MistralForCausalLM", "int8", "convert/llama", f"{SCRIPTS}/models/core/llama/convert_checkpoint.py"),
        ("qwen2_5", "bf16", "convert/qwen", f"{SCRIPTS}/models/core/qwen/convert_checkpoint.py"),
        ("gemma2", "int4", "convert/gemma", f"{SCRIPTS}/models/core/gemma/convert_checkpoint.py"),
        ("phi3", "fp16", "convert/phi", f"{SCRIPTS}/models/core/phi/convert_checkpoint.py"),
        ("gpt2", "smoothquant", "convert/gpt", f"{SCRIPTS}/models/core/gpt/convert_checkpoint.py"),
        ("llama", "fp8", "quantize", f"{SCRIPTS}/quantization/quantize.py"),
        ("llama", "fp8_rowwise", "convert/llama", f"{SCRIPTS}/models/core/llama/convert_checkpoint.py"),
        ("qwen2", "fp8_rowwise", "quantize", f"{SCRIPTS}/quantization/quantize.py"),
        ("falcon", "fp16", "quantize", f"{SCRIPTS}/quantization/quantize.py"),
    ],
)
def test_tool_follows_family_and_precision(family: str, precision: str, tool: str, script: str) -> None:
    commands, _ = run(family=family, precision=precision)
    assert [command.stage for command in commands] == ["convert", "build"]
    assert commands[0].tool == tool
    assert commands[0].argv[:2] == ("python3", script)
    assert commands[1].argv[0] == "trtllm-build"


def test_scripts_of_old_releases_lie_in_the_triton_image() -> None:
    commands, findings = run("0.19.0", family="llama", precision="fp16")
    # No verified convert_checkpoint table before 0.20, so quantize.py writes the 16-bit checkpoint.
    assert commands[0].argv[:2] == ("python3", "/app/examples/quantization/quantize.py")
    assert value_after(commands[0], "--qformat") == "full_prec"
    assert "no flag table" in only(findings, "route-quantize").message
    assert only(findings, "flag-table-unverified").severity == "warning"


def test_flag_names_follow_the_script() -> None:
    gemma = run(family="gemma", precision="bf16", tp=2)[0][0]
    assert gemma.flags == (
        "--ckpt-type", "hf", "--model-dir", "/in/model", "--output-model-dir", "/out", "--dtype", "bfloat16",
        "--world-size", "2",
    )  # fmt: skip
    llama = run(family="llama", precision="bf16", tp=2, pp=2, cp=2)[0][0]
    assert value_after(llama, "--tp_size") == value_after(llama, "--pp_size") == value_after(llama, "--cp_size") == "2"
    assert value_after(llama, "--workers") == "8"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ((False, False), set()),
        ((True, False), {"--per_channel"}),
        ((False, True), {"--per_token"}),
        ((True, True), {"--per_channel", "--per_token"}),
    ],
)
def test_smoothquant_kinds_become_their_switches(kind: tuple[bool, bool], expected: set[str]) -> None:
    commands, _ = run(family="llama", precision="smoothquant", smoothquant_algo=SMOOTHQUANT[kind], alpha=0.8)
    assert {"--per_channel", "--per_token"} & set(commands[0].flags) == expected
    assert value_after(commands[0], "--smoothquant") == "0.8"


def test_smoothquant_of_another_kind_is_said_when_only_that_exists() -> None:
    commands, findings = run(family="phi3", precision="smoothquant")
    assert value_after(commands[0], "--qformat") == "int8_sq"
    assert only(findings, "smoothquant-other-kind").severity == "warning"
    assert "smoothquant-other-kind" not in rules_of(run(family="llama", precision="smoothquant")[1])


def test_calibration_is_mounted_and_passed_where_a_tool_calibrates() -> None:
    data = Calibration(samples=64, seq_len=4096, batch_size=4)
    command = run(family="llama", precision="fp8", calibration=data, tp=2)[0][0]
    assert value_after(command, "--calib_dataset") == "/in/calibration"
    assert (value_after(command, "--calib_size"), value_after(command, "--batch_size")) == ("64", "4")
    # The tokenizer would cut texts at 2048 tokens otherwise.
    assert (
        value_after(command, "--calib_max_seq_length") == value_after(command, "--tokenizer_max_seq_length") == "4096"
    )
    assert [mount.name for mount in command.mounts] == ["model", "calibration", "out"]
    assert command.gpus == 8
    plain = run(family="llama", precision="fp16", calibration=data)[0][0]
    assert "--calib_dataset" not in plain.flags
    assert plain.gpus == 1


def test_calibration_without_data_is_an_error_before_work() -> None:
    commands, findings = run(family="llama", precision="fp8", calibration=None)
    assert commands == []
    assert "train split and a text column" in only(findings, "calibration-missing").hint


def test_calibration_options_a_script_does_not_have_are_said_to_be_ignored() -> None:
    _, findings = run(family="qwen2", precision="smoothquant", calibration=Calibration(samples=64))
    assert only(findings, "converter-option-ignored").path == "calibration.samples=64".partition("=")[0]
    assert "converter-option-ignored" not in rules_of(run(family="qwen2", precision="smoothquant")[1])


def test_calibration_samples_are_capped_for_awq() -> None:
    assert "ends as 32" in only(run(precision="int4_awq")[1], "calibration-samples-capped").message


def test_calibration_memory_warns_when_the_16_bit_model_does_not_fit() -> None:
    big: dict[str, Any] = {"precision": "fp8", "tp": 8, "gpu_memory_bytes": 85_520_809_984}
    # 405 billion weights × 2 bytes × 1.2 = 972 GB against 8 × 85.5 GB.
    message = only(run(parameters=405_000_000_000, **big)[1], "calibration-memory").message
    assert "972 GB" in message and "684 GB" in message
    assert "calibration-memory" not in rules_of(run(parameters=70_000_000_000, **big)[1])


def test_kv_cache_scales_are_measured_where_a_tool_can() -> None:
    measured = run(family="llama", precision="bf16", kv_cache="fp8")[0][0]
    assert (measured.tool, value_after(measured, "--kv_cache_dtype")) == ("quantize", "fp8")
    source = SourceQuantization("gptq")
    commands, findings = run(family="llama", precision="from_checkpoint", kv_cache="fp8", source=source)
    assert "--fp8_kv_cache" in commands[0].flags
    assert only(findings, "kv-scales-default").severity == "warning"


@pytest.mark.parametrize(
    ("family", "source", "flags"),
    [
        ("llama", SourceQuantization("gptq", 4, 64), (*GPTQ, "int4_gptq", "--per_group", "--group_size", "64")),
        ("qwen2", SourceQuantization("gptq", 8, 128), (*GPTQ, "int8_gptq", "--per_group", "--group_size", "128")),
        ("llama", SourceQuantization("awq"), ()),
        ("llama", SourceQuantization("fp8", 8, 0), ("--use_fp8",)),
        ("llama", SourceQuantization("fp8_rowwise", 8, 0), ()),
        ("gpt2", SourceQuantization("fp8", 8, 0), ()),
    ],
)  # fmt: skip
def test_published_checkpoints_are_converted_as_they_are(
    family: str, source: SourceQuantization, flags: tuple[str, ...]
) -> None:
    commands, _ = run(family=family, precision="from_checkpoint", source=source)
    assert commands[0].tool.startswith("convert/")
    assert commands[0].flags[commands[0].flags.index("--pp_size") + 2 :] == flags


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"precision": "from_checkpoint"}, "source-not-quantized"),
        ({"precision": "from_checkpoint", "source": SourceQuantization("gptq", desc_act=True)}, "gptq-desc-act"),
        (
            {"precision": "from_checkpoint", "source": SourceQuantization("fp8_block", 8, 0)},
            "precision-not-for-engines",
        ),
        ({"precision": "fp8", "source": SourceQuantization("awq")}, "source-already-quantized"),
        # The llama script would take 8-bit GPTQ for 4-bit.
        ({"precision": "from_checkpoint", "source": SourceQuantization("gptq", 8)}, "precision-has-no-tool"),
        (
            {"precision": "from_checkpoint", "source": SourceQuantization("compressed-tensors", 8)},
            "precision-has-no-tool",
        ),
    ],
)
def test_sources_that_do_not_fit_are_refused(values: dict[str, Any], rule: str) -> None:
    commands, findings = run(**values)
    assert commands == []
    assert only(findings, rule).severity == "error"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, None),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": True},
            SourceQuantization("gptq", 4, 64, True),
        ),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, SourceQuantization("awq", 4, 128)),
        ({"quant_method": "fbgemm_fp8"}, SourceQuantization("fp8_rowwise", 8, 0)),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, SourceQuantization("fp8_block", 8, 0)),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, SourceQuantization("nvfp4", 8, 0)),
        ({"quant_method": "hqq"}, SourceQuantization("hqq", 8, 0)),
    ],
)
def test_source_quantization_is_read_from_the_config(
    config: dict[str, Any], expected: SourceQuantization | None
) -> None:
    assert source_quantization({"quantization_config": config} if config else {}) == expected


def test_no_flag_table_names_what_does_work() -> None:
    commands, findings = run("0.18.2", family="llama", precision="fp8_rowwise")
    finding = only(findings, "no-flag-table")
    assert commands == []
    assert "convert/llama: has no flag table in this release" in finding.message and "0.18.2" in finding.message
    assert (
        "toolchain=trtllm_1_2_1" in finding.hint and "converter=native" in finding.hint and "precision=" in finding.hint
    )


def test_family_without_any_table_is_refused() -> None:
    for family in ("internlm2", "opt"):
        finding = only(run(family=family, precision="fp16")[1], "no-flag-table")
        assert finding.hint == "what works: target=llmapi"


def test_unknown_family_gets_the_nearest_name() -> None:
    assert only(run(family="lama")[1], "no-flag-table").hint == "did you mean llama?"
    assert only(run(family="DeepseekV3ForCausalLM")[1], "family-has-no-engine").hint == "target=llmapi"


@pytest.mark.parametrize("release", ["1.3.0rc21", "1.4.0"])
def test_release_without_builder_gives_both_ways_on(release: str) -> None:
    commands, findings = run(release)
    assert commands == [] and rules_of(findings) == {"release-without-engines"}


def test_splits_a_script_has_no_flag_for_are_refused_or_go_through_quantize() -> None:
    assert only(run(family="gemma", tp=1, pp=2)[1], "pp-family").path == "parallel.pp"
    assert run(family="gpt2", cp=2)[0][0].tool == "quantize"
    finding = only(run(family="mixtral", precision="fp8", tp=4, moe_ep=4)[1], "precision-has-no-tool")
    assert "has no flag for moe_ep" in finding.message
    assert value_after(run(family="mixtral", tp=4, moe_ep=4)[0][0], "--moe_ep_size") == "4"


def test_native_converter_leaves_only_the_build() -> None:
    commands, findings = run(family="llama", precision="fp8", converter="native", calibration=None)
    assert [command.stage for command in commands] == ["build"]
    assert "calibration-missing" not in rules_of(findings)


def test_build_flags_carry_limits_and_fixed_paths() -> None:
    build = run(tp=2, pp=2)[0][1]
    assert build.argv[:13] == (
        "trtllm-build", "--checkpoint_dir", "/in/checkpoint", "--output_dir", "/out", "--max_batch_size", "8",
        "--max_input_len", "2048", "--max_seq_len", "4096", "--max_num_tokens", "8192",
    )  # fmt: skip
    assert (value_after(build, "--workers"), build.gpus) == ("4", 4)
    assert value_after(build, "--output_timing_cache") == "/out/model.cache"
    assert [(mount.name, mount.target, mount.writable) for mount in build.mounts] == [
        ("checkpoint", "/in/checkpoint", False),
        ("out", "/out", True),
    ]
    assert build.env["HF_HUB_OFFLINE"] == "1" and build.env["HOME"].startswith("/tmp/")


@pytest.mark.parametrize(
    ("precision", "sm", "expected"),
    [("fp16", 90, "auto"), ("int8", 90, "auto"), ("fp8", 90, None), ("nvfp4", 100, None)],
)
def test_gemm_plugin_default_follows_the_weights(precision: str, sm: int, expected: str | None) -> None:
    build = run(precision=precision, sm=sm)[0][1]
    assert (value_after(build, "--gemm_plugin") if "--gemm_plugin" in build.flags else None) == expected


def test_every_build_flag_is_reachable_with_its_type() -> None:
    table = load_release("1.2.1").table("trtllm-build")
    own = {"checkpoint_dir", "output_dir", "model_config", "lora_dir"}
    for flag in table.flags.values():
        if flag.key in own:
            continue
        sample: Any = (
            True if flag.is_switch else (flag.choices[0] if flag.choices else 7 if flag.type == "int" else "/out/x")
        )
        value = [sample] if flag.takes_many else sample
        limits = job().limits
        base = {f"max_{key}": None for key in ("batch_size", "input_len", "seq_len", "num_tokens", "beam_width")}
        build = commands_for_build(flags={flag.key: value}, limits=type(limits)(**base))
        assert flag.name in build, flag.name


def commands_for_build(**values: Any) -> tuple[str, ...]:
    """Return the build arguments of a job whatever its rules say."""
    from pipeline.toolchains.arguments import render
    from pipeline.toolchains.options import build_values

    rendered, problems = render(
        load_release("1.2.1").table("trtllm-build"),
        build_values(job(workers=7, **values), "none")[0],
        prefix="build.flags",
    )
    assert [problem for problem in problems if problem.severity == "error"] == []
    return rendered


def test_toggles_take_booleans_and_switches_disappear_when_false() -> None:
    build = run(flags={"context_fmha": True, "reduce_fusion": False, "strip_plan": False, "monitor_memory": True})[0][1]
    assert value_after(build, "--context_fmha") == "enable"
    assert value_after(build, "--reduce_fusion") == "disable"
    assert "--strip_plan" not in build.flags and "--monitor_memory" in build.flags


@pytest.mark.parametrize(
    ("flags", "rule", "part", "hint"),
    [
        ({"multi_block_mode": True}, "unknown-flag", "a run-time setting now", "remove it"),
        ({"use_custom_all_reduce": True}, "unknown-flag", "removed before 0.17", "remove it"),
        ({"max_output_len": 9}, "unknown-flag", "has no flag --max_output_len", "use --max_seq_len"),
        ({"gemm_plugn": "auto"}, "unknown-flag", "release 1.2.1 has no flag", "did you mean --gemm_plugin?"),
        ({"auto_parallel": 2}, "unknown-flag", "dropped in 1.2", "remove it"),
        ({"gemm_plugin": "fp9"}, "flag-choice", "takes one of", "did you mean 'fp8'?"),
        ({"gemm_plugin": True}, "flag-choice", "not a boolean", ""),
        ({"tokens_per_block": "x"}, "flag-type", "takes a whole number", ""),
        ({"opt_num_tokens": 1.5}, "flag-type", "takes a whole number", ""),
        ({"strip_plan": "yes"}, "flag-type", "is a switch", ""),
        ({"lora_target_modules": ["attn_x"]}, "flag-choice", "takes one of", ""),
        ({"checkpoint_dir": "/x"}, "flag-reserved", "set by the pipeline", "remove it"),
        ({"visualize_network": "/home/me"}, "flag-host-path", "inside the container", ""),
        ({"max_batch_size": 9}, "flag-set-twice", "8 by limits.max_batch_size, 9 here", ""),
    ],
)
def test_wrong_build_flags_are_refused_by_name(flags: dict[str, Any], rule: str, part: str, hint: str) -> None:
    commands, findings = run(flags=flags)
    finding = only(findings, rule)
    assert commands == []
    assert (finding.severity, finding.path) == ("error", f"build.flags.{next(iter(flags))}")
    assert part in finding.message
    assert hint in finding.hint


def test_all_wrong_flags_are_reported_at_once() -> None:
    _, findings = run(precision="int8", sm=100, flags={"a": 1, "gemm_plugin": "b", "tokens_per_block": "c"})
    assert {"unknown-flag", "flag-choice", "flag-type", "precision-gpu"} <= rules_of(findings, "error")


def test_deprecated_flag_warns_and_still_builds() -> None:
    commands, findings = run(flags={"paged_kv_cache": "enable"})
    assert commands and only(findings, "flag-deprecated").severity == "warning"


def test_files_are_mounted_and_never_named_by_their_host_path() -> None:
    build = run(flags={"build_config": "/home/me/b.json"})[0][1]
    assert value_after(build, "--build_config") == "/in/files/build_config"
    assert ("file:build_config", "/in/files/build_config") in [(m.name, m.target) for m in build.mounts]


def test_converter_flags_reach_the_script_and_are_checked() -> None:
    assert "--load_model_on_cpu" in run(converter_flags={"load_model_on_cpu": True})[0][0].flags
    assert only(run(converter_flags={"load_model": True})[1], "unknown-flag").path == "build.converter_flags.load_model"
    assert only(run(converter_flags={"dtype": "float32"})[1], "flag-set-twice").severity == "error"
    assert only(run(converter_flags={"meta_ckpt_dir": "/data"})[1], "flag-host-path").severity == "error"


def test_lora_profiles_and_streaming_become_flags() -> None:
    lora = Lora(max_rank=16, target_modules=("attn_q", "attn_v"), adapters=2, dora=True)
    build = run(lora=lora, multiple_profiles=True, weight_streaming=True, force_num_profiles=2)[0][1]
    start = build.flags.index("--lora_target_modules")
    assert build.flags[start : start + 3] == ("--lora_target_modules", "attn_q", "attn_v")
    assert (value_after(build, "--lora_plugin"), value_after(build, "--max_lora_rank")) == ("auto", "16")
    assert value_after(build, "--dora_plugin") == "enable"
    assert {"/in/lora/0", "/in/lora/1"} <= {mount.target for mount in build.mounts}
    assert "--weight_streaming" in build.flags and value_after(build, "--gemm_plugin") == "disable"
    assert value_after(build, "--multiple_profiles") == "enable"
    assert build.env["BUILDER_FORCE_NUM_PROFILES"] == "2"


def test_medusa_heads_are_merged_by_quantize() -> None:
    commands, _ = run(precision="fp8", speculative=Speculative("medusa", max_draft_len=63, medusa_heads=4))
    assert value_after(commands[0], "--medusa_model_dir") == "/in/medusa"
    assert (value_after(commands[0], "--num_medusa_heads"), value_after(commands[0], "--max_draft_len")) == ("4", "63")
    assert value_after(commands[1], "--speculative_decoding_mode") == "medusa"


@pytest.mark.parametrize("mode", ["eagle", "explicit_draft_tokens"])
def test_modes_with_their_own_converter_have_no_table(mode: str) -> None:
    finding = only(run(speculative=Speculative(mode))[1], "no-flag-table")
    assert "convert_checkpoint.py" in finding.message and "lookahead_decoding" in finding.hint
    # With a checkpoint from elsewhere the build itself is known.
    assert run(speculative=Speculative(mode), converter="native")[0]


def test_lookahead_length_comes_from_the_window() -> None:
    # 7, 7, 7 gives 83: upstream's example.
    speculative = Speculative("lookahead_decoding", window=7, ngram=7, verification=7)
    assert value_after(run(speculative=speculative)[0][1], "--max_draft_len") == "83"


def test_timing_cache_of_an_earlier_build_is_read() -> None:
    build = run(reuse_timing_cache=True)[0][1]
    assert value_after(build, "--input_timing_cache") == "/in/timing_cache/model.cache"


def test_commands_do_not_depend_on_the_gpu() -> None:
    argvs = {tuple(c.argv for c in run(precision="bf16", sm=sm)[0]) for sm in (80, 89, 90, 100)}
    assert len(argvs) == 1


def test_without_known_drops_what_the_configuration_said() -> None:
    known = [Finding("precision-gpu-unverified", "warning", "precision", "a")]
    found = [Finding("precision-gpu", "error", "precision", "b"), Finding("precision-gpu", "error", "other", "c")]
    assert without_known(found, known) == found[1:]
    assert commands_for(job(), load_release("1.2.1"))[1]
