"""Plans for engines: what JSON promises, and every cell of model × precision × release × hardware."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from test_plan_verb import plan_json

from pipeline.cli.plan import make_plan
from pipeline.config import resolve
from pipeline.config.compose import Composed, compose_config, conf_root, options
from pipeline.toolchains.from_spec import settled, tool_plan
from pipeline.toolchains.release import load_release, release_versions

OPTIONS = options([conf_root()])
PINNED = "model.revision=0123456789012345678901234567890123456789"
IMAGE = "toolchain.build_image=nvcr.io/nvidia/tensorrt-llm/release@sha256:" + "a" * 64


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def stages_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, Any]]:
    _, plan = plan_json(capsys, *arguments)
    return {stage["name"]: stage for stage in plan["stages"]}


def test_commands_and_container_lines_come_in_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    stages = stages_of(capsys, "model=llama2", "precision=fp8", "hardware=h100_80g", "parallel=tp2", "runner=docker")
    for name, tool in (("convert", "python3"), ("build", "trtllm-build")):
        (command,), (line,) = stages[name]["commands"], stages[name]["runner"]
        assert command[0] == tool
        assert line[:2] == ["docker", "run"] and line[-len(command) :] == command
        assert "nvcr.io/nvidia/tensorrt-llm/release:1.2.1" in line
        assert "--network=none" in line and "--ipc=host" in line and "--ulimit=memlock=-1" in line
        inputs = [word for word in line if word.startswith("--mount=") and "target=/in/" in word]
        assert inputs and all(word.endswith("readonly") for word in inputs)
    assert "--calib_dataset" in stages["convert"]["commands"][0]


@pytest.mark.parametrize("runner", ["docker", "podman", "local", "pyxis"])
def test_plan_has_a_line_for_every_runner(capsys: pytest.CaptureFixture[str], runner: str) -> None:
    stages = stages_of(capsys, "model=llama2", "hardware=h100_80g", f"runner={runner}")
    assert all(len(stages[name]["commands"]) == len(stages[name]["runner"]) == 1 for name in ("convert", "build"))


def test_keys_are_unknown_until_revision_and_image_are_pinned(capsys: pytest.CaptureFixture[str]) -> None:
    job = ("model=llama2", "hardware=h100_80g", "runner=docker")
    loose = stages_of(capsys, *job, PINNED)
    assert loose["fetch"]["status"] == "miss"
    assert loose["convert"]["status"] == "unknown" and "image tag" in loose["convert"]["reason"]
    pinned = stages_of(capsys, *job, PINNED, IMAGE)
    assert [pinned[name]["status"] for name in ("fetch", "convert", "build")] == ["miss"] * 3


def keys(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, str]:
    # Limits are named: otherwise they follow from the memory of the GPU.
    limits = ("limits.max_batch_size=8", "limits.max_seq_len=4096", "hardware=h100_80g", "runner=docker")
    stages = stages_of(capsys, "model=llama2", "target=engine", "precision=fp8", *limits, PINNED, IMAGE, *more)
    return {name: stages[name]["key"] for name in ("fetch", "convert", "build")}


@pytest.mark.parametrize(
    ("more", "changed"),
    [
        (["hardware=h200"], {"build"}),
        (["hardware=l40s"], {"build"}),
        (["limits.max_batch_size=16"], {"build"}),
        (["build.flags.opt_num_tokens=64"], {"build"}),
        (["build.force_num_profiles=2"], {"build"}),
        (["build=production"], {"build"}),
        (["calibration.samples=64"], {"convert", "build"}),
        (["precision.kv_cache=fp8"], {"convert", "build"}),
        ([IMAGE.replace("a" * 64, "b" * 64)], {"convert", "build"}),
        (["build.workers=1"], set()),
        (["runner=podman"], set()),
        (["runner.shm_size=8g"], set()),
    ],
    ids=lambda value: value[0].partition(":")[0] if isinstance(value, list) else "",
)
def test_what_changes_which_key(capsys: pytest.CaptureFixture[str], more: list[str], changed: set[str]) -> None:
    before, after = keys(capsys), keys(capsys, *more)
    assert all(before.values())
    assert {name for name in before if before[name] != after[name]} == changed


def test_precision_without_calibration_has_no_calibration_in_its_key(capsys: pytest.CaptureFixture[str]) -> None:
    before = keys(capsys, "precision=bf16")
    assert before == keys(capsys, "precision=bf16", "calibration.samples=64")


def test_calibration_file_counts_by_content(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("one paragraph")
    before = keys(capsys, f"calibration.path={text}")
    same = text.rename(tmp_path / "b.txt")
    assert keys(capsys, f"calibration.path={same}") == before
    same.write_text("another paragraph")
    assert keys(capsys, f"calibration.path={same}")["convert"] != before["convert"]


@pytest.mark.parametrize(
    ("argument", "rule", "words"),
    [
        ("build.flags.max_batchsize=8", "unknown-flag", "1.2.1"),
        ("build.flags.gemm_plugin=fp9", "flag-choice", "1.2.1"),
        ("build.flags.opt_num_tokens=many", "flag-type", "1.2.1"),
        ("build.flags.checkpoint_dir=/x", "flag-reserved", "set by the pipeline"),
        ("build.converter_flags.load_model=true", "unknown-flag", "1.2.1"),
    ],
)
def test_flags_that_the_release_does_not_take_are_errors(
    capsys: pytest.CaptureFixture[str], argument: str, rule: str, words: str
) -> None:
    code, plan = plan_json(capsys, "model=llama2", "hardware=h100_80g", argument)
    (finding,) = [finding for finding in plan["findings"] if finding["rule"] == rule]
    assert code == 3 and words in finding["message"] and finding["hint"]
    assert finding["path"] == argument.partition("=")[0]
    assert not any(stage["commands"] for stage in plan["stages"])


def test_nothing_is_found_twice(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (("precision=fp8", "hardware=a100_80g"), ("precision=int8", "hardware=b200")):
        _, plan = plan_json(capsys, "model=llama2", "target=engine", *arguments)
        places = [(finding["rule"], finding["path"]) for finding in plan["findings"]]
        assert len(places) == len(set(places))


def test_converter_is_decided_by_the_tables_of_the_release(capsys: pytest.CaptureFixture[str]) -> None:
    job = ("model=llama2", "precision=fp8_rowwise", "hardware=h100_80g")
    assert plan_json(capsys, *job)[1]["converter"]["resolved"] == "nvidia"
    old = plan_json(capsys, *job, "toolchain=trtllm_0_18_2")[1]["converter"]
    assert old["resolved"] == "native" and "0.18.2" in old["reason"]


@pytest.fixture(scope="module")
def parts() -> dict[str, dict[str, Any]]:
    """Every option of the groups that are crossed, typed."""
    from omegaconf import OmegaConf

    from pipeline.config.fields import sections

    found: dict[str, dict[str, Any]] = {}
    for group in ("model", "precision", "hardware", "parallel", "toolchain"):
        files = sorted(conf_root().glob(f"{group}/*.yaml"))
        schema = OmegaConf.structured(sections()[group])
        found[group] = {file.stem: OmegaConf.to_object(OmegaConf.merge(schema, OmegaConf.load(file))) for file in files}
    return found


# One model of each family: the numbers of a shape are not what decides here.
MODELS = (
    *("llama2", "llama3_70b", "mistral_7b", "mixtral_8x7b", "qwen2_5_7b", "qwen3_8b", "gemma2_9b", "phi3_mini"),
    *("smollm2", "tinyllama"),
)
KV_CACHES = ("auto", "int8", "fp8")


@pytest.mark.parametrize("version", [v for v in release_versions() if load_release(v).builds_engines])
def test_every_cell_has_accepted_commands_or_an_error(parts: dict[str, dict[str, Any]], version: str) -> None:
    base = compose_config(["hardware=h100_80g", "target=engine", "runner=docker", f"model.revision={'0' * 40}"])
    toolchain = f"trtllm_{version.replace('.', '_')}"
    gpus = [name for name in OPTIONS["hardware"] if name not in ("auto", "cpu")]
    release = load_release(version)
    base.config.toolchain = parts["toolchain"][toolchain]
    parsed: set[tuple[str, ...]] = set()
    for model, precision, gpu, split in itertools.product(MODELS, OPTIONS["precision"], gpus, ("single", "tp4_pp2")):
        chosen = {"model": model, "precision": precision, "hardware": gpu, "parallel": split, "toolchain": toolchain}
        for group in ("model", "precision", "hardware", "parallel"):
            setattr(base.config, group, parts[group][chosen[group]])
        # The caches take turns: their cross product with everything else is walked below the configuration.
        base.config.precision.kv_cache = KV_CACHES[len(parsed) % 3]
        composed = Composed(base.config, {**base.choices, **chosen}, base.search_path)
        spec = settled(resolve.resolve(composed))
        plan = tool_plan(spec)
        errors = [finding for finding in plan.findings if finding.severity == "error"]
        assert bool(plan.commands) != bool(errors), (chosen, plan.findings)
        assert all(finding.hint for finding in errors), errors
        for command in plan.commands.values():
            if command.argv not in parsed:
                parsed.add(command.argv)
                outcome = release.table(command.tool).parse(command.flags)
                assert outcome.accepted, (chosen, outcome.error)
    assert len(parsed) > 60


def test_whole_plan_of_a_cell_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    for precision, gpu in itertools.product(("fp8", "int4_awq", "from_checkpoint"), ("h100_80g", "b200")):
        base = compose_config([f"precision={precision}", f"hardware={gpu}", "model=qwen3_8b", "target=engine"])
        plan = make_plan(settled(resolve.resolve(base)))
        assert [stage.name for stage in plan.stages][:3] == ["fetch", "convert", "build"]
        json.dumps(plan.spec.as_dict())
