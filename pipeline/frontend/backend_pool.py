"""Several backends with the same model: health checks, and the healthy one with the least load."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from pipeline.frontend.backend import Backend, BackendUnavailable, Chunk, Features, GenerateRequest

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Member:
    """A backend with its state."""

    name: str
    backend: Backend
    healthy: bool = True
    running: int = 0


class BackendPool:
    """Spreads sequences over backends. A sequence moves to another one only before its first chunk."""

    def __init__(self, members: Sequence[tuple[str, Backend]], *, period_s: float) -> None:
        """Take the backends.

        Args:
            members: Name for the log, and the backend.
            period_s: Pause between health checks.
        """
        self.members = [Member(name, backend) for name, backend in members]
        self._period_s = period_s
        self._watch: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to check health."""
        self._watch = asyncio.create_task(self._check_forever())

    async def features(self) -> Features:
        """Ask the first backend that answers."""
        failure: BackendUnavailable | None = None
        for member in self._in_order():
            try:
                return await member.backend.features()
            except BackendUnavailable as error:
                member.healthy = False
                failure = error
        raise failure or BackendUnavailable("no backend is configured")

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Generate on the best backend."""
        tried = self._in_order()
        for position, member in enumerate(tried):
            begun = False
            member.running += 1
            try:
                async with aclosing(member.backend.generate(request)) as chunks:
                    async for chunk in chunks:
                        begun = True
                        yield chunk
                return
            except BackendUnavailable:
                member.healthy = False
                if begun or position == len(tried) - 1:
                    raise
                _log.warning("backend away, trying the next", extra={"backend": member.name})
            finally:
                member.running -= 1

    async def is_ready(self) -> bool:
        """Say whether any backend would answer now."""
        await self.check()
        return any(member.healthy for member in self.members)

    async def check(self) -> None:
        """Look at all backends once."""
        answers = await asyncio.gather(*(member.backend.is_ready() for member in self.members))
        for member, ready in zip(self.members, answers, strict=True):
            if ready != member.healthy:
                _log.info("backend changed", extra={"backend": member.name, "ready": ready})
            member.healthy = ready

    async def close(self) -> None:
        """End health checks and connections."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await asyncio.gather(*(member.backend.close() for member in self.members))

    def _in_order(self) -> list[Member]:
        """Return healthy backends by load, then the others: a check may be out of date."""
        return sorted(self.members, key=lambda member: (not member.healthy, member.running))

    async def _check_forever(self) -> None:
        while True:
            await self.check()
            await asyncio.sleep(self._period_s)
