"""The look into an image before the work, on real engines: everything that differs from the plan is said."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from container_case import Case, make_case_for

from pipeline.errors import PreflightError, ToolError
from pipeline.runners.probe import Expectation, probe
from pipeline.runners.process import ProcessFailed
from pipeline.toolchains.container import expectation
from pipeline.toolchains.release import load_release

pytestmark = pytest.mark.container

LLAMA = "/app/tensorrt_llm/examples/models/core/llama/convert_checkpoint.py"
EXPECTED = Expectation(
    release="1.2.1", tools=("trtllm-build", "python3"), files=(LLAMA,), versions={"tensorrt_llm": "1.2.1"}
)


@pytest.fixture
def on_podman(request: pytest.FixtureRequest) -> Case:
    """Podman alone, for what does not depend on the engine."""
    return make_case_for(request, "podman")


def test_probe_finds_tools_scripts_version_user_and_mounts(isolating: Case, tmp_path: Path) -> None:
    job = isolating.job(tmp_path, "trtllm-build")
    (tmp_path / "in" / "config.json").write_text("{}")
    seen = probe(isolating.runner(), job, EXPECTED, log_path=tmp_path / "probe.log")
    assert seen.tools["trtllm-build"] == "/usr/local/bin/trtllm-build"
    assert seen.files == {LLAMA: True}
    assert seen.versions == {"tensorrt_llm": "1.2.1"}
    assert seen.uid == isolating.options.caller.uid
    assert seen.gpus == ()
    assert seen.findings == ()


def test_probe_refuses_an_image_that_has_lost_the_builder(on_podman: Case, newer_image: str, tmp_path: Path) -> None:
    job = replace(on_podman.job(tmp_path, "trtllm-build"), image=newer_image)
    expected = replace(expectation(load_release("1.2.1"), []), tools=("trtllm-build",), files=(LLAMA,))
    with pytest.raises(PreflightError) as caught:
        probe(on_podman.runner(), job, expected)
    tools, version = caught.value.findings
    assert tools.rule == "image-without-tools"
    assert "no trtllm-build" in tools.message
    assert "for TensorRT-LLM 1.2.1 and the image holds 1.4.0" in tools.message
    assert "toolchain=trtllm_1_2_1 (the last release that builds engines)" in tools.hint
    assert version.message == "the image holds tensorrt_llm 1.4.0; the plan is for 1.2.1"


def test_probe_sees_that_the_engine_has_other_paths(engine: Case, tmp_path: Path) -> None:
    job = engine.job(tmp_path / "inside", "true")
    (tmp_path / "inside" / "in" / "weights").write_text("x")
    there = tmp_path / "there"
    for name in ("in", "out", "scratch/home", "scratch/probe"):
        (there / name).mkdir(parents=True)
    wrong = engine.runner(host_paths=((str(tmp_path / "inside"), str(there)),))
    with pytest.raises(PreflightError, match="does not show inside the container") as caught:
        probe(wrong, job, EXPECTED)
    assert "runner.host_paths" in caught.value.hint


def test_probe_sees_that_an_input_is_another_folder(engine: Case, tmp_path: Path) -> None:
    job = engine.job(tmp_path, "true")
    (tmp_path / "in" / "weights").write_text("x")
    (tmp_path / "empty").mkdir()
    wrong = engine.runner(host_paths=((str(tmp_path / "in"), str(tmp_path / "empty")),))
    with pytest.raises(PreflightError, match="the container sees something else at /in/model"):
        probe(wrong, job, EXPECTED)


def test_probe_is_content_with_the_right_paths_of_an_engine_outside(engine: Case, tmp_path: Path) -> None:
    real = tmp_path / "real"
    job = engine.job(real, "true")
    alias = tmp_path / "alias"
    alias.symlink_to(real)
    # We say alias, the engine is told the real path.
    binds = tuple(replace(bind, host=alias / bind.host.relative_to(real)) for bind in job.binds)
    job = replace(job, binds=binds, scratch=alias / "scratch")
    runner = engine.runner(host_paths=((str(alias), str(real)),))
    probe(runner, job, EXPECTED)
    assert not [argument for argument in runner.command_line(job) if str(alias) in argument]


def test_probe_sees_whose_the_outputs_would_be(on_podman: Case, tmp_path: Path) -> None:
    if on_podman.options.caller.uid == 0:
        pytest.skip("needs another user than root")
    runner = on_podman.runner(extra=("--user=0:0",))
    with pytest.raises(PreflightError, match=r"belong to user 0, not to \d+"):
        probe(runner, on_podman.job(tmp_path, "true"), EXPECTED)


def test_missing_path_of_an_engine_outside_is_explained(engine: Case, tmp_path: Path) -> None:
    runner = engine.runner(host_paths=((str(tmp_path), "/nowhere"),))
    with pytest.raises(ProcessFailed, match="does not see a path that exists here") as caught:
        runner.run(engine.job(tmp_path, "true"))
    assert "runner.host_paths" in caught.value.hint
    assert not Path("/nowhere").exists()


def test_probe_does_not_trust_that_podman_takes_gpus(on_podman: Case, tmp_path: Path) -> None:
    runner = on_podman.runner(extra=("--gpus=all",))
    with pytest.raises(PreflightError, match=r"needs 1 GPU\(s\) and 0 show inside the container"):
        probe(runner, on_podman.job(tmp_path, "true"), replace(EXPECTED, gpus=1))


def test_gpus_without_the_toolkit_are_explained(on_podman: Case, tmp_path: Path) -> None:
    with pytest.raises(ProcessFailed, match="cannot give GPUs to a container") as caught:
        on_podman.runner().run(on_podman.job(tmp_path, "true", gpus=1))
    assert "nvidia-ctk cdi generate" in caught.value.hint


@pytest.mark.usefixtures("cdi")
@pytest.mark.parametrize("devices", [(), ("1",)])
def test_probe_sees_gpus_given_by_device_name(on_podman: Case, tmp_path: Path, devices: tuple[str, ...]) -> None:
    job = on_podman.job(tmp_path, "true", gpus=1)
    seen = probe(on_podman.runner(devices=devices), job, replace(EXPECTED, gpus=1, compute_capability="9.0"))
    assert [gpu.uuid for gpu in seen.gpus] == [f"GPU-standin-{(devices or ('0',))[0]}"]
    assert seen.gpus[0].name == "NVIDIA H100 80GB HBM3"
    assert seen.gpus[0].memory_mib == 81559


def test_probe_compares_gpu_and_driver_with_the_plan(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    docker = make_case_for(request, "docker")
    job = docker.job(tmp_path, "true", gpus=2)
    job = replace(job, env={**job.env, "STANDIN_COMPUTE_CAP": "8.9", "STANDIN_DRIVER": "550.54.15"})
    expected = replace(EXPECTED, gpus=2, compute_capability="9.0", driver_floor="590.44.01")
    with pytest.raises(PreflightError, match=r"compute capability 9.0; the container sees 8.9 \(NVIDIA H100"):
        probe(docker.runner(), job, expected)
    seen = probe(docker.runner(), job, replace(expected, compute_capability="8.9"))
    assert [gpu.uuid for gpu in seen.gpus] == ["GPU-standin-0", "GPU-standin-1"]
    (finding,) = seen.findings
    assert (finding.rule, finding.severity) == ("driver-old", "warning")
    assert finding.message == "driver 550.54.15 is older than 590.44.01, which TensorRT-LLM 1.2.1 lists"


def test_resolve_names_an_image_so_that_it_cannot_change(engine: Case, tmp_path: Path) -> None:
    runner = engine.runner()
    image = runner.resolve(engine.image)
    assert image.image_id.startswith("sha256:")
    assert len(image.image_id) == len("sha256:") + 64
    assert image.digest
    argv = [engine.engine, "image", "inspect", "--format={{.Id}}", image.pinned]
    found = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()
    assert found.removeprefix("sha256:") == image.image_id.removeprefix("sha256:")
    runner.run(engine.job(tmp_path, "true", image=image.pinned))
    # What a lock file says: tag for people, digest for the engine.
    if image.digests:
        locked = f"{engine.image}@{image.digests[0]}"
        assert runner.resolve(locked).image_id == image.image_id
        runner.run(engine.job(tmp_path, "true", image=locked))


def test_resolve_says_when_an_image_is_not_there(engine: Case) -> None:
    with pytest.raises(ToolError, match=r"has no image localhost/nothing:1, and fetching is switched off") as caught:
        engine.runner(pull="never").resolve("localhost/nothing:1")
    assert caught.value.hint == f"{engine.engine} pull localhost/nothing:1"


def test_run_says_when_an_image_is_not_there(engine: Case, tmp_path: Path) -> None:
    with pytest.raises(ProcessFailed, match="did not run: the image is not there") as caught:
        engine.runner().run(engine.job(tmp_path, "true", image="localhost/nothing:1"))
    assert caught.value.returncode == 125


def test_unreachable_docker_is_explained(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    docker = make_case_for(request, "docker")
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
    with pytest.raises(ToolError, match="the container engine does not answer") as caught:
        docker.runner().resolve(docker.image)
    assert "runner=podman" in caught.value.hint
