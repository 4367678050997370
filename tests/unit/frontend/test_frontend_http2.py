"""The HTTP/2 client against grpc's own server."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from pipeline.frontend.http2 import CallFailed, Connection

PATH = "/test.Echo/Stream"


class Echo(grpc.GenericRpcHandler):  # type: ignore[misc]
    """``N:SIZE`` is answered with N messages of SIZE bytes; other requests say what to do."""

    def __init__(self) -> None:
        self.cancelled = 0
        self.sent = 0
        self.waiting = 0

    def service(self, details: Any) -> Any:
        return grpc.stream_stream_rpc_method_handler(self.answer) if details.method == PATH else None

    async def answer(self, requests: AsyncIterator[bytes], context: Any) -> AsyncGenerator[bytes, None]:
        async for request in requests:
            if request == b"fail":
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many, größer 100%")
            elif request == b"wait":
                yield b"begun"
                self.waiting += 1
                try:
                    await asyncio.sleep(30)
                except asyncio.CancelledError:
                    self.cancelled += 1
                    raise
            elif request.startswith(b"size"):
                yield len(request).to_bytes(8, "big")
            else:
                count, size = map(int, request.split(b":"))
                for number in range(count):
                    self.sent += 1
                    yield bytes([number % 256]) * size


@asynccontextmanager
async def serving(echo: Echo) -> AsyncGenerator[tuple[str, Any], None]:
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)])
    server.add_generic_rpc_handlers((echo,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}", server
    finally:
        await server.stop(0)


def run(test: Callable[[Connection, Echo, Any], Awaitable[None]]) -> None:
    async def go() -> None:
        echo = Echo()
        async with serving(echo) as (address, server):
            connection = await Connection.open(address, timeout_s=10)
            try:
                await asyncio.wait_for(test(connection, echo, server), 30)
            finally:
                connection.close()

    asyncio.run(go())


async def ask(connection: Connection, request: bytes) -> list[bytes]:
    found: list[bytes] = []
    async with aclosing(connection.call(PATH, request).messages()) as batches:
        async for batch in batches:
            found += batch
    return found


@pytest.mark.parametrize("size", [0, 1, 100, 16_384, 3_000_000])
def test_messages_arrive_whole_and_in_order(size: int) -> None:
    async def test(connection: Connection, echo: Echo, server: Any) -> None:
        assert await ask(connection, b"5:%d" % size) == [bytes([number]) * size for number in range(5)]

    run(test)


def test_request_larger_than_the_windows_is_sent() -> None:
    async def test(connection: Connection, echo: Echo, server: Any) -> None:
        request = b"size" + b"x" * 5_000_000
        assert await ask(connection, request) == [len(request).to_bytes(8, "big")]

    run(test)


def test_many_calls_share_the_connection() -> None:
    async def test(connection: Connection, echo: Echo, server: Any) -> None:
        for _ in range(3):
            found = await asyncio.gather(*(ask(connection, b"%d:40" % (number % 50)) for number in range(200)))
            assert [len(messages) for messages in found] == [number % 50 for number in range(200)]

    run(test)


def test_status_and_message_of_a_failed_call() -> None:
    async def test(connection: Connection, echo: Echo, server: Any) -> None:
        with pytest.raises(CallFailed, match="too many, größer 100%") as caught:
            await ask(connection, b"fail")
        assert caught.value.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        with pytest.raises(CallFailed) as caught:
            async with aclosing(connection.call("/no/such", b"").messages()) as batches:
                async for _ in batches:
                    pass
        assert caught.value.code == grpc.StatusCode.UNIMPLEMENTED.value[0]
        assert len(await ask(connection, b"2:1")) == 2

    run(test)


def test_closing_the_iterator_cancels_at_the_server() -> None:
    async def test(connection: Connection, echo: Echo, server: Any) -> None:
        async with aclosing(connection.call(PATH, b"wait").messages()) as batches:
            assert await anext(batches) == [b"begun"]
        while not echo.cancelled:
            await asyncio.sleep(0.005)
        assert len(await ask(connection, b"2:1")) == 2

    run(test)


def test_cancelled_task_cancels_at_the_server() -> None:
    async def test(connection: Connection, echo: Echo, server: Any) -> None:
        task = asyncio.create_task(ask(connection, b"wait"))
        while not echo.waiting:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while not echo.cancelled:
            await asyncio.sleep(0.005)

    run(test)


def test_slow_reader_holds_the_sender_back() -> None:
    async def test(connection: Connection, echo: Echo, server: Any) -> None:
        async with aclosing(connection.call(PATH, b"1000:100000").messages()) as batches:
            count = len(await anext(batches))
            await asyncio.gather(*(ask(connection, b"20:10") for _ in range(20)))
            # 1 MiB of window and what the server's own buffers take, not the 100 MB of the answer.
            assert echo.sent - 400 < 200
            async for batch in batches:
                count += len(batch)
        assert count == 1000

    run(test)


def test_lost_server_fails_open_calls_as_unavailable() -> None:
    async def test(connection: Connection, echo: Echo, server: Any) -> None:
        task = asyncio.create_task(ask(connection, b"wait"))
        while not echo.waiting:
            await asyncio.sleep(0.005)
        await server.stop(0)
        with pytest.raises(CallFailed) as caught:
            await task
        assert caught.value.code in (grpc.StatusCode.UNAVAILABLE.value[0], grpc.StatusCode.CANCELLED.value[0])
        while connection.usable:
            await asyncio.sleep(0.005)
        with pytest.raises(CallFailed, match="closed"):
            connection.call(PATH, b"1:1")

    run(test)


def test_nothing_listening_is_unavailable() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with pytest.raises(CallFailed) as caught:
        asyncio.run(Connection.open(address, timeout_s=5))
    assert caught.value.code == 14
