"""What the tests of all runners share: one runner with its image, and jobs for it."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipeline.runners.create import make_runner
from pipeline.runners.job import Bind, Caller, ContainerJob, Options, Runner

IMAGE = "localhost/trtllm-standin:1.2.1"
NEWER_IMAGE = "localhost/trtllm-standin:1.4.0"

# An ordinary user that exists nowhere, as on a CI machine.
SOMEBODY = Caller(12345, 12346)


_runners: dict[str, Runner] = {}


@dataclass(frozen=True)
class Case:
    """One runner under test.

    Attributes:
        name: Runner.
        image: Image that its jobs name.
        options: Options that work on this machine.
        isolates: It makes containers: mounts are read-only and there is no network.
        engine: Engine that holds the containers; empty when there are none.
    """

    name: str
    image: str
    options: Options
    isolates: bool
    engine: str

    def runner(self, **changes: Any) -> Runner:
        """Return the runner, or make one with some options changed."""
        # One for many tests: every new one looks for orphans first, which takes its time.
        return self.new_runner(**changes) if changes else _runners.setdefault(self.name, self.new_runner())

    def new_runner(self, **changes: Any) -> Runner:
        """Make a runner that has not run anything yet."""
        return make_runner(self.name, dataclasses.replace(self.options, **changes), store="test-store")

    def containers(self) -> list[str]:
        """Return the names of all containers, running or not."""
        if not self.engine:
            return []
        argv = [self.engine, "ps", "--all", "--format", "{{.Names}}"]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()

    def job(self, folder: Path, *argv: str, **changes: Any) -> ContainerJob:
        """Make a job that reads ``folder``/in as /in/model and writes ``folder``/out as /out."""
        inputs, out = folder / "in", folder / "out"
        inputs.mkdir(parents=True, exist_ok=True)
        out.mkdir(exist_ok=True)
        give(out, self.options.caller)
        job = ContainerJob(
            name="job",
            argv=argv,
            image=self.image,
            scratch=folder / "scratch",
            binds=(Bind(inputs, "/in/model"), Bind(out, "/out", writable=True)),
            env={"HOME": "/tmp/home", "PYTHONUNBUFFERED": "1"},
            timeout_s=60,
        )
        return dataclasses.replace(job, **changes)


LOCAL = Case("local", "local", Options(), isolates=False, engine="")


def make_case_for(request: pytest.FixtureRequest, name: str) -> Case:
    """Start what a runner needs and describe it."""
    if name == "local":
        return LOCAL
    request.getfixturevalue("slurm" if name == "pyxis" else name)
    if name == "pyxis":
        return Case(name, IMAGE, Options(), isolates=True, engine="podman")
    caller = SOMEBODY if os.geteuid() == 0 else Caller.current()
    # NVIDIA's limits need rights that a test machine may not give; their command line is pinned by unit tests.
    return Case(name, IMAGE, Options(ulimits=(), caller=caller, pull="never"), isolates=True, engine=name)


class Setting(threading.Thread):
    """Sets an event as soon as a condition holds."""

    def __init__(self, condition: Callable[[], bool]) -> None:
        super().__init__(daemon=True)
        self.event = threading.Event()
        self._condition = condition
        self.start()

    def run(self) -> None:
        """Wait for the condition."""
        until(self._condition)
        self.event.set()


def give(path: Path, caller: Caller) -> None:
    """Make ``path`` the caller's."""
    if os.geteuid() == 0:
        os.chown(path, caller.uid, caller.gid)


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition did not come true"
        time.sleep(0.02)
