"""What ``serve`` finds out before it starts anything."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

import pipeline.triton.install
from pipeline.cli.main import main


@pytest.fixture
def emitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as ``run`` leaves it, as far as these checks look."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "dist" / "job"
    folder.mkdir(parents=True)
    (folder / "model.bin").write_bytes(b"weights")
    (folder / "model_repository").mkdir()
    files = {"model.bin": hashlib.sha256(b"weights").hexdigest()}
    document = {"target": "reference", "gate": {"verdict": "passed"}, "files": files}
    (folder / "manifest.json").write_text(json.dumps(document), encoding="utf-8")

    def refuse() -> None:
        raise AssertionError("a server would have been started")

    monkeypatch.setattr(pipeline.triton.install, "ensure_tritonserver", refuse)
    return folder


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["serve", "name=job", "target=reference", *arguments]) == 3
    return capsys.readouterr().err


PORTS = ("frontend.port", "triton.http_port", "triton.grpc_port", "triton.metrics_port")


@pytest.mark.parametrize("setting", PORTS)
def test_serve_names_the_setting_whose_port_is_taken(
    emitted: Path, capsys: pytest.CaptureFixture[str], taken: int, setting: str
) -> None:
    with contextlib.ExitStack() as stack:
        free = [stack.enter_context(socket.socket()) for _ in PORTS]
        for probe in free:
            probe.bind(("127.0.0.1", 0))
        others = [f"{name}={probe.getsockname()[1]}" for name, probe in zip(PORTS, free, strict=True)]
    assert f"{setting}={taken} is in use on 127.0.0.1" in refusal(capsys, *others, f"{setting}={taken}")


@pytest.mark.parametrize("host", ["999.1.1.1", "no such host", "192.0.2.1"])  # the last: RFC 5737, nobody has it
def test_serve_tells_a_wrong_host_from_a_taken_port(
    emitted: Path, capsys: pytest.CaptureFixture[str], host: str
) -> None:
    said = refusal(capsys, f"frontend.host={host}")
    assert f"frontend.host={host} is no address of this machine" in said
    assert "in use" not in said


@pytest.mark.parametrize("change", ["missing", "shorter", "changed", "added", "broken manifest", "list manifest"])
def test_serve_refuses_what_was_not_judged(emitted: Path, capsys: pytest.CaptureFixture[str], change: str) -> None:
    if change == "missing":
        (emitted / "model.bin").unlink()
    elif change == "added":
        (emitted / "model_repository" / "__pycache__").mkdir()
        (emitted / "model_repository" / "__pycache__" / "x.pyc").touch()
        (emitted / "model_repository" / "model.bin").touch()
    elif "manifest" in change:
        (emitted / "manifest.json").write_text("{" if change.startswith("broken") else "[]")
    else:
        (emitted / "model.bin").write_bytes(b"weight" if change == "shorter" else b"weightS")
    said = refusal(capsys)
    assert ("manifest.json" if "manifest" in change else "model.bin") in said
    assert "__pycache__" not in said
