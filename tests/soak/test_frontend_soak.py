"""The frontend over minutes: memory over very many requests, a thousand streams, slow clients, clients that leave."""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "triton"))

from echo_repository import write_model
from soak_client import Wire, encoded, resident_kib
from test_frontend_triton import Frontend, wait_for

from pipeline.triton.install import ensure_tritonserver
from pipeline.triton.server import TritonServer

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]
REQUESTS = int(os.environ.get("SOAK_REQUESTS", "100000"))
MESSAGES = [{"role": "user", "content": "hello"}]
STREAMS = int(os.environ.get("SOAK_STREAMS", "1000"))


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("journal") / "journal"


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory, journal: Path) -> Iterator[TritonServer]:
    folder = tmp_path_factory.mktemp("triton")
    write_model(folder / "models", "tensorrt_llm")
    write_model(folder / "models", "slow", delay_ms="500")
    write_model(folder / "models", "brisk", delay_ms="5", journal=str(journal))
    with TritonServer(folder / "models", ensure_tritonserver(), log_path=folder / "triton.log") as server:
        server.wait_ready()
        yield server


def start(triton: TritonServer, folder: Path, model: str, **values: object) -> Frontend:
    frontend = Frontend(folder / model, triton=[triton.grpc_url], model=model, **values)
    frontend.wait_ready()
    return frontend


def test_memory_is_flat_over_very_many_requests(triton: TritonServer, tmp_path: Path) -> None:
    frontend = start(triton, tmp_path, "tensorrt_llm", log_format="none")
    body = {"model": "echo", "prompt": "one two three", "max_tokens": 8, "temperature": 0}
    kinds = [
        encoded(body),
        encoded({**body, "stream": True, "stop": "never"}),
        encoded({**body, "n": 2, "logprobs": 0, "stream": True}),
        encoded(
            {"model": "echo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8},
            "/v1/chat/completions",
        ),
        encoded({**body, "temperature": "hot"}),
    ]
    left = REQUESTS

    async def worker(number: int) -> None:
        nonlocal left
        wire = await Wire(frontend.port).open()
        while left > 0:
            left -= 1
            kind = left % len(kinds)
            status, answer = await wire.ask(kinds[kind])
            assert status == (400 if kind == 4 else 200), answer
        await wire.close()

    async def watch() -> list[int]:
        """Look at the memory every twentieth of the way."""
        seen: list[int] = []
        while left > 0:
            await asyncio.sleep(0.02)
            if (REQUESTS - left) * 20 // REQUESTS > len(seen):
                seen.append(resident_kib(frontend.process.pid))
        return seen

    async def go() -> list[int]:
        watching = asyncio.create_task(watch())
        await asyncio.gather(*(worker(number) for number in range(16)))
        return await watching

    seen = asyncio.run(go())
    print("resident KiB:", seen)
    # The first fifth fills caches and the allocator's arenas.
    settled = statistics.median(seen[3:6])
    assert statistics.median(seen[-3:]) < settled * 1.05, seen
    assert frontend.stop() == 0


def test_a_thousand_streams_are_held(triton: TritonServer, tmp_path: Path) -> None:
    frontend = start(triton, tmp_path, "slow", log_format="none")
    request = encoded({"model": "echo", "prompt": "one two three", "max_tokens": 16, "stream": True, "temperature": 0})
    before = resident_kib(frontend.process.pid)

    async def go() -> tuple[int, int]:
        wires = [await Wire(frontend.port).open() for _ in range(STREAMS)]
        asked = [asyncio.create_task(wire.ask(request)) for wire in wires]
        peak = 0
        while not all(task.done() for task in asked):
            await asyncio.sleep(0.2)
            peak = max(peak, resident_kib(frontend.process.pid))
        answers = await asyncio.gather(*asked)
        for wire in wires:
            await wire.close()
        return peak, sum(status == 200 and body.endswith(b"data: [DONE]\n\n") for status, body in answers)

    peak, complete = asyncio.run(go())
    per_stream = (peak - before) / STREAMS
    print(f"KiB per stream: {per_stream:.1f}")
    assert complete == STREAMS
    assert per_stream * 1024 < 100_000
    assert frontend.stop() == 0


def test_slow_heads_and_bodies_end_and_others_do_not_notice(triton: TritonServer, tmp_path: Path) -> None:
    frontend = start(triton, tmp_path, "tensorrt_llm", head_timeout_s=1.5, body_timeout_s=1.5)
    whole = encoded({"model": "echo", "prompt": "one", "max_tokens": 2})

    async def drip(data: bytes) -> tuple[float, bytes]:
        """Send byte after byte for ever; return when and with what the server ends it."""
        wire = await Wire(frontend.port).open()
        began = time.monotonic()

        async def send() -> None:
            position = 0
            while True:
                wire.writer.write(data[position : position + 1] or b"x")
                position += 1
                await asyncio.sleep(0.05)

        sending = asyncio.create_task(send())
        answer = await asyncio.wait_for(wire.reader.readuntil(b"\r\n\r\n"), 20)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await wire.close()
        return time.monotonic() - began, answer

    async def go() -> tuple[list[tuple[float, bytes]], list[float]]:
        heads = [drip(b"POST /v1/completions HTTP/1.1\r\nX-Slow: ") for _ in range(100)]
        head, _, _ = whole.partition(b"\r\n\r\n")
        bodies = [drip(head.replace(b"Content-Length: ", b"Content-Length: 99") + b"\r\n\r\n") for _ in range(100)]
        slow = asyncio.gather(*heads, *bodies)
        wire, times = await Wire(frontend.port).open(), []
        while not slow.done():
            sent = time.monotonic()
            assert (await wire.ask(whole))[0] == 200
            times.append(time.monotonic() - sent)
            await asyncio.sleep(0.02)
        await wire.close()
        return await slow, times

    ended, times = asyncio.run(go())
    assert all(b" 408 " in answer for _, answer in ended)
    longest = max(seconds for seconds, _ in ended)
    print(f"others waited {statistics.median(times) * 1000:.1f} ms; slow ones ended after {longest:.1f} s")
    assert statistics.median(times) < 0.5
    large = b"GET / HTTP/1.1\r\n" + b"X-Filler: " + b"y" * 200_000

    async def fill() -> bytes:
        wire = await Wire(frontend.port).open()
        wire.writer.write(large)
        answer = await wire.reader.readuntil(b"\r\n\r\n")
        await wire.close()
        return answer

    assert b" 431 " in asyncio.run(fill())
    assert frontend.stop() == 0


def test_a_client_that_leaves_is_seen_by_the_model(triton: TritonServer, tmp_path: Path, journal: Path) -> None:
    frontend = start(triton, tmp_path, "brisk", log_format="none")
    request = encoded(
        {"model": "echo", "prompt": "one two three", "max_tokens": 4000, "stream": True, "temperature": 0}
    )
    times: list[float] = []

    async def leave() -> None:
        wire = await Wire(frontend.port).open()
        wire.writer.write(request)
        await wire.reader.readuntil(b"data: ")
        before = journal.read_text().count("cancelled") if journal.exists() else 0
        wire.writer.transport.abort()
        left = time.monotonic()
        while not journal.exists() or journal.read_text().count("cancelled") == before:
            assert time.monotonic() - left < 10
            await asyncio.sleep(0.001)
        times.append(time.monotonic() - left)
        await wire.close()

    for _ in range(20):
        asyncio.run(leave())
    print(f"seen after {statistics.median(times) * 1000:.1f} ms, at most {max(times) * 1000:.1f} ms")
    # The model looks before each token, every 5 ms; the rest is the way there.
    assert statistics.median(times) < 0.1
    wait_for(lambda: 'frontend_in_flight_sequences{model="echo"} 0.0' in metrics(frontend), 5)
    assert frontend.stop() == 0


def metrics(frontend: Frontend) -> str:
    import httpx

    return httpx.get(frontend.url + "/metrics", timeout=10).text
