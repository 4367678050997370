"""The exact lines that runners execute; the flags are those that NVIDIA's container documentation recommends."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from pipeline.errors import ConfigError, ToolError
from pipeline.runners.container import ContainerRunner, visible_devices
from pipeline.runners.create import RUNNERS, make_runner
from pipeline.runners.job import Bind, Caller, ContainerJob, Options, Secret
from pipeline.runners.local import LocalRunner
from pipeline.runners.pyxis import PyxisRunner

IMAGE = "nvcr.io/nvidia/tensorrt-llm/release:1.2.1"
JOB = ContainerJob(
    name="build-1a2b",
    argv=("trtllm-build", "--checkpoint_dir", "/in/checkpoint", "--output_dir", "/out", "--note", "see /out"),
    image=IMAGE,
    scratch=Path("/store/work/1"),
    binds=(Bind(Path("/store/a"), "/in/checkpoint"), Bind(Path("/store/b"), "/out", writable=True)),
    env={"HOME": "/tmp/home", "HF_HOME": "/tmp/home/hf"},
    gpus=2,
    timeout_s=3600.0,
)
CALLER = Caller(1000, 100)


def lines(argv: list[str]) -> list[str]:
    """Drop the image and what runs in it."""
    return argv[: argv.index(IMAGE)]


def test_docker_line_is_the_one_nvidia_recommends() -> None:
    assert shlex.join(ContainerRunner("docker", Options(caller=CALLER)).command_line(JOB)) == (
        "docker run --rm --init --pull=never --name=build-1a2b --log-driver=none --network=none --user=1000:100 "
        "--ipc=host --ulimit=memlock=-1 --ulimit=stack=67108864 '--gpus=\"device=0,1\"' --workdir=/tmp "
        "--mount=type=bind,source=/store/a,target=/in/checkpoint,readonly "
        "--mount=type=bind,source=/store/b,target=/out "
        "--mount=type=bind,source=/store/work/1/home,target=/tmp/home "
        "--env=HOME=/tmp/home --env=HF_HOME=/tmp/home/hf "
        f"{IMAGE} trtllm-build --checkpoint_dir /in/checkpoint --output_dir /out --note 'see /out'"
    )


def test_podman_line_differs_in_gpu_devices_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    docker = ContainerRunner("docker", Options(caller=CALLER)).command_line(JOB)
    podman = ContainerRunner("podman", Options(caller=CALLER)).command_line(JOB)
    assert [word for word in podman if word not in docker] == [
        "podman", "--device=nvidia.com/gpu=0", "--device=nvidia.com/gpu=1",
    ]  # fmt: skip
    assert [word for word in docker if word not in podman] == ["docker", '--gpus="device=0,1"']


def test_rootless_podman_keeps_the_callers_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    argv = ContainerRunner("podman", Options(caller=CALLER)).command_line(JOB)
    assert "--userns=keep-id" in argv
    assert "--user=1000:100" in argv
    assert "--userns=keep-id" not in ContainerRunner("docker", Options(caller=CALLER)).command_line(JOB)


def test_rootless_docker_runs_as_the_root_that_is_us() -> None:
    argv = ContainerRunner("docker", Options(caller=CALLER, rootless=True)).command_line(JOB)
    assert [word for word in argv if word.startswith("--user")] == ["--user=0:0"]


def test_line_leaves_the_tag_out_beside_a_digest() -> None:
    job = ContainerJob("n", ("true",), "host:5000/a:1@sha256:0", Path("/s"))
    assert ContainerRunner("podman").command_line(job)[-2:] == ["host:5000/a@sha256:0", "true"]


@pytest.mark.parametrize("engine", ["docker", "podman"])
def test_options_replace_what_is_recommended(engine: str) -> None:
    options = Options(
        program="/opt/bin/engine", shm_size="16g", ulimits=(), devices=("GPU-7", "3"), extra=("--cpus=4",)
    )
    argv = lines(make_runner(engine, options).command_line(JOB))
    assert argv[0] == "/opt/bin/engine"
    assert "--shm-size=16g" in argv
    assert argv[-1] == "--cpus=4"
    assert not [word for word in argv if word.startswith(("--ipc", "--ulimit"))]
    gpus = [word for word in argv if "gpu" in word.lower()]
    expected = {
        "docker": ['--gpus="device=GPU-7,3"'],
        "podman": ["--device=nvidia.com/gpu=GPU-7", "--device=nvidia.com/gpu=3"],
    }
    assert gpus == expected[engine]


@pytest.mark.parametrize("engine", ["docker", "podman"])
def test_line_has_no_gpu_flag_for_a_job_without_gpus(engine: str) -> None:
    job = ContainerJob("name", ("true",), IMAGE, Path("/scratch"))
    assert not [word for word in make_runner(engine).command_line(job) if "gpu" in word]


@pytest.mark.parametrize("engine", ["docker", "podman"])
def test_line_names_files_for_secrets_and_never_their_value(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "a-secret-of-no-known-shape")
    job = ContainerJob("name", ("true",), IMAGE, Path("/scratch"), secrets=(Secret("HF_TOKEN", "HF_TOKEN_PATH"),))
    argv = make_runner(engine).command_line(job)
    mount = "--mount=type=bind,source=/scratch/secrets/HF_TOKEN,target=/run/secrets/HF_TOKEN,readonly"
    assert mount in argv
    assert "--env=HF_TOKEN_PATH=/run/secrets/HF_TOKEN" in argv
    assert "no-known-shape" not in " ".join(argv)


def test_mounts_quote_commas_and_quotes_as_csv() -> None:
    job = ContainerJob("name", ("true",), IMAGE, Path("/s"), (Bind(Path('/a,b "c"'), "/in/model"),))
    assert '--mount=type=bind,"source=/a,b ""c""",target=/in/model,readonly' in make_runner("docker").command_line(job)


def test_host_paths_take_the_longest_match_and_whole_names() -> None:
    options = Options(host_paths=(("/builds", "/srv/ci"), ("/builds/team", "/data/team")))
    assert options.on_host(Path("/builds/x/y")) == "/srv/ci/x/y"
    assert options.on_host(Path("/builds/team/x")) == "/data/team/x"
    assert options.on_host(Path("/builds/teams/x")) == "/srv/ci/teams/x"
    assert options.on_host(Path("/buildsite")) == "/buildsite"


def test_home_inside_a_writable_bind_needs_no_mount_of_its_own() -> None:
    job = ContainerJob(
        "n", ("true",), IMAGE, Path("/s"), (Bind(Path("/o"), "/out", writable=True),), env={"HOME": "/out/home"}
    )
    assert job.home is None
    assert [bind.target for bind in job.all_binds] == ["/out"]


def test_pyxis_line() -> None:
    options = Options(extra=("--partition=gpu",))
    assert shlex.join(PyxisRunner(options).command_line(JOB)) == (
        "srun --job-name=build-1a2b --nodes=1 --ntasks=1 --input=none --unbuffered --kill-on-bad-exit=1 "
        "--export=PATH,HOME,USER,LANG --time=61 --gpus-per-node=2 "
        "'--container-image=nvcr.io#nvidia/tensorrt-llm/release:1.2.1' "
        "--container-mounts=/store/a:/in/checkpoint:ro,/store/b:/out,/store/work/1/home:/tmp/home "
        "--container-workdir=/tmp --container-readonly --no-container-mount-home --no-container-remap-root "
        "--partition=gpu env HOME=/tmp/home HF_HOME=/tmp/home/hf "
        "trtllm-build --checkpoint_dir /in/checkpoint --output_dir /out --note 'see /out'"
    )


@pytest.mark.parametrize(
    ("reference", "written"),
    [
        ("ubuntu:24.04", "ubuntu:24.04"),
        ("nvidia/cuda:13", "nvidia/cuda:13"),
        ("localhost:5000/a/b", "localhost:5000#a/b"),
        # enroot takes a digest or a tag.
        (f"nvcr.io/nvidia/x:1@sha256:{'0' * 64}", f"nvcr.io#nvidia/x@sha256:{'0' * 64}"),
        ("/images/x.sqsh", "/images/x.sqsh"),
    ],
)
def test_pyxis_writes_images_the_way_of_enroot(reference: str, written: str) -> None:
    job = ContainerJob("n", ("true",), reference, Path("/s"))
    assert f"--container-image={written}" in PyxisRunner().command_line(job)


def test_local_line_has_host_paths_where_arguments_are_container_paths() -> None:
    assert shlex.join(LocalRunner(Options(devices=("3",))).command_line(JOB)) == (
        "env HOME=/store/work/1/home HF_HOME=/store/work/1/home/hf CUDA_VISIBLE_DEVICES=3 "
        "trtllm-build --checkpoint_dir /store/a --output_dir /store/b --note 'see /out'"
    )


def test_local_line_takes_the_deepest_bind_and_whole_names() -> None:
    binds = (Bind(Path("/a"), "/in"), Bind(Path("/b"), "/in/model"))
    job = ContainerJob("n", ("cp", "/in/model/x", "/in/models", "/input", "--f=/in/model"), IMAGE, Path("/s"), binds)
    assert LocalRunner().command_line(job)[1:] == ["cp", "/b/x", "/a/models", "/input", "--f=/in/model"]


def test_image_repository_has_neither_tag_nor_digest() -> None:
    from pipeline.runners.job import Image

    image = Image("host:5000/a/b:1@sha256:0", "sha256:1", ("sha256:2", "sha256:3"))
    assert image.pinned == "host:5000/a/b@sha256:2"
    assert Image("host:5000/a/b", "sha256:1").pinned == "sha256:1"
    assert Image("a").pinned == "a"


def test_make_runner_knows_all_and_suggests() -> None:
    assert [make_runner(name).name for name in RUNNERS] == list(RUNNERS)
    with pytest.raises(ConfigError, match=r"runner.kind='podmann' is not known") as caught:
        make_runner("podmann")
    assert caught.value.hint == "did you mean podman?"


@pytest.mark.parametrize(
    ("value", "devices"),
    [(None, ()), ("", ()), ("2", ("2",)), ("0, 3", ("0", "3")), ("MIG-1,MIG-2", ("MIG-1", "MIG-2"))],
)
def test_visible_devices_come_from_the_scheduler(value: str | None, devices: tuple[str, ...]) -> None:
    assert visible_devices({} if value is None else {"CUDA_VISIBLE_DEVICES": value}) == devices


def test_resolve_of_a_squashfs_file_wants_the_file(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match="no image file"):
        PyxisRunner().resolve(str(tmp_path / "x.sqsh"))
    (tmp_path / "x.sqsh").touch()
    assert PyxisRunner().resolve(str(tmp_path / "x.sqsh")).pinned == str(tmp_path / "x.sqsh")
