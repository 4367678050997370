"""One small process beside ours that ends the programs we started when we die, however we die.

It sees our death as the end of a pipe.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading

from pipeline.runners import tree


class _Watchdog:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._tags: set[str] = set()

    def add(self, tag: str) -> None:
        with self._lock:
            self._tags.add(tag)
            if self._process is not None and self._process.poll() is None:
                self._tell(f"+ {tag}\n")
            else:
                self._process = _start()
                self._tell("".join(f"+ {known}\n" for known in self._tags))

    def discard(self, tag: str) -> None:
        with self._lock:
            self._tags.discard(tag)
            self._tell(f"- {tag}\n")

    def close(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.communicate()

    def forget(self) -> None:
        """Drop the pipe in a forked child, or our death would not be seen while the child lives."""
        process, self._process = self._process, None
        self._lock = threading.Lock()
        self._tags = set()
        if process is not None and process.stdin is not None:
            os.close(process.stdin.detach().detach().detach())  # type: ignore[attr-defined]
            process.returncode = 0  # ours to reap, not the child's

    def _tell(self, lines: str) -> None:
        if self._process is None or self._process.stdin is None:
            return
        try:
            self._process.stdin.write(lines)
            self._process.stdin.flush()
        except BrokenPipeError:  # somebody killed it; the next program brings a new one
            self._process.kill()
            self._process.wait()
            self._process = None


def _start() -> subprocess.Popen[str] | None:
    if not sys.executable:  # embedded interpreters: nothing to start it with
        return None
    return subprocess.Popen(
        [sys.executable, "-I", "-S", tree.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        encoding="ascii",
    )


_watchdog = _Watchdog()
add = _watchdog.add
discard = _watchdog.discard
os.register_at_fork(after_in_child=_watchdog.forget)
atexit.register(_watchdog.close)
