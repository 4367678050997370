"""Run the command line as a user does: another process, its exit code, what it printed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

TINY_MODEL = Path(__file__).parents[1] / "data" / "models" / "tiny-llama"


@dataclass(frozen=True, slots=True)
class Ended:
    """A finished command."""

    code: int
    stdout: str
    stderr: str

    @property
    def document(self) -> dict[str, Any]:
        """The JSON document of ``--json``."""
        found: dict[str, Any] = json.loads(self.stdout)
        return found


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a command: ours without tokens, hub off, one BLAS thread."""
    env = {name: value for name, value in os.environ.items() if not name.endswith(("_TOKEN", "_KEY"))}
    return {**env, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", **(extra or {})}


def start(
    *arguments: str,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    stdout: int | IO[str] = subprocess.PIPE,
    stderr: int | IO[str] = subprocess.PIPE,
) -> subprocess.Popen[str]:
    """Start ``python -m pipeline`` with these arguments."""
    return subprocess.Popen(
        [sys.executable, "-m", "pipeline", *arguments],
        cwd=cwd,
        env=environment(env),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        text=True,
    )


def pipeline(*arguments: str, cwd: Path, env: Mapping[str, str] | None = None, timeout: float = 240) -> Ended:
    """Run a command to its end."""
    process = start(*arguments, cwd=cwd, env=env)
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return Ended(process.returncode, stdout, stderr)


def tiny_job(*more: str, model: Path = TINY_MODEL) -> list[str]:
    """Return the overrides of a job that takes seconds: a tiny local model in fp16 for the reference target."""
    return [
        "target=reference",
        "model=hf",
        "source=local",
        f"model.path={model}",
        "precision=fp16",
        "name=tiny",
        "runner.threads=1",
        *more,
    ]
