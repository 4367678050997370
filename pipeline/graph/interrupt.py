"""SIGTERM as an exception, so that ctrl-C and a scheduler's stop clean up in the same way."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived; the process should end with exit code 143."""


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Raise :class:`Terminated` in the main thread on SIGTERM while the block runs.

    Leaves a handler that somebody else installed alone; does nothing outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        raise Terminated

    signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
