"""Run one job's program: deadline, cancel, and an orderly stop that reaches what runs inside a container."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.runners.child import GRACE_S, Child
from pipeline.runners.exits import ENGINE_ERROR, explain
from pipeline.runners.job import Cancel, Cancelled, ContainerJob, OnLine
from pipeline.runners.process import TAIL_LINES, Completed, ProcessFailed

Ending = Literal["ended", "timed out", "cancelled"]

# How soon a cancel is noticed.
_CANCEL_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Supervision:
    """How a program is watched.

    Attributes:
        env: Complete environment; None passes ours on.
        cwd: Directory it starts in.
        stop: Ends what really runs when the program started here is a client only. Called on time-out, cancel, ctrl-C,
            and a log that is full; None: the program started here is all there is.
        engine: Whose exit codes 125 and 126 are; empty: the program's own.
        place: Where programs are looked for, for messages.
        grace_s: Seconds that ``stop`` is given to show effect.
    """

    place: str
    stop: Callable[[], None] | None = None
    env: Mapping[str, str] | None = None
    cwd: Path | None = None
    engine: str = ""
    grace_s: float = GRACE_S


def supervise(
    argv: Sequence[str],
    job: ContainerJob,
    how: Supervision,
    *,
    log_path: Path | None,
    on_line: OnLine | None,
    cancel: Cancel | None,
) -> Completed:
    """Run ``argv`` for ``job`` to its end.

    Raises:
        ProcessFailed: It ended badly, or took longer than the job allows.
        Cancelled: ``cancel`` was set.
        ToolError: It cannot be started.
    """
    started = time.monotonic()
    ending: Ending = "cancelled"
    with Child(argv, cwd=how.cwd, env=how.env, log_path=log_path, on_line=on_line, tail_lines=TAIL_LINES) as child:
        try:
            ending = _wait(child, job.timeout_s, cancel)
        finally:
            if how.stop and child.poll() is None:
                how.stop()
                child.wait(how.grace_s)
        child.end(GRACE_S)
        child.raise_pump_failure()
    done = Completed(child.returncode, child.tail(TAIL_LINES), time.monotonic() - started)
    if ending == "cancelled":
        raise Cancelled(f"{_program(job)} was stopped on request{_where(log_path)}")
    if ending == "timed out":
        what, hint = f"did not end within {job.timeout_s:g} s and was stopped", ""
        raise _failed(job, done, what, hint, log_path, timed_out=True)
    if done.returncode != 0:
        what, hint = explain(done.returncode, done.tail, place=how.place, engine=how.engine)
        raise _failed(job, done, what, hint, log_path)
    return done


def ended_by_itself(error: BaseException) -> bool:
    """Say whether the program's own end is what went wrong; then its container is gone too."""
    return isinstance(error, ProcessFailed) and not error.timed_out and 0 < error.returncode != ENGINE_ERROR


def _wait(child: Child, timeout_s: float | None, cancel: Cancel | None) -> Ending:
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        if cancel is not None and cancel.is_set():
            return "cancelled"
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            return "timed out"
        pause = left if cancel is None else min(_CANCEL_POLL_S, left if left is not None else _CANCEL_POLL_S)
        if child.wait(pause):
            return "ended"


def _failed(
    job: ContainerJob, done: Completed, what: str, hint: str, log_path: Path | None, *, timed_out: bool = False
) -> ProcessFailed:
    message = f"{_program(job)} {what}{_where(log_path)}"
    if done.tail:
        message += "\n" + "\n".join(f"  | {line}" for line in done.tail)
    return ProcessFailed(
        message, program=_program(job), returncode=done.returncode, tail=done.tail, hint=hint, timed_out=timed_out
    )


def _program(job: ContainerJob) -> str:
    """Return the word that says what runs: the script rather than its interpreter."""
    first = Path(job.argv[0]).name
    if first.startswith("python") and len(job.argv) > 1 and not job.argv[1].startswith("-"):
        return Path(job.argv[1]).name
    return first


def _where(log_path: Path | None) -> str:
    return f" (log: {log_path})" if log_path else ""
