"""How many sequences run at once, how many may wait, and how long."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pipeline.frontend import api_errors


class Admission:
    """A bounded number of places with a bounded queue in front, first come first served."""

    def __init__(self, places: int, queue: int, timeout_s: float) -> None:
        """Set the limits.

        Args:
            places: Sequences that may run at the same time.
            queue: Sequences that may wait.
            timeout_s: How long one may wait.
        """
        self._free = places
        self._queue = queue
        self._timeout_s = timeout_s
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        """Sequences in the queue."""
        return len(self._waiting)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Hold a place.

        Raises:
            ApiError: 429 when the queue is full, 503 when waiting took too long.
        """
        await self._enter()
        try:
            yield
        finally:
            self._leave()

    async def _enter(self) -> None:
        if self._free > 0:
            self._free -= 1
            return
        if len(self._waiting) >= self._queue:
            raise api_errors.overloaded(f"The server is at its limit and {self._queue} requests are waiting already.")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await asyncio.wait_for(turn, self._timeout_s)
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self._leave()  # the place came together with the cancellation
            else:
                self._waiting.remove(turn)
            if isinstance(error, asyncio.TimeoutError):
                raise api_errors.unavailable(f"No place became free within {self._timeout_s:g} s.") from error
            raise

    def _leave(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
