"""Checks that any OpenAI-compatible server can be held against: text, streams, reasons, counts, errors.

The checks need nothing of the server but its endpoints. They compare its answers with one another (stream with
non-stream, a stop string with the answer it was cut from), so they ask with temperature 0 and skip what a server that
does not repeat itself cannot show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pipeline.frontend.conformance_client import Answer, ApiClient, ServerFailed

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
PROMPTS = (
    "Repeat exactly: The quick brown fox jumps over the lazy dog.",
    "Repeat exactly: 日本語のテキスト、漢字とかな。",
    "Repeat exactly: 👨‍👩‍👧‍👦 🇩🇪 👋🏽",
    "Repeat exactly: naïve café e\u0301 o\u0308 Ünïcödé",
    "Write Python code that prints the numbers from 1 to 10, indented with tabs.",
    "Write three lines, each beginning with two spaces.",
)


@dataclass(frozen=True, slots=True)
class Check:
    """Outcome of one check.

    Attributes:
        name: What must be true.
        verdict: ``passed``, ``failed`` or ``skipped``.
        detail: What was seen, for the latter two.
    """

    name: str
    verdict: Literal["passed", "failed", "skipped"]
    detail: str = ""


class Skip(Exception):
    """A check that this server gives no occasion for."""


class Mismatch(Exception):
    """A check that failed."""


def check_frontend(
    url: str, *, model: str | None = None, api_key: str | None = None, timeout_s: float = 120.0, max_tokens: int = 48
) -> list[Check]:
    """Run all checks.

    Args:
        url: Server address with or without ``/v1``.
        model: Model name; the first of ``/v1/models`` when None.
        api_key: Sent as bearer token.
        timeout_s: Limit of one request.
        max_tokens: Length of the answers that are compared.

    Returns:
        One entry per check, in a fixed order.
    """
    client = ApiClient(url, api_key=api_key, timeout_s=timeout_s)
    try:
        client.model = model or client.first_model()
    except ServerFailed as error:
        return [Check("the server lists its models", "failed", str(error))]
    kit = _Kit(client, max_tokens)
    return [_run(name, check) for name, check in kit.checks()]


def _run(name: str, check: Callable[[], None]) -> Check:
    try:
        check()
    except Skip as reason:
        return Check(name, "skipped", str(reason))
    except (Mismatch, ServerFailed) as error:
        return Check(name, "failed", str(error))
    return Check(name, "passed")


class _Kit:
    """The checks, with the answers they share."""

    def __init__(self, client: ApiClient, max_tokens: int) -> None:
        self._client = client
        self._max_tokens = max_tokens
        self._known: dict[tuple[str, str], Answer] = {}

    def checks(self) -> Iterator[tuple[str, Callable[[], None]]]:
        for kind in ("chat", "completion"):
            for number, prompt in enumerate(PROMPTS):
                yield f"{kind} {number + 1}: stream equals non-stream", self._same(kind, prompt)
            yield f"{kind}: stream has the right grammar", lambda kind=kind: self._grammar(kind)  # type: ignore[misc]
            yield f"{kind}: stop string is cut and never leaks", lambda kind=kind: self._stop(kind)  # type: ignore[misc]
            yield f"{kind}: max_tokens cuts with reason length", lambda kind=kind: self._length(kind)  # type: ignore[misc]
            yield f"{kind}: counts agree in both modes", lambda kind=kind: self._counts(kind)  # type: ignore[misc]
        yield "chat: bytes of logprobs are the text", self._logprobs
        yield "completion: echo begins with the prompt", self._echo
        yield "completion: echo scores the prompt, the first token with null", self._scores
        yield "completion: a list of prompts is answered in order", self._list
        yield "chat: n answers are kept apart", self._choices
        yield "an unknown model is 404", lambda: self._error({"model": "no-such-model"}, 404)
        yield "a wrong type is 400", lambda: self._error({"temperature": "hot"}, 400)
        yield "an empty conversation is 400", lambda: self._error({"messages": []}, 400)

    def _whole(self, kind: str, prompt: str) -> Answer:
        key = (kind, prompt)
        if key not in self._known:
            self._known[key] = self._client.ask(kind, prompt, max_tokens=self._max_tokens)
            again = self._client.ask(kind, prompt, max_tokens=self._max_tokens)
            if again.text != self._known[key].text:
                del self._known[key]
                raise Skip("the server does not repeat its answer at temperature 0")
        return self._known[key]

    def _same(self, kind: str, prompt: str) -> Callable[[], None]:
        def check() -> None:
            whole = self._whole(kind, prompt)
            streamed = self._client.ask(kind, prompt, stream=True, max_tokens=self._max_tokens)
            _equal(streamed.text, whole.text, "streamed text")
            _equal(streamed.reason, whole.reason, "finish_reason")
            if _REPLACEMENT in "".join(streamed.deltas[:-1]) and _REPLACEMENT not in whole.text[:-1]:
                raise Mismatch("a piece of the stream holds part of a character")

        return check

    def _grammar(self, kind: str) -> None:
        answer = self._client.ask(kind, PROMPTS[0], stream=True, max_tokens=8)
        chunks = [chunk for chunk in answer.chunks if chunk.get("choices")]
        if not answer.ended:
            raise Mismatch("the stream does not end with [DONE]")
        if not chunks:
            raise Mismatch("the stream has no chunk with a choice")
        for key in ("id", "created", "model", "object"):
            if len({chunk.get(key) for chunk in chunks}) != 1:
                raise Mismatch(f"{key} changes within the stream")
        if kind == "chat" and chunks[0]["choices"][0]["delta"].get("role") != "assistant":
            raise Mismatch("the first chunk has no role")
        reasons = [chunk["choices"][0].get("finish_reason", "absent") for chunk in chunks]
        if reasons[:-1] != [None] * (len(reasons) - 1) or reasons[-1] not in ("stop", "length"):
            raise Mismatch(f"finish_reason is {reasons[-4:]} at the end, expected null until the last chunk")

    def _stop(self, kind: str) -> None:
        whole = self._whole(kind, PROMPTS[0])
        # A stop string that begins within a word is spread over tokens of its own.
        start, end = len(whole.text) // 3, len(whole.text) // 3 + 9
        stop = whole.text[start:end]
        if len(whole.text) < 20 or not stop.strip():
            raise Skip(f"the answer {whole.text!r} is too short to be cut")
        expected = whole.text[: whole.text.find(stop)]
        for stream in (False, True):
            cut = self._client.ask(kind, PROMPTS[0], stream=stream, max_tokens=self._max_tokens, stop=[stop])
            _equal(cut.text, expected, f"text cut at {stop!r} ({'stream' if stream else 'whole'})")
            _equal(cut.reason, "stop", "finish_reason")
        missed = self._client.ask(kind, PROMPTS[0], stream=True, max_tokens=self._max_tokens, stop=[stop + "\x07"])
        _equal(missed.text, whole.text, "text with a stop string that only nearly matches")

    def _length(self, kind: str) -> None:
        answer = self._client.ask(kind, PROMPTS[4], max_tokens=3)
        if answer.reason == "stop":
            raise Skip("the answer ended by itself")
        _equal(answer.reason, "length", "finish_reason")
        _equal(answer.usage.get("completion_tokens"), 3, "completion_tokens")

    def _counts(self, kind: str) -> None:
        whole = self._whole(kind, PROMPTS[0])
        options = {"include_usage": True}
        streamed = self._client.ask(kind, PROMPTS[0], stream=True, max_tokens=self._max_tokens, stream_options=options)
        for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
            _equal(streamed.usage.get(key), whole.usage.get(key), key)
        usage = whole.usage
        _equal(
            usage.get("total_tokens"), usage.get("prompt_tokens", 0) + usage.get("completion_tokens", 0), "total_tokens"
        )

    def _logprobs(self) -> None:
        answer = self._optional("chat", PROMPTS[2], logprobs=True, top_logprobs=0)
        entries = (answer.body["choices"][0].get("logprobs") or {}).get("content") or []
        data = b"".join(bytes(entry.get("bytes") or ()) for entry in entries)
        _equal(data.decode("utf-8", "replace"), answer.text, "bytes of the tokens")

    def _echo(self) -> None:
        answer = self._optional("completion", PROMPTS[1], echo=True)
        if not answer.text.startswith(PROMPTS[1]):
            raise Mismatch(f"the text begins with {answer.text[:40]!r}")

    def _scores(self) -> None:
        answer = self._optional("completion", PROMPTS[0], echo=True, logprobs=1)
        scores = answer.body["choices"][0].get("logprobs") or {}
        values, tokens = scores.get("token_logprobs") or [], scores.get("tokens") or []
        if not values or values[0] is not None or any(value is None or value > 1e-6 for value in values[1:]):
            raise Mismatch(f"token_logprobs begin with {values[:3]}, expected null and then numbers up to 0")
        _equal(len(values), answer.usage["prompt_tokens"] + answer.usage["completion_tokens"], "number of scores")
        _equal(len(tokens), len(values), "number of tokens")

    def _list(self) -> None:
        body = {"prompt": list(PROMPTS[:3]), "max_tokens": 8, "temperature": 0}
        choices = self._client.post("/completions", body)["choices"]
        _equal([choice["index"] for choice in choices], [0, 1, 2], "indices")
        for prompt, choice in zip(PROMPTS, choices, strict=False):
            _equal(
                choice["text"],
                self._client.ask("completion", prompt, max_tokens=8).text,
                "text of one prompt of a list",
            )

    def _choices(self) -> None:
        messages = [{"role": "user", "content": PROMPTS[0]}]
        body = {"messages": messages, "max_tokens": 8, "n": 2, "temperature": 1.0, "seed": 1}
        choices = self._client.post("/chat/completions", body)["choices"]
        _equal([choice["index"] for choice in choices], [0, 1], "indices")

    def _error(self, change: dict[str, Any], status: int) -> None:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, **change}
        seen, answer = self._client.raw_post("/chat/completions", body)
        _equal(seen, status, "status")
        error = answer.get("error") if isinstance(answer, dict) else None
        if not isinstance(error, dict) or not {"message", "type", "param", "code"} <= set(error):
            raise Mismatch(f"the body is {str(answer)[:120]}, expected an error object with message, type, param, code")

    def _optional(self, kind: str, prompt: str, **fields: Any) -> Answer:
        """Ask for what a server may refuse, if it says so."""
        try:
            return self._client.ask(kind, prompt, max_tokens=8, **fields)
        except ServerFailed as error:
            if error.status == 400:
                raise Skip(str(error)) from error
            raise


def _equal(seen: Any, expected: Any, what: str) -> None:
    if seen != expected:
        raise Mismatch(f"{what} is {str(seen)[:160]!r}, expected {str(expected)[:160]!r}")
