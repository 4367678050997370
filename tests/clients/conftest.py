"""A served tiny model, and the environments of the clients that `make test-clients` creates."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.triton.server import free_port

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = ROOT / ".venv-clients"
START_S = 240


@dataclass(frozen=True)
class Served:
    """A running model.

    Attributes:
        url: Of the frontend.
        model: Name that clients use.
        folder: What ``run`` exported.
    """

    url: str
    model: str
    folder: Path


def absent(what: str) -> None:
    """Skip by name, or fail where services are required."""
    if os.environ.get("REQUIRE_SERVICES") == "1":
        pytest.fail(f"{what} is not there (make test-clients creates it)")
    pytest.skip(f"{what} is not there (make test-clients creates it)")


def program(name: str) -> str:
    """Return the path of a client, ``environment/program`` below the environments, or a program of the machine."""
    path = ENVIRONMENTS / name if "/" in name else Path(shutil.which(name) or name)
    if not path.exists():
        absent(name)
    return str(path)


def run(argv: list[str], folder: Path, timeout_s: float = 280, **environment: str) -> str:
    """Run a client in a folder; returns stdout, fails with its last words."""
    done = subprocess.run(
        argv, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The tiny model, made by ``run`` and served by ``serve``."""
    folder = tmp_path_factory.mktemp("served")
    ports = {
        name: free_port() for name in ("frontend.port", "triton.http_port", "triton.grpc_port", "triton.metrics_port")
    }
    overrides = [
        "target=reference",
        "model=hf",
        "source=local",
        f"model.path={ROOT / 'tests' / 'data' / 'models' / 'tiny-llama'}",
        "precision=fp16",
        "name=tiny",
        f"store.root={folder / 'store'}",
        f"output_dir={folder / 'dist'}",
        "frontend.served_model=tiny",
        *(f"{name}={port}" for name, port in ports.items()),
    ]
    log = folder / "serve.log"
    command = [sys.executable, "-m", "pipeline"]
    run([*command, *overrides], ROOT)
    with log.open("wb") as out:
        process = subprocess.Popen([*command, "serve", *overrides], cwd=ROOT, stdout=out, stderr=out)
    url = f"http://127.0.0.1:{ports['frontend.port']}"
    try:
        deadline = time.monotonic() + START_S
        while not _ready(url):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.2)
        yield Served(url, "tiny", folder / "dist")
    finally:
        process.terminate()
        assert process.wait(60) in (0, 143), log.read_text()[-4000:]
    assert "Traceback" not in log.read_text()


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/health/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False
