"""Request heads that must arrive in time and within bounds; uvicorn itself waits for ever and keeps what comes."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024


class BoundedHeads(HttpToolsProtocol):
    """HTTP/1.1 on one connection, closed when a request's head is too slow or too large.

    Attributes:
        head_timeout_s: From the connection, or from the first byte of a later request, to the end of the head.
    """

    head_timeout_s = 20.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deadline: asyncio.TimerHandle | None = None
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first head."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the deadline."""
        self._head_arrived()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """Begin to wait for the rest of a head."""
        if self._deadline is None:
            self._await_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Stop waiting."""
        self._head_arrived()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Take bytes; those of an unfinished head are counted."""
        super().data_received(data)
        if self._deadline is not None:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(431, "Request Header Fields Too Large", f"The head is larger than {MAX_HEAD_BYTES} bytes.")

    def _await_head(self) -> None:
        self._head_bytes = 0
        self._deadline = self.loop.call_later(self.head_timeout_s, self._too_slow)

    def _head_arrived(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        self._refuse(408, "Request Timeout", f"The head did not arrive within {self.head_timeout_s:g} s.")

    def _refuse(self, status: int, phrase: str, message: str) -> None:
        self._head_arrived()
        if self.transport.is_closing():
            return
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": "bad_request_head"}
        body = orjson.dumps({"error": error})
        head = f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()


def bounded_heads(timeout_s: float) -> type[BoundedHeads]:
    """Return the protocol with a deadline."""
    return type("BoundedHeads", (BoundedHeads,), {"head_timeout_s": timeout_s})
