"""Threads of the engine: its own few workers, and BLAS held to one thread.

OpenBLAS threads spin while they wait for each other. When anything else runs on the machine, a decode step of many
small products then takes a hundred times as long. The engine's workers split the rows of a product among them and
sleep while they wait, so that a busy neighbour costs its share and no more.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from .errors import EngineError

logger = logging.getLogger(__name__)

ENVIRONMENT_VARIABLE = "REFERENCE_ENGINE_THREADS"
MAX_AUTOMATIC = 16
RECALIBRATE_AFTER_S = 2.0


def hold_blas_to_one_thread() -> None:
    """Set the thread count of every loaded BLAS to one, for the whole process.

    Without threadpoolctl only the environment can do it, and only before numpy is imported; then a warning is logged
    if it was not done.
    """
    try:
        from threadpoolctl import threadpool_limits  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        if os.environ.get("OPENBLAS_NUM_THREADS", os.environ.get("OMP_NUM_THREADS")) != "1":
            logger.warning("threadpoolctl is not installed: set OPENBLAS_NUM_THREADS=1, or decoding may be very slow")
        return
    threadpool_limits(limits=1, user_api="blas")


def requested_threads(threads: int | None) -> int | None:
    """Return the thread count asked for by argument or environment, None for automatic.

    Raises:
        EngineError: The count is not a positive number.
    """
    text = str(threads) if threads is not None else os.environ.get(ENVIRONMENT_VARIABLE, "auto")
    if text in ("", "auto"):
        return None
    if not text.isdecimal() or int(text) < 1:
        raise EngineError(f"thread count {text!r} is neither a positive number nor 'auto' ({ENVIRONMENT_VARIABLE})")
    return int(text)


def available_cpus() -> int:
    """Return how many CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Worker:
    """A sleeping thread that runs one task at a time."""

    def __init__(self, index: int) -> None:
        # NOTE: bare locks, handed from thread to thread; a hand-over with semaphores, which are Python code, costs
        # twice as much, and there are a hundred per token.
        self._go = threading.Lock()
        self._done = threading.Lock()
        self._go.acquire()
        self._done.acquire()
        self._task: Callable[[int], None] | None = None
        self._error: BaseException | None = None
        self._index = index
        threading.Thread(target=self._serve, name=f"reference-engine-{index}", daemon=True).start()

    def start(self, task: Callable[[int], None] | None) -> None:
        """Hand over a task; None ends the thread."""
        self._task = task
        self._go.release()

    def wait(self) -> None:
        """Wait for the task and raise what it raised."""
        self._done.acquire()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _serve(self) -> None:
        while True:
            self._go.acquire()
            if self._task is None:
                return
            try:
                self._task(self._index)
            except BaseException as error:  # raised again by wait(), in the thread that asked
                self._error = error
            self._done.release()


class Workers:
    """Runs the parts of a task side by side; the calling thread is worker 0.

    ``active`` workers of at most ``count`` take part; :meth:`choose` finds the best number by measurement.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.active = count
        self._chosen_at = float("-inf")
        self._others = [_Worker(index) for index in range(1, count)]

    def run(self, task: Callable[[int], None]) -> None:
        """Call ``task(i)`` for i in 0 .. active-1 and return when all have ended."""
        others = self._others[: self.active - 1]
        for worker in others:
            worker.start(task)
        try:
            task(0)
        finally:
            for worker in others:
                worker.wait()

    def choose(self, probe: Callable[[], None]) -> None:
        """Set ``active`` to the count that runs ``probe`` fastest, unless that was found a moment ago.

        Called before every step: the machine may have become busy, or free again. The mean of a few runs decides, not
        the best: a disturbed worker shows in some of them only. More workers must win by a tenth.
        """
        if self.count == 1 or time.monotonic() - self._chosen_at < RECALIBRATE_AFTER_S:
            return
        counts = [1]
        while counts[-1] * 2 < self.count:
            counts.append(counts[-1] * 2)
        counts.append(self.count)
        best, best_s = 1, float("inf")
        for count in dict.fromkeys(counts):
            self.active = count
            probe()
            start = time.perf_counter()
            for _ in range(4):
                probe()
            seconds = time.perf_counter() - start
            if seconds < 0.9 * best_s:
                best, best_s = count, seconds
        self.active = best
        self._chosen_at = time.monotonic()

    def close(self) -> None:
        """End the threads."""
        for worker in self._others:
            worker.start(None)
        self._others = []
        self.active = 1
