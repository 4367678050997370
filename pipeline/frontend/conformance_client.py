"""A small OpenAI client for the conformance checks: it shows what came over the wire, unpolished."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


class ServerFailed(Exception):
    """The server gave no usable answer.

    Attributes:
        status: HTTP status, 0 when there was none.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True)
class Answer:
    """One answer, streamed or whole.

    Attributes:
        text: The text, put together.
        reason: ``finish_reason``.
        usage: Token counts; empty when there were none.
        body: The JSON of a whole answer.
        deltas: Pieces of a streamed text.
        chunks: The JSON of all events.
        ended: Whether ``[DONE]`` came.
    """

    text: str = ""
    reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    body: dict[str, Any] = field(default_factory=dict)
    deltas: list[str] = field(default_factory=list)
    chunks: list[dict[str, Any]] = field(default_factory=list)
    ended: bool = False


class ApiClient:
    """Talks to one server.

    Attributes:
        model: Name put into every request.
    """

    def __init__(self, url: str, *, api_key: str | None, timeout_s: float) -> None:
        base = url.rstrip("/")
        self._base = base if base.endswith("/v1") else base + "/v1"
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout_s = timeout_s
        self.model = ""

    def first_model(self) -> str:
        """Return the first model the server lists."""
        status, body = self._json(urllib.request.Request(f"{self._base}/models", headers=self._headers))
        try:
            return str(body["data"][0]["id"])
        except (TypeError, KeyError, IndexError) as error:
            raise ServerFailed(f"/v1/models answered {status} {str(body)[:120]}", status) from error

    def ask(self, kind: str, prompt: str, *, stream: bool = False, **fields: Any) -> Answer:
        """Ask at temperature 0.

        Args:
            kind: ``chat`` or ``completion``.
            prompt: The text; for chat the user's message.
            stream: Whether to stream.
            fields: More request fields.

        Raises:
            ServerFailed: The answer is no success.
        """
        body = {"temperature": 0, "stream": stream, **fields}
        if kind == "chat":
            path = "/chat/completions"
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            path = "/completions"
            body["prompt"] = prompt
        return self._streamed(path, body) if stream else _whole(self.post(path, body))

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Post and expect success."""
        status, answer = self.raw_post(path, body)
        if status != 200 or not isinstance(answer, dict):
            raise ServerFailed(f"status {status}: {str(answer)[:200]}", status)
        return answer

    def raw_post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Post; return status and body whatever they are."""
        return self._json(self._request(path, body))

    def _request(self, path: str, body: dict[str, Any]) -> urllib.request.Request:
        data = json.dumps({"model": self.model, **body}).encode()
        return urllib.request.Request(self._base + path, data=data, headers=self._headers)

    def _json(self, request: urllib.request.Request) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            with error:
                text = error.read()
            try:
                return error.code, json.loads(text)
            except ValueError:
                return error.code, text.decode("utf-8", "replace")
        except (OSError, ValueError) as error:
            raise ServerFailed(f"no usable answer from {request.full_url}: {error}") from error

    def _streamed(self, path: str, body: dict[str, Any]) -> Answer:
        try:
            with urllib.request.urlopen(self._request(path, body), timeout=self._timeout_s) as response:
                return _from_events(response)
        except urllib.error.HTTPError as error:
            with error:
                raise ServerFailed(f"status {error.code}: {error.read()[:200]!r}", error.code) from error
        except (OSError, ValueError) as error:
            raise ServerFailed(f"the stream broke: {error}") from error


def _whole(body: dict[str, Any]) -> Answer:
    choice = body["choices"][0]
    text = choice["message"].get("content") if "message" in choice else choice.get("text")
    return Answer(text=text or "", reason=choice.get("finish_reason"), usage=body.get("usage") or {}, body=body)


def _from_events(lines: Iterable[bytes]) -> Answer:
    answer = Answer()
    for line in lines:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            answer.ended = True
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            raise ServerFailed(f"the stream ended with {str(chunk['error'])[:200]}")
        answer.chunks.append(chunk)
        answer.usage = chunk.get("usage") or answer.usage
        for choice in chunk.get("choices", ()):
            delta = choice["delta"].get("content") if "delta" in choice else choice.get("text")
            if delta:
                answer.deltas.append(delta)
            answer.reason = choice.get("finish_reason") or answer.reason
    answer.text = "".join(answer.deltas)
    return answer
