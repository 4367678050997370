"""Several backends with the same model: health checks, and the healthy one with the least load."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from pipeline.frontend.backend import Backend, BackendError, BackendUnavailable, Chunk, Features, GenerateRequest

_log = logging.getLogger(__name__)

# How long one look at a server waits for the token it asked for.
_PATIENCE_S = 1.0


@dataclass(slots=True)
class Member:
    """A backend with its state.

    Attributes:
        name: For the log.
        backend: What generates.
        healthy: Whether it would answer now, as far as known.
        running: Sequences it works on.
        alive_s: When it last made a token, monotonic; minus infinity before the first one since it came up.
        probe: The question for one token that is open.
        asked_s: When that was asked, monotonic.
    """

    name: str
    backend: Backend
    healthy: bool = True
    running: int = 0
    alive_s: float = -math.inf
    probe: asyncio.Task[None] | None = None
    asked_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Probe:
    """How the pool finds out whether a server that says it is ready makes tokens.

    Attributes:
        request: What is asked for; its request id is replaced.
        period_s: How long a sign of life counts.
        timeout_s: An answer that takes longer means that the server is stalled.
    """

    request: GenerateRequest
    period_s: float
    timeout_s: float


class BackendPool:
    """Spreads sequences over backends. A sequence moves to another one only before its first chunk."""

    def __init__(self, members: Sequence[tuple[str, Backend]], *, period_s: float, probe: Probe | None = None) -> None:
        """Take the backends.

        Args:
            members: Name for the log, and the backend.
            period_s: Pause between health checks.
            probe: How to ask for a token; None trusts what a server says of itself.
        """
        self.members = [Member(name, backend) for name, backend in members]
        self._period_s = period_s
        self._probe = probe
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
                        member.alive_s = time.monotonic()
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
        answers = await asyncio.gather(*(self._look(member) for member in self.members))
        for member, ready in zip(self.members, answers, strict=True):
            if ready != member.healthy:
                _log.info("backend changed", extra={"backend": member.name, "ready": ready})
            member.healthy = ready

    async def close(self) -> None:
        """End health checks and connections."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        probes = [member.probe for member in self.members if member.probe is not None]
        for task in probes:
            task.cancel()
        await asyncio.gather(*probes, return_exceptions=True)
        await asyncio.gather(*(member.backend.close() for member in self.members))

    async def _look(self, member: Member) -> bool:
        """Say whether a backend is up and makes tokens."""
        if not await member.backend.is_ready():
            member.alive_s = -math.inf
            return False
        probe = self._probe
        if probe is None or time.monotonic() - member.alive_s < probe.period_s:
            return True
        if member.probe is None or member.probe.done():
            member.asked_s = time.monotonic()
            member.probe = asyncio.create_task(self._ask(member, probe))
        done, _ = await asyncio.wait((member.probe,), timeout=_PATIENCE_S)
        now = time.monotonic()
        if done or now - member.alive_s < probe.period_s:
            return now - member.alive_s < probe.period_s
        if now - member.asked_s < probe.timeout_s:
            return member.alive_s > -math.inf  # busy, not stalled; one that never made a token has to prove it can
        member.probe.cancel()  # asked again at the next look
        _log.warning("backend makes no tokens", extra={"backend": member.name, "seconds": round(now - member.asked_s)})
        return False

    async def _ask(self, member: Member, probe: Probe) -> None:
        request = replace(probe.request, request_id=f"probe-{uuid.uuid4().hex}")
        try:
            async with aclosing(member.backend.generate(request)) as chunks:
                async for _ in chunks:
                    member.alive_s = time.monotonic()
        except BackendError as error:
            _log.warning("backend failed to make a token", extra={"backend": member.name, "reason": str(error)[:500]})

    def _in_order(self) -> list[Member]:
        """Return healthy backends by load, then the others: a check may be out of date."""
        return sorted(self.members, key=lambda member: (not member.healthy, member.running))

    async def _check_forever(self) -> None:
        while True:
            await self.check()
            await asyncio.sleep(self._period_s)
