"""The conformance kit passes the frontend, and notices servers that break the contract."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn
from frontend_fakes import ALL_FEATURES, Bench

from pipeline.frontend.backend import Chunk, GenerateRequest
from pipeline.frontend.conformance import Check, check_frontend


@contextmanager
def running(app: Any) -> Iterator[str]:
    """Serve an application in a thread."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()


def repeating(bench: Bench) -> None:
    """Let the model repeat its prompt."""
    bench.backend.script = lambda request: [index for index in request.token_ids if index > 2] * 3


def verdicts(found: list[Check], verdict: str) -> list[str]:
    return [f"{check.name}: {check.detail}" for check in found if check.verdict == verdict]


def test_kit_passes_the_frontend(bench: Bench) -> None:
    repeating(bench)
    with running(bench.app()) as url:
        found = check_frontend(url, max_tokens=80)
    assert verdicts(found, "failed") == [] and verdicts(found, "skipped") == []
    assert len(found) >= 25


def test_kit_notices_lost_characters(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    repeating(bench)
    app = bench.app()

    async def generate(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        for position, index in enumerate(i for i in request.token_ids if i > 2):
            if not (request.stream and position == 5):
                yield Chunk((index,))

    monkeypatch.setattr(app.state.service.backend, "generate", generate)
    with running(app) as url:
        found = check_frontend(url, max_tokens=80)
    assert any("stream equals non-stream" in name for name in verdicts(found, "failed"))


def test_kit_skips_what_is_refused(bench: Bench) -> None:
    repeating(bench)
    bench.backend.known = type(ALL_FEATURES)(max_seq_len=1024)
    with running(bench.app()) as url:
        found = check_frontend(url, model="tiny", max_tokens=80)
    assert verdicts(found, "failed") == [] and len(verdicts(found, "skipped")) == 2


def test_kit_reports_a_server_that_is_away() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    found = check_frontend(f"http://127.0.0.1:{port}", timeout_s=5)
    assert [check.verdict for check in found] == ["failed"]
