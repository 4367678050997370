"""Advisory file locks that the kernel drops when their holder dies, whatever way it dies."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


class Locked(Exception):
    """Somebody else holds the lock."""


@contextmanager
def hold(
    path: Path, *, shared: bool = False, wait: bool = True, on_wait: Callable[[], None] | None = None
) -> Iterator[None]:
    """Hold the lock on ``path`` while the block runs.

    Args:
        path: Lock file; made if missing, left behind (a removed lock file would be two locks for one name).
        shared: Others may hold it as well, if shared too.
        wait: Wait for it; otherwise give up at once.
        on_wait: Called once before waiting.

    Raises:
        Locked: Not ``wait``, and it is held by somebody else.
        OSError: The file cannot be made or the file system has no locks.
    """
    fd = acquire(path, shared=shared, wait=wait, on_wait=on_wait)
    try:
        yield
    finally:
        os.close(fd)


def acquire(path: Path, *, shared: bool = False, wait: bool = True, on_wait: Callable[[], None] | None = None) -> int:
    """Like :func:`hold`, but return the descriptor that holds the lock until it is closed."""
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            try:
                fcntl.flock(fd, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                if not wait:
                    raise Locked(path) from None
                if on_wait:
                    on_wait()
                fcntl.flock(fd, kind)
            # The sweeper removes lock files of dead stagings: a lock on a removed file protects nothing.
            if _is_current(fd, path):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _is_current(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False
