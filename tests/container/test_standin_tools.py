"""The stand-in image runs the commands of the plan, rejects what the real tools reject, and fails on request."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from container_case import LOCAL, Case, give, make_case_for
from safetensors import safe_open

from pipeline.runners.job import ContainerJob
from pipeline.runners.process import ProcessFailed
from pipeline.toolchains.adapter import commands_for
from pipeline.toolchains.advice import advise
from pipeline.toolchains.command import Command
from pipeline.toolchains.container import bind
from pipeline.toolchains.job import Calibration, ToolJob
from pipeline.toolchains.release import load_release

pytestmark = pytest.mark.container

RELEASE = load_release("1.2.1")


@pytest.fixture(scope="session")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tools of the image laid out on this machine: where they run does not change what they do."""
    return lay_out(tmp_path_factory.mktemp("tools") / "root", "1.2.1")


def lay_out(root: Path, release: str) -> Path:
    """Put the tools of a release below ``root``."""
    script = Path(__file__).parents[2] / "docker" / "standin" / "overlay.py"
    subprocess.run([sys.executable, script, release, root], check=True)
    return root


def here(job: ContainerJob, root: Path) -> ContainerJob:
    """Name the tools by where they were laid out."""
    program = (
        (job.argv[0], f"{root}{job.argv[1]}") if job.argv[0] == "python3" else (f"{root}/usr/local/bin/{job.argv[0]}",)
    )
    return replace(job, argv=(*program, *job.argv[len(program) :]))


@pytest.fixture
def on_podman(request: pytest.FixtureRequest) -> Case:
    """Podman alone, for what does not depend on the engine."""
    return make_case_for(request, "podman")


def commands(family: str = "llama", precision: str = "fp16", **values: int) -> list[Command]:
    """Return the plan's commands for two ranks on H100s."""
    job = ToolJob(family=family, precision=precision, sm=90, gpu_count=2, dtype="bfloat16", tp=2, **values)
    made, findings = commands_for(replace(job, calibration=Calibration()), RELEASE)
    assert made, findings
    return made


def bound(case: Case, command: Command, folder: Path, **changes: object) -> ContainerJob:
    """Give a command folders; it needs no GPU."""
    hosts = {name: folder / name for name in ("model", "calibration", "checkpoint", "out")}
    for path in hosts.values():
        path.mkdir(parents=True, exist_ok=True)
    give(hosts["out"], case.options.caller)
    (hosts["model"] / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (hosts["calibration"] / "train.jsonl").write_text('{"text": "a"}\n')
    job = bind(command, hosts, image=case.image, scratch=folder / "scratch")
    return replace(job, **{"gpus": 0, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(("family", "precision"), [("llama", "fp16"), ("gemma", "bf16"), ("phi3", "fp8")])
def test_planned_commands_make_checkpoint_and_engines(
    on_podman: Case, tmp_path: Path, family: str, precision: str
) -> None:
    convert, build = commands(family, precision)
    runner = on_podman.runner()
    runner.run(bound(on_podman, convert, tmp_path / "convert"))
    checkpoint = tmp_path / "convert" / "out"
    assert sorted(path.name for path in checkpoint.iterdir()) == [
        "config.json", "rank0.safetensors", "rank1.safetensors",
    ]  # fmt: skip
    building = bound(on_podman, build, tmp_path / "build")
    checkpoint.rename(tmp_path / "checkpoint")
    (tmp_path / "build" / "checkpoint").rmdir()
    (tmp_path / "checkpoint").rename(tmp_path / "build" / "checkpoint")
    runner.run(building)
    out = tmp_path / "build" / "out"
    config = json.loads((out / "config.json").read_text())
    assert config["version"] == "1.2.1"
    assert config["pretrained_config"]["mapping"]["world_size"] == 2
    assert config["build_config"]["max_batch_size"] > 0
    assert [(out / f"rank{rank}.engine").stat().st_size for rank in (0, 1)] == [4096, 4096]
    assert b"stand-in" in (out / "rank1.engine").read_bytes()


def test_checkpoint_files_are_valid_safetensors(tools: Path, tmp_path: Path) -> None:
    LOCAL.runner().run(here(bound(LOCAL, commands()[0], tmp_path), tools))
    with safe_open(tmp_path / "out" / "rank1.safetensors", framework="np") as file:
        assert "stand-in" in file.metadata()["about"]
        assert file.get_tensor("transformer.vocab_embedding.weight").shape == (1, 1)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--use_custom_all_reduce", "disable"), "unrecognized arguments: --use_custom_all_reduce"),
        (("--gemm_plugin", "int5"), "invalid choice: 'int5'"),
        (("--max_batch_size", "many"), "invalid int value: 'many'"),
    ],
)
def test_tools_reject_what_the_real_ones_reject(
    tools: Path, tmp_path: Path, flags: tuple[str, ...], words: str
) -> None:
    job = here(bound(LOCAL, commands()[1], tmp_path), tools)
    with pytest.raises(ProcessFailed, match=words) as caught:
        LOCAL.runner().run(replace(job, argv=(*job.argv, *flags)))
    assert caught.value.returncode == 2
    if "int value" not in words:
        assert advise(caught.value.tail)


def test_tools_of_an_older_release_know_its_own_flags(tmp_path: Path) -> None:
    tool = lay_out(tmp_path / "root", "0.19.0") / "usr" / "local" / "bin" / "trtllm-build"
    # The option went with 1.2.
    done = subprocess.run([tool, "--auto_parallel", "2", "--nope"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.endswith("trtllm-build: error: unrecognized arguments: --nope\n")


@pytest.mark.parametrize(
    ("fault", "code", "files"),
    [
        ("exit-after-write", 1, {"config.json": True}),
        ("empty-file", 0, {"config.json": True, "rank0.safetensors": True, "rank1.safetensors": False}),
        ("missing-rank", 0, {"config.json": True, "rank0.safetensors": True}),
        ("out-of-memory", 1, {}),
        ("killed", -9, {}),
        ("trtllm-build:killed", 0, {"config.json": True, "rank0.safetensors": True, "rank1.safetensors": True}),
    ],
)
def test_tools_fail_on_request(tools: Path, tmp_path: Path, fault: str, code: int, files: dict[str, bool]) -> None:
    job = here(bound(LOCAL, commands()[0], tmp_path), tools)
    job = replace(job, env={**job.env, "STANDIN_FAULT": fault})
    if code:
        with pytest.raises(ProcessFailed) as caught:
            LOCAL.runner().run(job)
        assert caught.value.returncode == code
    else:
        LOCAL.runner().run(job)
    assert {path.name: path.stat().st_size > 0 for path in (tmp_path / "out").iterdir()} == files


def test_hanging_tool_is_stopped(on_podman: Case, tmp_path: Path) -> None:
    job = bound(on_podman, commands()[0], tmp_path, timeout_s=1.0)
    with pytest.raises(ProcessFailed, match=r"convert_checkpoint\.py did not end within 1 s"):
        on_podman.runner().run(replace(job, env={**job.env, "STANDIN_FAULT": "hang"}))
    assert on_podman.containers() == []


def test_out_of_memory_gets_the_advice_of_the_real_tool(tools: Path, tmp_path: Path) -> None:
    job = here(bound(LOCAL, commands()[1], tmp_path), tools)
    with pytest.raises(ProcessFailed) as caught:
        LOCAL.runner().run(replace(job, env={**job.env, "STANDIN_FAULT": "out-of-memory"}))
    advice = advise(caught.value.tail)
    assert advice is not None
    assert "memory" in advice.cause.lower()


def test_gpu_flags_of_the_plan_reach_the_tool_on_docker(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    docker = make_case_for(request, "docker")
    convert = commands()[0]
    for gpus, outcome in ((1, "ok"), (0, "max_workers must be greater than 0")):
        job = bound(docker, convert, tmp_path / str(gpus), gpus=gpus)
        job = replace(job, env={**job.env, "STANDIN_NEEDS_GPU": "1"})
        if outcome == "ok":
            docker.runner().run(job)
        else:
            with pytest.raises(ProcessFailed, match=outcome):
                docker.runner().run(job)


def test_local_runner_runs_the_plan_where_the_tools_are(
    tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tools}/usr/local/bin:{os.environ['PATH']}")
    convert, build = commands()
    # Scripts have absolute paths in the image, which we are not in; the builder is on PATH.
    LOCAL.runner().run(here(bound(LOCAL, convert, tmp_path / "convert"), tools))
    building = bound(LOCAL, build, tmp_path / "build")
    for file in (tmp_path / "convert" / "out").iterdir():
        file.rename(tmp_path / "build" / "checkpoint" / file.name)
    LOCAL.runner().run(building)
    assert (tmp_path / "build" / "out" / "rank1.engine").stat().st_size == 4096
