"""Start programs: argument lists only, the whole tree under control, output through redaction.

Every program gets its own session, so that a ctrl-C in the terminal reaches us alone and we end it in order: TERM, a
while for cleaning up, then KILL, for the whole tree. A watchdog process does the same when we are killed ourselves.
It is used instead of PR_SET_PDEATHSIG because that needs a ``preexec_fn`` (not safe with threads), fires when the
*thread* that started the program ends, and reaches the direct child only.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from pipeline.errors import ToolError
from pipeline.runners.child import GRACE_S, Child

TAIL_LINES = 20

# Kept per daemon for messages; the log file has everything.
_DAEMON_TAIL_LINES = 1000


@dataclass(frozen=True, slots=True)
class Completed:
    """A program that ended.

    Attributes:
        returncode: Exit code; negative is the number of the signal that ended it.
        tail: The last lines it wrote, redacted.
        seconds: Wall time.
    """

    returncode: int
    tail: tuple[str, ...]
    seconds: float


class ProcessFailed(ToolError):
    """A program ended badly. Carries what is needed to turn a known failure into advice."""

    def __init__(
        self,
        message: str,
        *,
        program: str,
        returncode: int,
        tail: tuple[str, ...],
        hint: str = "",
        timed_out: bool = False,
    ) -> None:
        super().__init__(message, hint=hint)
        self.program = program
        self.returncode = returncode
        self.tail = tail
        self.timed_out = timed_out


def run(
    argv: Sequence[str],
    *,
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    log_path: Path | None = None,
    on_line: Callable[[str], None] | None = None,
    check: bool = True,
) -> Completed:
    """Run a program to its end.

    Args:
        argv: Program and arguments; never goes through a shell.
        cwd: Working directory.
        env: The complete environment; None passes ours on.
        timeout_s: The tree is ended after this many seconds.
        log_path: Output (stdout and stderr together) is appended here, redacted.
        on_line: Gets every redacted line without its end; called from another thread.
        check: Raise when the exit code is not 0.

    Raises:
        ToolError: The program is missing, cannot be started, or takes too long; with ``check``, it ended badly.
        StoreError: The log cannot be written.
    """
    started = time.monotonic()
    with Child(argv, cwd=cwd, env=env, log_path=log_path, on_line=on_line, tail_lines=TAIL_LINES) as child:
        timed_out = not child.wait(timeout_s)
        child.end(GRACE_S)
        child.raise_pump_failure()
    done = Completed(child.returncode, child.tail(TAIL_LINES), time.monotonic() - started)
    if timed_out:
        raise _failure(argv[0], done, log_path, f"did not end within {timeout_s:g} s and was stopped", timed_out=True)
    if check and done.returncode != 0:
        raise _failure(argv[0], done, log_path, f"ended with {describe_exit(done.returncode)}")
    return done


class Daemon:
    """A program that runs beside us until stopped; it also ends when we die.

    Args:
        argv: Program and arguments.
        env: The complete environment; None passes ours on.
        cwd: Working directory.
        log_path: Output is appended here, redacted.
        name: For messages.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        log_path: Path | None = None,
        name: str = "",
    ) -> None:
        self.argv = tuple(argv)
        self.name = name or Path(self.argv[0]).name
        self.log_path = log_path
        self._env = env
        self._cwd = cwd
        self._tree: Child | None = None

    @property
    def pid(self) -> int:
        """Process id, which is also its process group.

        Raises:
            ToolError: It was not started.
        """
        return self._started().pid

    def start(self) -> Daemon:
        """Start the program and return at once.

        Raises:
            ToolError: It is running already, is missing, or cannot be started.
        """
        if self._tree is not None and self._tree.poll() is None:
            raise ToolError(f"{self.name} is running already (process {self._tree.pid})", hint="Stop it first.")
        self._tree = Child(
            self.argv, cwd=self._cwd, env=self._env, log_path=self.log_path, on_line=None, tail_lines=_DAEMON_TAIL_LINES
        )
        return self

    def poll(self) -> int | None:
        """Return None while it runs, else its exit code (negative: signal number)."""
        return self._started().poll()

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait up to ``timeout`` seconds for it to end; return its exit code, or None if it still runs."""
        child = self._started()
        return child.returncode if child.wait(timeout) else None

    def tail(self, lines: int = TAIL_LINES) -> tuple[str, ...]:
        """Return the last lines it wrote, redacted (up to 1000); empty before the start."""
        return self._tree.tail(lines) if self._tree else ()

    def stop(self, grace_s: float = GRACE_S) -> int | None:
        """End the whole tree: TERM, then KILL after ``grace_s`` seconds. Harmless when it ended or never ran.

        Returns:
            The exit code, or None if it was never started.
        """
        if self._tree is None:
            return None
        self._tree.end(grace_s)
        return self._tree.returncode

    def failure(self) -> ToolError:
        """Build the error for a program that ended by itself: exit code, log and last lines."""
        code = self.poll()
        done = Completed(0 if code is None else code, self.tail(), 0.0)
        return _failure(self.name, done, self.log_path, f"ended with {describe_exit(done.returncode)}")

    def __enter__(self) -> Daemon:
        return self if self._tree is not None else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _started(self) -> Child:
        if self._tree is None:
            raise ToolError(f"{self.name} was not started", hint="Call start() first.")
        return self._tree


def describe_exit(returncode: int) -> str:
    """Say an exit code in words: ``exit code 2``, ``signal SIGSEGV``."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"signal {signal.Signals(-returncode).name}"
    except ValueError:
        return f"signal {-returncode}"


def _failure(
    program: str, done: Completed, log_path: Path | None, what: str, *, timed_out: bool = False
) -> ProcessFailed:
    message = f"{program} {what}"
    if log_path:
        message += f" (log: {log_path})"
    if done.tail:
        message += "\n" + "\n".join(f"  | {line}" for line in done.tail)
    hint = ""
    if not timed_out and done.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL):
        hint = "It was killed from outside; most often the machine ran out of memory (see `dmesg`)."
    return ProcessFailed(
        message, program=program, returncode=done.returncode, tail=done.tail, hint=hint, timed_out=timed_out
    )
