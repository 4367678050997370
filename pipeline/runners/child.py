"""One started program: its session, its descendants and the thread that takes its output."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from pipeline.errors import StoreError, ToolError
from pipeline.logs import has_secret, redact
from pipeline.runners import tree, watchdog

GRACE_S = 10.0

# How long output may keep coming from left-over children after the program itself has ended.
_DRAIN_S = 2.0
_MAX_LINE_CHARS = 1 << 20


class Child:
    """A started program, its descendants, and the thread that takes its output."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        cwd: Path | str | None,
        env: Mapping[str, str] | None,
        log_path: Path | None,
        on_line: Callable[[str], None] | None,
        tail_lines: int,
    ) -> None:
        self._log = _open_log(log_path)
        self._log_path = log_path
        self._on_line = on_line
        self._tail: deque[str] = deque(maxlen=tail_lines)
        self._failure: BaseException | None = None
        self._tag = uuid.uuid4().hex
        # Known to the watchdog before the program exists: there is no moment in which it could outlive us.
        watchdog.add(self._tag)
        try:
            self._process = _popen(
                argv, cwd, {**(os.environ if env is None else env), **tree.tag_environment(self._tag)}
            )
        except BaseException as error:
            if isinstance(error, Exception):  # it was never there
                watchdog.discard(self._tag)
            else:  # ctrl-C in the middle: it may be there; should this come too early, the watchdog ends it with us
                tree.end_tree(self._tag, None, _DRAIN_S)
            self._close_log()
            raise
        self._pump = threading.Thread(target=self._pump_output, name=f"output-{self.pid}", daemon=True)
        self._pump.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int:
        return int(self._process.returncode)

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self, timeout: float | None) -> bool:
        """Wait for the program itself; False on time-out. Returns early when its output cannot be taken."""
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = 0.01
        while self._failure is None and self._process.poll() is None:
            left = pause if deadline is None else min(pause, deadline - time.monotonic())
            if left <= 0:
                return False
            # The end of the output is nearly always the end of the program; a wait on it wakes up at once.
            if self._pump.is_alive():
                self._pump.join(left)
            else:
                time.sleep(left)
            pause = min(pause * 2, 0.2)
        return True

    def tail(self, lines: int) -> tuple[str, ...]:
        return tuple(self._tail)[-lines:]

    def end(self, grace_s: float) -> None:
        """End whatever is left of the tree and close the log."""
        if self._process.poll() is None:
            tree.signal_tree(self._tag, signal.SIGTERM, self.pid)
            try:
                self._process.wait(grace_s)
            except subprocess.TimeoutExpired:
                tree.signal_tree(self._tag, signal.SIGKILL, self.pid)
                self._process.wait()
        else:
            # A child that is about to end by itself may still be writing its last lines.
            self._pump.join(_DRAIN_S)
        tree.end_tree(self._tag, None, min(grace_s, _DRAIN_S))
        watchdog.discard(self._tag)
        self._pump.join(_DRAIN_S)

    def raise_pump_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _pump_output(self) -> None:
        # The pipe is read to its end whatever happens: a full pipe would block the program for good.
        stream = self._process.stdout
        if stream is None:  # pragma: no cover - always a pipe
            return
        for line in _lines(stream):
            if self._failure is None:
                try:
                    self._take(redact(line))
                except BaseException as error:  # given to the waiting thread
                    self._failure = error
        stream.close()
        self._close_log()

    def _close_log(self) -> None:
        if self._log:
            # What a full disk did not take was reported when it was written.
            with contextlib.suppress(OSError):
                self._log.close()

    def _take(self, line: str) -> None:
        self._tail.append(line)
        if self._log:
            try:
                self._log.write(line + "\n")
            except OSError as error:
                raise StoreError(f"cannot write the log {self._log_path}: {error.strerror}") from error
        if self._on_line:
            self._on_line(line)

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.end(GRACE_S)


def _popen(argv: Sequence[str], cwd: Path | str | None, env: Mapping[str, str]) -> subprocess.Popen[str]:
    for number, argument in enumerate(argv):
        if has_secret(argument):
            raise ToolError(
                f"argument {number} of {argv[0]} holds a secret; every user of the machine could read it",
                hint="Pass secrets by environment name or file.",
            )
    if cwd is not None and not Path(cwd).is_dir():
        raise ToolError(f"cannot start {argv[0]}: working directory {cwd} does not exist")
    try:
        return subprocess.Popen(
            list(argv),
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            encoding="utf-8",
            errors="replace",
        )
    except FileNotFoundError as error:
        path = env.get("PATH", os.defpath)
        if Path(argv[0]).is_file() or shutil.which(argv[0], path=path):
            # The file is there, so it is its interpreter or loader that is not.
            raise ToolError(
                f"cannot start {argv[0]}: its interpreter is missing", hint="Look at its first line."
            ) from error
        where = "no such file" if os.sep in argv[0] else f"not found in PATH={path}"
        raise ToolError(
            f"program {argv[0]}: {where}", hint=f"Install {Path(argv[0]).name} or put it on PATH."
        ) from error
    except OSError as error:
        raise ToolError(f"cannot start {argv[0]}: {error.strerror}", hint="Is it an executable file?") from error


def _open_log(path: Path | None) -> IO[str] | None:
    if path is None:
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a", encoding="utf-8", buffering=1)
    except OSError as error:
        raise StoreError(f"cannot write the log {path}: {error.strerror}") from error


def _lines(stream: IO[str]) -> Iterator[str]:
    """Yield lines without their ends; a carriage return ends a line too (progress bars).

    A line that never ends is cut at white space, so that no secret is cut in two.
    """
    pending = ""
    while chunk := stream.readline(_MAX_LINE_CHARS):
        pending += chunk
        if chunk.endswith("\n"):
            yield pending[:-1]
            pending = ""
        elif len(pending) >= _MAX_LINE_CHARS:
            cut = pending.rfind(" ") + 1 or len(pending)
            yield pending[:cut]
            pending = pending[cut:]
    if pending:
        yield pending
