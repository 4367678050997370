"""A client connection for gRPC calls whose answers are streams of small messages.

``grpc.aio`` spends 100–150 µs of CPU per message: a thread, two system calls and several futures for each. Read
straight from the socket, all frames that arrived together cost one system call and a few microseconds each: 30–60 µs
per message in the same measurement. Only what such calls need is here: one request message, many response messages,
cancellation, flow control in both directions.

Source: RFC 9113 (HTTP/2), and the gRPC over HTTP/2 protocol description.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator
from urllib.parse import unquote

import hpack

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
_END_STREAM, _ACK, _END_HEADERS, _PADDED, _PRIORITY = 1, 1, 4, 8, 32
_HEADER_TABLE_SIZE, _ENABLE_PUSH, _MAX_CALLS, _INITIAL_WINDOW, _MAX_FRAME = 1, 2, 3, 4, 5
_CANCEL = b"\0\0\0\x08"

_DEFAULT_WINDOW = 65_535
# How far a call may run ahead of its reader, and all calls of a connection together.
_CALL_WINDOW = 1 << 20
_CONNECTION_WINDOW = 1 << 26
_LARGEST_FRAME = 1 << 20
# Logits over a vocabulary come in large messages.
_LARGEST_MESSAGE = 1 << 30

_OK, _RESOURCE_EXHAUSTED, _INTERNAL, _UNAVAILABLE = 0, 8, 13, 14


class CallFailed(Exception):
    """A call ended with anything but OK.

    Attributes:
        code: gRPC status; 14 (unavailable) also for a lost connection.
    """

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Call:
    """One request and its stream of messages.

    Attributes:
        number: Stream id on the connection.
        window: Bytes the peer still takes.
        unsent: Rest of the request.
    """

    __slots__ = (
        "_buffer",
        "_connection",
        "_credit",
        "_ended",
        "_failure",
        "_needed",
        "_ready",
        "_size",
        "_waiter",
        "number",
        "unsent",
        "window",
    )

    def __init__(self, connection: Connection, number: int, window: int, body: bytes) -> None:
        self._connection = connection
        self._ready: list[bytes] = []
        self._buffer = bytearray()
        self._needed = 5
        self._size = 0
        self._credit = 0
        self._ended = False
        self._failure: CallFailed | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.number = number
        self.window = window
        self.unsent = body

    async def messages(self) -> AsyncGenerator[list[bytes], None]:
        """Yield what has arrived, one or more messages at a time. Closing the iterator cancels the call.

        Raises:
            CallFailed: The call did not end with OK.
        """
        try:
            while True:
                if self._ready:
                    ready, self._ready = self._ready, []
                    self._give_credit()
                    yield ready
                elif self._failure is not None:
                    raise self._failure
                elif self._ended:
                    return
                else:
                    self._waiter = asyncio.get_running_loop().create_future()
                    await self._waiter
        finally:
            if not self._ended:
                self._ended = True
                self._connection.cancel(self)

    def feed(self, data: bytes) -> None:
        """Take bytes of the response body."""
        self._size += len(data)
        if self._buffer:
            self._buffer += data
            data = bytes(self._buffer) if len(self._buffer) >= self._needed else b""
        position, size = 0, len(data)
        while size - position >= 5:
            end = position + 5 + int.from_bytes(data[position + 1 : position + 5], "big")
            if data[position] or end - position > _LARGEST_MESSAGE:
                self._connection.cancel(self)
                self.end(CallFailed(_INTERNAL, "the answer is compressed or too large"))
                return
            if end > size:
                self._needed = end - position
                break
            self._needed = 5
            self._ready.append(data[position + 5 : end])
            position = end
        if data:
            self._buffer = bytearray(data[position:])
        if self._ready:
            self._wake()
        else:
            self._give_credit()  # a message larger than the window: the reader cannot ask for the rest of it

    def end(self, failure: CallFailed | None) -> None:
        """Note that nothing more comes."""
        if not self._ended:
            self._ended = True
            self._failure = failure
            self._wake()

    def _give_credit(self) -> None:
        """Let the peer send as much as was read, in portions worth a frame."""
        self._credit += self._size
        self._size = 0
        if self._credit > _CALL_WINDOW // 4 and not self._ended:
            self._connection.grant(self.number, self._credit)
            self._credit = 0

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class Connection(asyncio.Protocol):
    """One HTTP/2 connection, shared by any number of calls.

    Attributes:
        usable: Whether new calls can be made.
    """

    def __init__(self, authority: str) -> None:
        self._authority = authority
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._calls: dict[int, Call] = {}
        self._next = 1
        self._encoder, self._decoder = hpack.Encoder(), hpack.Decoder()
        self._head: tuple[int, int, bytes] | None = None
        self._window = _DEFAULT_WINDOW
        self._call_window = _DEFAULT_WINDOW
        self._frame_size = 16_384
        self._most_calls = 2**31
        self._received = 0
        self.usable = True

    @classmethod
    async def open(cls, address: str, *, timeout_s: float) -> Connection:
        """Connect to ``host:port``.

        Raises:
            CallFailed: Nothing listens there, or it takes too long.
        """
        host, _, port = address.rpartition(":")
        loop = asyncio.get_running_loop()
        connect = loop.create_connection(lambda: cls(address), host.strip("[]"), int(port))
        try:
            _, connection = await asyncio.wait_for(connect, timeout_s)
        except (OSError, asyncio.TimeoutError) as error:
            raise CallFailed(_UNAVAILABLE, f"cannot connect to {address}: {error or 'timed out'}") from error
        return connection

    def call(self, path: str, message: bytes) -> Call:
        """Start a call with one message.

        Raises:
            CallFailed: The connection is closed, or the peer allows no more calls.
        """
        if not self.usable:
            raise CallFailed(_UNAVAILABLE, f"the connection to {self._authority} is closed")
        if len(self._calls) >= self._most_calls:
            raise CallFailed(_RESOURCE_EXHAUSTED, f"{self._authority} takes {self._most_calls} calls at a time")
        body = b"\0" + len(message).to_bytes(4, "big") + message
        call = Call(self, self._next, self._call_window, body)
        self._calls[call.number] = call
        self._next += 2
        self.usable = self._next < 2**31
        headers = self._encoder.encode(
            [
                (":method", "POST"),
                (":scheme", "http"),
                (":path", path),
                (":authority", self._authority),
                ("te", "trailers"),
                ("content-type", "application/grpc"),
                ("user-agent", "trtllm-pipeline-frontend"),
            ]
        )
        self._write(_frame(_HEADERS, _END_HEADERS, call.number, headers) + self._sendable(call))
        return call

    def cancel(self, call: Call) -> None:
        """End a call that nobody reads any more."""
        if self._calls.pop(call.number, None) is not None:
            self._write(_frame(_RST_STREAM, 0, call.number, _CANCEL))

    def grant(self, number: int, size: int) -> None:
        """Let the peer send ``size`` more bytes; number 0 speaks for the connection."""
        self._write(_frame(_WINDOW_UPDATE, 0, number, size.to_bytes(4, "big")))

    def close(self) -> None:
        """Close; open calls fail."""
        if self._transport is not None:
            self._transport.close()
        self._fail("the connection was closed")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # create_connection makes no other
        self._transport = transport
        _detect_dead_peer(transport.get_extra_info("socket"))
        settings = {_ENABLE_PUSH: 0, _INITIAL_WINDOW: _CALL_WINDOW, _MAX_FRAME: _LARGEST_FRAME}
        payload = b"".join(key.to_bytes(2, "big") + value.to_bytes(4, "big") for key, value in settings.items())
        self._write(_PREFACE + _frame(_SETTINGS, 0, 0, payload))
        self.grant(0, _CONNECTION_WINDOW - _DEFAULT_WINDOW)

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(str(error) if error else "the peer closed the connection")

    def data_received(self, data: bytes) -> None:
        if self._buffer:
            data = self._buffer + data
        position, size = 0, len(data)
        while size - position >= 9:
            length = int.from_bytes(data[position : position + 3], "big")
            end = position + 9 + length
            if end > size:
                break
            number = int.from_bytes(data[position + 5 : position + 9], "big") & 0x7FFFFFFF
            kind, flags = data[position + 3], data[position + 4]
            if kind == _DATA:
                self._on_data(number, flags, data[position + 9 : end])
            else:
                self._on_other(kind, flags, number, data[position + 9 : end])
            position = end
        self._buffer = data[position:]

    def _on_data(self, number: int, flags: int, payload: bytes) -> None:
        # The connection's window is given back at once: a call nobody reads must not stop the others.
        self._received += len(payload)
        if self._received > _CONNECTION_WINDOW // 4:
            self.grant(0, self._received)
            self._received = 0
        call = self._calls.get(number)
        if call is None:
            return
        if flags & _PADDED:
            payload = payload[1 : len(payload) - payload[0]]
        if payload:
            call.feed(payload)
        if flags & _END_STREAM:
            self._end(number, CallFailed(_INTERNAL, "the answer ended without a status"))

    def _on_other(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if kind == _HEADERS:
            start = (1 if flags & _PADDED else 0) + (5 if flags & _PRIORITY else 0)
            payload = payload[start : len(payload) - (payload[0] if flags & _PADDED else 0)]
            self._on_head(number, flags, payload)
        elif kind == _CONTINUATION and self._head is not None:
            first, first_flags, begun = self._head
            self._on_head(first, first_flags | flags, begun + payload)
        elif kind == _RST_STREAM:
            self._end(number, CallFailed(_UNAVAILABLE, f"the peer reset the call ({int.from_bytes(payload, 'big')})"))
        elif kind == _SETTINGS and not flags & _ACK:
            self._on_settings(payload)
        elif kind == _PING and not flags & _ACK:
            self._write(_frame(_PING, _ACK, 0, payload))
        elif kind == _WINDOW_UPDATE:
            self._on_window(number, int.from_bytes(payload, "big") & 0x7FFFFFFF)
        elif kind == _GOAWAY:
            # Calls that the peer has seen may finish; the next one needs another connection.
            self.usable = False
            last = int.from_bytes(payload[:4], "big") & 0x7FFFFFFF
            for late in [known for known in self._calls if known > last]:
                self._end(late, CallFailed(_UNAVAILABLE, "the peer is going away"))

    def _on_head(self, number: int, flags: int, block: bytes) -> None:
        """Read headers or trailers; the table of the decoder needs all of them, wanted or not."""
        if not flags & _END_HEADERS:
            self._head = (number, flags, block)
            return
        self._head = None
        try:
            headers = dict(self._decoder.decode(block, raw=True))
        except hpack.HPACKError as error:
            self._fail(f"unreadable headers: {error}")
            self.close()
            return
        if flags & _END_STREAM:
            code = headers.get(b"grpc-status", b"")
            message = unquote(headers.get(b"grpc-message", b"").decode("latin-1"))
            failure = CallFailed(int(code) if code.isdigit() else _INTERNAL, message)
            self._end(number, None if failure.code == _OK else failure)
        elif headers.get(b":status") != b"200":
            self._end(number, CallFailed(_UNAVAILABLE, f"HTTP status {headers.get(b':status')!r}"))

    def _on_settings(self, payload: bytes) -> None:
        for start in range(0, len(payload) - 5, 6):
            key = int.from_bytes(payload[start : start + 2], "big")
            value = int.from_bytes(payload[start + 2 : start + 6], "big")
            if key == _INITIAL_WINDOW:
                for call in self._calls.values():
                    call.window += value - self._call_window
                self._call_window = value
            elif key == _MAX_CALLS:
                self._most_calls = value
            elif key == _MAX_FRAME:
                self._frame_size = value
            elif key == _HEADER_TABLE_SIZE:
                self._encoder.header_table_size = value
        self._write(_frame(_SETTINGS, _ACK, 0, b""))
        self._send_waiting()

    def _on_window(self, number: int, size: int) -> None:
        if number == 0:
            self._window += size
        elif number in self._calls:
            self._calls[number].window += size
        self._send_waiting()

    def _send_waiting(self) -> None:
        """Send what windows allow now."""
        data = b"".join(self._sendable(call) for call in self._calls.values() if call.unsent)
        if data:
            self._write(data)

    def _sendable(self, call: Call) -> bytes:
        """Take frames off a request, as much as both windows allow."""
        frames = b""
        while call.unsent:
            size = min(len(call.unsent), call.window, self._window, self._frame_size)
            if size <= 0:
                break
            part, call.unsent = call.unsent[:size], call.unsent[size:]
            call.window -= size
            self._window -= size
            frames += _frame(_DATA, 0 if call.unsent else _END_STREAM, call.number, part)
        return frames

    def _end(self, number: int, failure: CallFailed | None) -> None:
        call = self._calls.pop(number, None)
        if call is not None:
            call.end(failure)

    def _fail(self, reason: str) -> None:
        self.usable = False
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.end(CallFailed(_UNAVAILABLE, reason))

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)


def _frame(kind: int, flags: int, number: int, payload: bytes) -> bytes:
    return b"%b%c%c%b%b" % (len(payload).to_bytes(3, "big"), kind, flags, number.to_bytes(4, "big"), payload)


def _detect_dead_peer(connection: socket.socket) -> None:
    """Let the kernel notice a machine that vanished; without it open calls would wait for ever."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 25_000)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
