"""Request heads that are too slow or too large, and the description of what is answered."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest
import uvicorn
from frontend_fakes import Bench, call

from pipeline.frontend.http_heads import bounded_heads

WHOLE = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"


async def serve(bench: Bench, head_timeout_s: float) -> tuple[uvicorn.Server, asyncio.Task[None], int]:
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(bench.app(), log_config=None, access_log=False, http=bounded_heads(head_timeout_s))
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    return server, task, listener.getsockname()[1]


async def exchange(port: int, *parts: bytes) -> list[bytes]:
    """Send parts, each after the answer to the one before; return what comes, up to the end of the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    found = []
    for part in parts:
        writer.write(part)
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        found.append(head + await reader.readexactly(size))
    if b"connection: close" in found[-1]:
        assert await asyncio.wait_for(reader.read(), 10) == b""
    writer.close()
    await writer.wait_closed()
    return found


@pytest.mark.parametrize(
    ("parts", "status"),
    [
        ([b""], b"408"),
        ([b"GET / HTTP/1.1\r\nX-Half: "], b"408"),
        ([WHOLE, b"GET / HT"], b"408"),
        ([b"GET / HTTP/1.1\r\nX-Long: " + b"y" * 70_000], b"431"),
        ([WHOLE, WHOLE], b"200"),
    ],
    ids=["nothing", "half", "half-of-the-second", "large", "whole"],
)
def test_heads_that_are_slow_or_large_end_the_connection(bench: Bench, parts: list[bytes], status: bytes) -> None:
    async def go() -> list[bytes]:
        server, task, port = await serve(bench, 0.3)
        try:
            return await exchange(port, *parts)
        finally:
            server.should_exit = True
            await task

    answers = asyncio.run(go())
    assert [answer.split(b" ", 2)[1] for answer in answers] == [b"200"] * (len(parts) - 1) + [status]
    if status != b"200":
        body = json.loads(answers[-1].partition(b"\r\n\r\n")[2])
        assert body["error"]["code"] == "bad_request_head"


def test_a_body_may_take_longer_than_the_head(bench: Bench) -> None:
    body = b'{"prompt": "a"}'
    head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)

    async def go() -> bytes:
        server, task, port = await serve(bench, 0.2)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + body[:5])
        await asyncio.sleep(0.4)  # longer than a head may take
        writer.write(body[5:])
        answer = await reader.readuntil(b"\r\n\r\n")
        writer.close()
        await writer.wait_closed()
        server.should_exit = True
        await task
        return answer

    assert b" 200 " in asyncio.run(go())


def test_description_names_bodies_refusals_and_streams(bench: Bench) -> None:
    description = call(bench.app(), "GET", "/openapi.json").json()
    chat = description["paths"]["/v1/chat/completions"]["post"]
    assert set(chat["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    assert {"400", "401", "404", "408", "413", "429", "500", "503"} <= set(chat["responses"])
    assert chat["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/ChatRequest")
    assert "422" not in json.dumps(description["paths"])
    assert set(description["paths"]["/metrics"]["get"]["responses"]["200"]["content"]) == {"text/plain"}
