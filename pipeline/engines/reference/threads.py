"""Threads of the engine: its own few workers, and BLAS held to one thread.

OpenBLAS threads spin while they wait for each other. When anything else runs on the machine, a decode step of many
small products then takes a hundred times as long. The engine's workers take pieces of a product as they come, and sleep
in between: a busy neighbour costs its share and no more.
"""

from __future__ import annotations

import itertools
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


class _Job:
    """Numbered pieces of one task; whoever is free takes the next."""

    def __init__(self, task: Callable[[int], None], pieces: int) -> None:
        self._task = task
        self._pieces = pieces
        # next() of a count is atomic: no piece is taken, and no last piece found, twice.
        self._taken = itertools.count()
        self._finished = itertools.count(1)
        self._done = threading.Lock()
        self._done.acquire()
        self._error: BaseException | None = None

    def help(self) -> None:
        """Run pieces until none is left to take."""
        while (piece := next(self._taken)) < self._pieces:
            try:
                self._task(piece)
            except BaseException as error:  # raised again in wait(), by the thread that asked
                self._error = error
            if next(self._finished) == self._pieces:
                self._done.release()

    def wait(self) -> None:
        """Wait until all pieces are finished."""
        self._done.acquire()
        if self._error is not None:
            raise self._error


class _Helper:
    """A thread that sleeps until it is shown a job.

    ``_is_asleep`` is set by this thread only and cleared by the other side only, before each release of the bare lock:
    the lock is never released twice. (A semaphore would be simpler, and twice as slow a hundred times per token.)
    """

    def __init__(self, index: int) -> None:
        self._wake = threading.Lock()
        self._wake.acquire()
        self._job: _Job | None = None
        self._is_asleep = True
        self._is_closing = False
        threading.Thread(target=self._serve, name=f"reference-engine-{index}", daemon=True).start()

    def show(self, job: _Job) -> None:
        """Wake the thread for a job; one that is still awake misses it."""
        if self._is_asleep:
            self._job = job
            self._is_asleep = False
            self._wake.release()

    def close(self) -> None:
        """End the thread, after the job it may be at."""
        self._is_closing = True
        if self._is_asleep:
            self._is_asleep = False
            self._wake.release()

    def _serve(self) -> None:
        while not self._is_closing:
            self._wake.acquire()
            if self._job is not None:
                self._job.help()
                self._job = None
            self._is_asleep = True


class Workers:
    """Runs pieces of a task side by side. The calling thread works too, and never waits for one that has not come.

    A helper that the system does not schedule in time finds nothing left to do: on a busy machine the work takes as
    long as with one thread, not longer. ``active`` threads of at most ``count`` take part; :meth:`choose` finds the
    best number by measurement.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.active = count
        self._chosen_at = float("-inf")
        self._helpers = [_Helper(index) for index in range(1, count)]

    def run(self, task: Callable[[int], None], pieces: int) -> None:
        """Call ``task(i)`` for i in 0 .. pieces-1, in any order, and return when all have ended."""
        if self.active == 1 or pieces == 1:
            for piece in range(pieces):
                task(piece)
            return
        job = _Job(task, pieces)
        for helper in self._helpers[: min(self.active, pieces) - 1]:
            helper.show(job)
        job.help()
        job.wait()

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
        for helper in self._helpers:
            helper.close()
        self._helpers = []
        self.active = 1
