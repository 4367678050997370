"""From the composed configuration to commands: what the plan of a real configuration comes to."""

from __future__ import annotations

import pytest
from toolchain_jobs import ENGINE_RELEASES, job, only, rules_of, value_after

from pipeline.config.compose import compose
from pipeline.config.rules import check
from pipeline.config.spec import Spec
from pipeline.facts import precisions
from pipeline.toolchains.adapter import commands_for, without_known
from pipeline.toolchains.from_spec import job_from_spec
from pipeline.toolchains.job import find_family
from pipeline.toolchains.release import data, load_release
from pipeline.toolchains.routes import default_converter


def spec_of(*arguments: str) -> Spec:
    return compose([*arguments, "hardware=h100_80g", "target=engine"])


def test_job_takes_names_sizes_and_memory_from_the_spec() -> None:
    spec = spec_of("model=llama2", "precision=smoothquant", "precision.kv_cache=int8", "parallel=tp4_pp2")
    made = job_from_spec(spec)
    assert (made.family, made.precision, made.kv_cache, made.sm) == ("LlamaForCausalLM", "smoothquant", "int8", 90)
    assert (made.tp, made.pp, made.world_size, made.gpu_count) == (4, 2, 8, 8)
    assert made.recipe == "smoothquant:W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN"
    assert made.limits.max_seq_len == spec.limits.max_seq_len
    # 6.74 billion, as the model card says.
    assert made.parameters == pytest.approx(6.74e9, rel=0.01)
    convert, build = commands_for(made, load_release(spec.toolchain.name))[0]
    assert value_after(convert, "--dtype") == "float16"
    assert value_after(build, "--max_seq_len") == str(spec.limits.max_seq_len)


@pytest.mark.parametrize("precision", ["fp16", "bf16", "int8", "int4", "fp8", "fp8_rowwise", "int4_awq", "w4a8_awq"])
def test_algorithm_of_the_spec_is_the_one_the_tool_makes(precision: str) -> None:
    spec = spec_of("model=llama2", f"precision={precision}")
    commands, _ = commands_for(job_from_spec(spec), load_release("1.2.1"))
    made = data("routes")["tools"][commands[0].tool]["makes"][precision]["algorithm"]
    assert made == (spec.precision.quant_algo or "none")


def test_405b_at_fp8_is_planned_without_weights() -> None:
    spec = spec_of("model=llama3_405b", "precision=fp8", "parallel=tp8")
    commands, findings = commands_for(job_from_spec(spec), load_release(spec.toolchain.name))
    assert [command.gpus for command in commands] == [8, 8]
    assert only(findings, "calibration-memory").severity == "warning"


def test_findings_of_the_configuration_are_not_said_twice() -> None:
    spec = compose(["model=llama2", "precision=fp8", "hardware=a100_80g", "target=engine"])
    known = check(spec)
    found = commands_for(job_from_spec(spec), load_release("1.2.1"))[1]
    assert "precision-gpu" in rules_of(known) & rules_of(found)
    assert "precision-gpu" not in rules_of(without_known(found, known))


def test_support_tables_of_configuration_and_toolchains_agree() -> None:
    for name, facts in precisions.ALGORITHMS.items():
        listed = data("support")["algorithms"][name]
        assert facts.support == tuple(listed["gpus"].values()), name
        assert {kv.lower() for kv in facts.kv_cache} == set(listed["kv_cache"]) - {"none"}, name


@pytest.mark.parametrize(
    ("family", "precision", "release", "expected"),
    [
        ("llama", "fp16", "1.2.1", "nvidia"),
        ("llama", "fp16", "0.18.2", "nvidia"),  # quantize.py's table covers it
        ("llama", "fp8_rowwise", "0.18.2", "native"),
        ("internlm2", "fp16", "1.2.1", "nvidia"),  # neither works: the finding says so
    ],
)
def test_converter_default_follows_the_tables(family: str, precision: str, release: str, expected: str) -> None:
    found = find_family(family)
    assert found is not None
    who, why = default_converter(job(family=family, precision=precision), found, load_release(release))
    assert who == expected and why


@pytest.mark.parametrize("version", ENGINE_RELEASES)
def test_toolchain_option_reaches_its_own_tables(version: str) -> None:
    name = f"trtllm_{version.replace('.', '_')}"
    spec = spec_of("model=llama2", "precision=bf16", f"toolchain={name}")
    commands, _ = commands_for(job_from_spec(spec), load_release(spec.toolchain.name))
    assert commands[1].description.endswith(version)
