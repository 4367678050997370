"""Server-sent events, and work that ends when the client leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import TypeVar

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pipeline.frontend.api_errors import ApiError, internal

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class ClientLeft(Exception):
    """The connection ended before the answer was complete."""


def event(value: object) -> bytes:
    """Return one event with a JSON value."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


async def until_disconnect(receive: Receive, work: Awaitable[_Result]) -> _Result:
    """Wait for work, and cancel it when the client leaves.

    Args:
        receive: ASGI channel whose request body has been read.
        work: What the client waits for.

    Raises:
        ClientLeft: The client left first.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientLeft
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
        # Both must have ended before the request does: cancelling the task is what cancels the model's work.
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends events as they come.

    The head is sent with the first event, so that a failure before it still gets its own status. A failure later
    becomes an event with the error, which ends the stream without ``[DONE]``.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], headers: dict[str, str] | None = None) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(headers)
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await until_disconnect(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        started = False
        async with aclosing(self._events) as events:
            try:
                async for data in events:
                    if not started:
                        started = True
                        await send({"type": "http.response.start", "status": 200, "headers": self._head()})
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            except ApiError as error:
                if not started:
                    raise
                await send({"type": "http.response.body", "body": event(error.body()), "more_body": True})
            except Exception:
                if not started:
                    raise
                _log.exception("stream failed")
                await send({"type": "http.response.body", "body": event(internal().body()), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _head(self) -> list[tuple[bytes, bytes]]:
        return _HEADERS + [pair for pair in self.raw_headers if pair[0] != b"content-length"]
