"""Real container engines and a stand-in image, shared by all tests here.

Both engines are used as they come where an ordinary user runs the tests. Root (a CI machine) gets engines of its own,
in a temporary folder, that need neither systemd nor a bridge nor raised limits.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from container_case import IMAGE, NEWER_IMAGE, Case, make_case_for

ROOT = Path(__file__).parents[2]
_PACKAGES = {"podman": "podman runc catatonit", "docker": "docker.io"}


@pytest.fixture(scope="session")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Podman with the stand-in image."""
    _need("podman", "podman", "runc", "catatonit", "conmon")
    folder = tmp_path_factory.mktemp("podman")
    with pytest.MonkeyPatch.context() as patch:
        if os.geteuid() == 0:
            _configure_podman(folder, patch)
        _build("podman", IMAGE, "1.2.1")
        yield "podman"
        subprocess.run(["podman", "rm", "--all", "--force", "--time=0"], capture_output=True, check=False)
        subprocess.run(["umount", folder / "store" / "overlay"], capture_output=True, check=False)
        if os.geteuid() == 0:
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def newer_image(podman: str) -> str:
    """An image of a release that has lost the engine builder, in Podman."""
    _build(podman, NEWER_IMAGE, "1.4.0")
    return NEWER_IMAGE


@pytest.fixture
def cdi(podman: str) -> Iterator[None]:
    """A description of GPUs as NVIDIA's toolkit writes it for Podman: the real flags, without a GPU."""
    file = Path("/var/run/cdi/standin-nvidia.yaml")
    if os.geteuid() != 0 or Path("/etc/cdi/nvidia.yaml").exists():
        pytest.skip("needs root and a machine without NVIDIA's own CDI file")
    file.parent.mkdir(exist_ok=True)
    names = ("0", "1", "all")
    devices = [{"name": name, "containerEdits": {"env": [f"NVIDIA_VISIBLE_DEVICES={name}"]}} for name in names]
    # JSON is YAML.
    file.write_text(json.dumps({"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": devices}))
    yield
    file.unlink()


@pytest.fixture(scope="session")
def docker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Docker daemon with the stand-in image."""
    _need("docker", "docker")
    if os.geteuid() != 0:
        if subprocess.run(["docker", "version"], capture_output=True, check=False).returncode != 0:
            _missing("docker", "no Docker daemon answers")
        _build("docker", IMAGE, "1.2.1")
        yield "docker"
        return
    _need("docker", "dockerd", "containerd", "runc")
    folder = tmp_path_factory.mktemp("docker")
    # A socket's path must be short.
    run = Path(f"/run/standin-docker-{os.getpid()}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOCKER_HOST", f"unix://{run}/d.sock")
        # Podman looks at this file as well and wants it to exist.
        (folder / "config").mkdir()
        (folder / "config" / "config.json").write_text("{}")
        patch.setenv("DOCKER_CONFIG", str(folder / "config"))
        daemon = _start_dockerd(folder, run)
        try:
            _build("docker", IMAGE, "1.2.1")
            yield "docker"
        finally:
            daemon.terminate()
            daemon.wait(30)
            subprocess.run(["umount", run / "exec" / "netns" / "default"], capture_output=True, check=False)
            shutil.rmtree(run, ignore_errors=True)
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def slurm(podman: str) -> Iterator[None]:
    """Programs that stand in for Slurm with pyxis; containers are Podman's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(Path(__file__).parent / "slurm"), prepend=os.pathsep)
        patch.delenv("SLURM_JOB_ID", raising=False)
        yield


@pytest.fixture(params=["podman", "docker", "pyxis", "local"])
def case(request: pytest.FixtureRequest) -> Case:
    """Each runner in turn."""
    return make_case_for(request, request.param)


@pytest.fixture(params=["podman", "docker"])
def engine(request: pytest.FixtureRequest) -> Case:
    """Each container engine in turn."""
    return make_case_for(request, request.param)


@pytest.fixture(params=["podman", "docker", "pyxis"])
def isolating(request: pytest.FixtureRequest) -> Case:
    """Each runner that makes containers in turn."""
    return make_case_for(request, request.param)


def _need(engine: str, *programs: str) -> None:
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        _missing(engine, f"{', '.join(missing)} not found: apt-get install {_PACKAGES[engine]}")


def _missing(engine: str, why: str) -> NoReturn:
    message = f"needs {engine}: {why}"
    if os.environ.get("REQUIRE_SERVICES") == "1":
        pytest.fail(message)
    pytest.skip(message)


def _build(engine: str, image: str, release: str) -> None:
    script = ROOT / "docker" / "standin" / "build.sh"
    done = subprocess.run([script, engine, image, release], capture_output=True, text=True, check=False)
    if done.returncode == 75:
        _missing(engine, done.stderr.strip())
    assert done.returncode == 0, done.stderr


def _configure_podman(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Ask for nothing that needs systemd or raised limits: Podman's own limits are above those of a plain container."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    tasks = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    most_tasks = int(Path("/proc/sys/kernel/pid_max").read_text())
    files = 1048576 if files == resource.RLIM_INFINITY else min(files, 1048576)
    tasks = most_tasks if tasks == resource.RLIM_INFINITY else min(tasks, most_tasks)
    limits = json.dumps([f"nofile={files}:{files}", f"nproc={tasks}:{tasks}"])
    settings = f'[containers]\ndefault_ulimits = {limits}\n[engine]\ncgroup_manager = "cgroupfs"\n'
    settings += 'events_logger = "file"\nruntime = "runc"\n'
    (folder / "containers.conf").write_text(settings)
    store = f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/store"\nrunroot = "{folder}/run"\n'
    (folder / "storage.conf").write_text(store)
    patch.setenv("CONTAINERS_CONF", str(folder / "containers.conf"))
    patch.setenv("CONTAINERS_STORAGE_CONF", str(folder / "storage.conf"))


def _start_dockerd(folder: Path, run: Path) -> subprocess.Popen[bytes]:
    run.mkdir()
    hook = folder / "hook" / "nvidia-container-runtime-hook"
    hook.parent.mkdir()
    # With this on its PATH the daemon takes --gpus and sets NVIDIA_VISIBLE_DEVICES, as with the real one.
    hook.write_text("#!/bin/sh\ncat > /dev/null\n")
    hook.chmod(0o755)
    argv = ["dockerd", f"--data-root={folder}/data", f"--exec-root={run}/exec", f"--pidfile={run}/pid"]
    argv += [f"--host=unix://{run}/d.sock", "--iptables=false", "--ip6tables=false", "--bridge=none"]
    environment = {**os.environ, "PATH": f"{hook.parent}:{os.environ['PATH']}"}
    with (folder / "log").open("wb") as log:
        daemon = subprocess.Popen(argv, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    deadline = time.monotonic() + 60
    while subprocess.run(["docker", "version"], capture_output=True, check=False).returncode != 0:
        if daemon.poll() is not None or time.monotonic() > deadline:
            daemon.kill()
            daemon.wait()
            pytest.fail("dockerd did not start:\n" + "\n".join((folder / "log").read_text().splitlines()[-20:]))
        time.sleep(0.05)
    return daemon
