"""A scripted backend and an application around it, for tests without Triton."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from pipeline.frontend.app import create_app
from pipeline.frontend.backend import BackendError, Chunk, Features, GenerateRequest, Logprob
from pipeline.frontend.settings import FrontendSettings
from pipeline.frontend.tokenizer import Tokenizer

DATA = Path(__file__).parents[2] / "data" / "frontend"
TOKENIZERS = DATA / "tokenizers"
ALL_FEATURES = Features(
    logprobs=True,
    top_logprobs=True,
    prompt_logprobs=True,
    min_p=True,
    logit_bias=True,
    guided=True,
    lora=True,
    max_seq_len=1024,
)
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

Script = Callable[[GenerateRequest], Sequence[int]]


class ScriptedBackend:
    """Answers with the ids a script gives.

    Attributes:
        requests: What was asked, in order.
        chunk: Tokens per chunk.
        failure: Raised in place of the chunk with number ``fail_at``.
        delay_s: Pause before each chunk.
        cancelled: Requests whose iterator was closed early.
    """

    def __init__(self, script: Script, *, features: Features = ALL_FEATURES, chunk: int = 1) -> None:
        self.script = script
        self.known = features
        self.chunk = chunk
        self.requests: list[GenerateRequest] = []
        self.failure: BackendError | None = None
        self.fail_at = 0
        self.delay_s = 0.0
        self.cancelled: list[str] = []
        self.made = 0
        self.ready = True
        self.says_reason = True

    async def features(self) -> Features:
        return self.known

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        self.requests.append(request)
        ids = list(self.script(request))
        ends = {word[0] for word in request.stop_words}
        made: list[int] = []
        reason = "length"
        for token_id in ids:
            if token_id == request.end_id:
                reason = "stop"
                break
            made.append(token_id)
            if token_id in ends:
                reason = "stop"
                break
            if len(made) == request.max_tokens:
                break
        else:
            reason = "stop"
        finished = False
        try:
            parts = [made[start : start + self.chunk] for start in range(0, len(made), self.chunk)] or [[]]
            for number, part in enumerate(parts):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                if self.failure is not None and number == self.fail_at:
                    raise self.failure
                self.made += len(part)
                last = number == len(parts) - 1
                yield self._chunk(
                    request, part, first=number == 0, reason=reason if last and self.says_reason else None
                )
            finished = True
        finally:
            if not finished:
                self.cancelled.append(request.request_id)

    def _chunk(self, request: GenerateRequest, part: list[int], *, first: bool, reason: str | None) -> Chunk:
        logprobs: list[Logprob] = []
        prompt: list[Logprob | None] | None = None
        if request.logprobs is not None:
            logprobs = [self._logprob(index, request.logprobs) for index in part]
        if request.prompt_logprobs is not None and first:
            k = request.prompt_logprobs
            prompt = [None, *(self._logprob(index, k) for index in request.token_ids[1:])]
        return Chunk(part, logprobs, prompt, reason)

    def _logprob(self, token_id: int, k: int) -> Logprob:
        top = [(token_id, -0.5 - token_id / 1000), *((40 + n, -9.0 - n) for n in range(1, k))][:k]
        return Logprob(token_id, -0.5 - token_id / 1000, top)

    async def is_ready(self) -> bool:
        return self.ready

    async def close(self) -> None:
        pass


class Bench:
    """Tokenizer, backend and application of one test."""

    def __init__(self, folder: Path, *, kind: str = "byte_level", template: str = TEMPLATE, **values: Any) -> None:
        self.folder = folder / "tokenizer"
        self.folder.mkdir()
        for path in (TOKENIZERS / kind).iterdir():
            (self.folder / path.name).write_bytes(path.read_bytes())
        if template:
            (self.folder / "chat_template.jinja").write_text(template)
        values.setdefault("served_model", "tiny")
        values.setdefault("log_format", "none")
        self.settings = FrontendSettings(tokenizer=self.folder, **values)
        self.tokenizer = Tokenizer(self.folder)
        self.backend = ScriptedBackend(lambda request: self.answer_ids)
        self.answer_ids: list[int] = []
        self.answers("Hello world")

    def answers(self, text: str, *, end: bool = True) -> list[int]:
        """Script the answer as text, followed by the end token."""
        self.answer_ids = self.tokenizer.encode(text, add_special_tokens=False)
        if end:
            self.answer_ids += self.tokenizer.eos_ids[:1]
        return self.answer_ids

    def app(self) -> FastAPI:
        return create_app(self.settings, self.backend)

    def with_features(self, **values: Any) -> None:
        self.backend.known = dataclasses.replace(self.backend.known, **values)


def client(app: FastAPI) -> httpx.AsyncClient:
    """Return a client that calls the application directly; failures inside become answers, as in a server."""
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


def call(app: FastAPI, method: str, path: str, **options: Any) -> httpx.Response:
    """Make one request."""

    async def go() -> httpx.Response:
        async with client(app) as session:
            return await session.request(method, path, **options)

    return asyncio.run(go())


def post(app: FastAPI, path: str, body: Any, **options: Any) -> httpx.Response:
    """Post JSON."""
    return call(app, "POST", path, json=body, **options)


def events(response: httpx.Response) -> list[Any]:
    """Return the events of a stream; the closing mark as text."""
    import json

    assert response.headers["content-type"].startswith("text/event-stream")
    found: list[Any] = []
    for block in response.text.split("\n\n"):
        if block:
            assert block.startswith("data: "), block
            data = block.removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
    return found
