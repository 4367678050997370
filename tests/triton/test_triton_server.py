"""Starting, watching and stopping a real tritonserver."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import venv
from pathlib import Path

import pytest
from triton_client import Client
from triton_models import Model, emit

from pipeline.errors import ToolError
from pipeline.triton.install import TritonInstall
from pipeline.triton.server import TritonServer, free_port

pytestmark = pytest.mark.triton


@pytest.fixture
def repository(tmp_path: Path, tiny_model: Model) -> Path:
    return emit(tmp_path / "repository", tiny_model)


def isolated_python(folder: Path) -> Path:
    """Make an environment that has this one's packages but in which `pipeline` cannot be imported."""
    venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)
    trap = folder / "trap" / "pipeline"
    trap.mkdir(parents=True)
    (trap / "__init__.py").write_text("raise ImportError('a Triton model imported pipeline')\n")
    (site,) = folder.glob("lib/python*/site-packages")
    packages = [path for path in sys.path if path.endswith("site-packages")]
    (site / "packages.pth").write_text("\n".join([str(trap.parent), *packages]) + "\n")
    return folder / "bin" / "python3"


def test_moved_repository_serves_where_pipeline_is_not_importable(
    tmp_path: Path, tiny_model: Model, triton_install: TritonInstall
) -> None:
    folder = emit(tmp_path / "work" / "repository", tiny_model)
    moved = tmp_path / "elsewhere" / "models"
    moved.parent.mkdir()
    folder.rename(moved)
    shutil.rmtree(tmp_path / "work")
    python = isolated_python(tmp_path / "env")
    with TritonServer(moved, triton_install, python=python, log_path=tmp_path / "log.txt") as server:
        server.wait_ready(120)
        client = Client(server.grpc_url)
        answer = client.ask("ensemble", {"text_input": ["the"], "max_tokens": [4]})
        client.client.close()
    assert answer.error == ""
    assert answer.responses[0]["num_output_tokens"].tolist() == [[4]]


def test_decoupled_off_answers_once_and_refuses_streams(
    tmp_path: Path, tiny_model: Model, triton_install: TritonInstall
) -> None:
    folder = emit(tmp_path / "repository", tiny_model, decoupled=False)
    inputs = {"input_ids": [5, 6], "input_lengths": [2], "request_output_len": [3]}
    with TritonServer(folder, triton_install) as server:
        server.wait_ready(120)
        client = Client(server.grpc_url)
        assert len(client.ask("tensorrt_llm", inputs).tokens()) == 3
        refused = client.ask("tensorrt_llm", {**inputs, "streaming": [True]})
        client.client.close()
    assert "only supported if model is deployed using decoupled mode" in refused.error


def test_stop_leaves_no_process_and_no_shared_memory(repository: Path, triton_install: TritonInstall) -> None:
    server = TritonServer(repository, triton_install)
    server.start()
    server.wait_ready(120)
    assert list(Path("/dev/shm").glob(f"*{server.shared_memory_prefix}*"))
    assert server.stop() == 0
    assert server.poll() == 0
    assert not list(Path("/dev/shm").glob(f"*{server.shared_memory_prefix}*"))
    assert not processes_with(server.shared_memory_prefix)


def test_killed_server_is_reported_and_leaves_nothing(repository: Path, triton_install: TritonInstall) -> None:
    server = TritonServer(repository, triton_install)
    server.start()
    server.wait_ready(120)
    (pid,) = [pid for pid in processes_with(server.shared_memory_prefix) if is_program(pid, "tritonserver")]
    os.kill(pid, signal.SIGKILL)
    while server.poll() is None:
        pass
    with pytest.raises(ToolError, match="ended with signal SIGKILL"):
        server.check_alive()
    assert not processes_with(server.shared_memory_prefix)
    assert not list(Path("/dev/shm").glob(f"*{server.shared_memory_prefix}*"))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda root: (root / "tensorrt_llm" / "1" / "rank0.safetensors").unlink(), "failed to load 'tensorrt_llm'"),
        (lambda root: shutil.rmtree(root / "preprocessing" / "1"), "at least one version must be available"),
        (lambda root: (root / "ensemble").rename(root / "other"), "other"),
        (lambda root: (root / "ensemble" / "config.pbtxt").write_text("max_batch_size: ${x}"), "ensemble"),
    ],
    ids=["weights", "version-folder", "name", "placeholder"],
)
def test_repository_that_does_not_load_says_why(
    repository: Path, triton_install: TritonInstall, damage: object, reason: str
) -> None:
    damage(repository)  # type: ignore[operator]
    with TritonServer(repository, triton_install) as server, pytest.raises(ToolError, match=reason) as caught:
        server.wait_ready(120)
    assert "tritonserver ended with" in caught.value.message


@pytest.mark.parametrize("endpoint", ["http_port", "grpc_port", "metrics_port"])
def test_port_in_use_is_named_before_the_start(repository: Path, triton_install: TritonInstall, endpoint: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = TritonServer(repository, triton_install, **{endpoint: port})
        with pytest.raises(ToolError, match=f"port {port} ") as caught:
            server.start()
    assert "choose another port" in caught.value.hint
    assert server.poll is not None


def test_port_taken_after_the_check_is_named_from_the_log(
    repository: Path, triton_install: TritonInstall, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.triton.server.port_is_free", lambda port: True)
    port = free_port()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with (
            TritonServer(repository, triton_install, http_port=port) as server,
            pytest.raises(ToolError, match=f"port {port} "),
        ):
            server.wait_ready(120)


def processes_with(text: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:  # it ended meanwhile
            continue
    return found


def is_program(pid: int, name: str) -> bool:
    return Path(f"/proc/{pid}/exe").resolve().name == name
