"""Log probabilities in the two shapes of OpenAI's API."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pipeline.frontend.backend import Logprob
from pipeline.frontend.generation import ShownToken
from pipeline.frontend.tokenizer import Tokenizer

# JSON has no infinity; OpenAI writes this for tokens of no measurable probability.
_FLOOR = -9999.0


class LogprobsWriter:
    """Writes the tokens of one sequence in order; knows whether the next one begins the text."""

    def __init__(self, tokenizer: Tokenizer, k: int, *, first: bool = True) -> None:
        """Start a sequence.

        Args:
            tokenizer: Turns ids into text.
            k: Alternatives per token.
            first: Whether no text stands before it.
        """
        self._tokenizer = tokenizer
        self._k = k
        self._first = first

    def chat(self, tokens: Sequence[ShownToken]) -> dict[str, Any]:
        """Return ``logprobs`` of a chat choice."""
        return {"content": [self._chat_entry(token.logprob) for token in tokens], "refusal": None}

    def completion(self, tokens: Sequence[ShownToken], base: int) -> dict[str, Any]:
        """Return ``logprobs`` of a completion choice.

        Args:
            tokens: With offsets in the answer.
            base: Characters in front of the answer (echo).
        """
        written = _empty()
        for token in tokens:
            self.add(written, token.logprob.token_id, token.logprob, base + token.offset)
        return written

    def add(self, written: dict[str, Any], token_id: int, entry: Logprob | None, offset: int) -> bytes:
        """Append a token; return its bytes. A token without an entry (the first of a prompt) has null values."""
        first = self._advance(token_id)
        written["tokens"].append(self._name(token_id, first=first))
        written["text_offset"].append(offset)
        written["token_logprobs"].append(None if entry is None else _number(entry.logprob))
        tops = None
        if entry is not None and self._k:
            tops = {self._name(index, first=first): _number(value) for index, value in entry.top[: self._k]}
            # As in OpenAI's API the chosen token is always listed, so there can be one more than asked for.
            tops.setdefault(written["tokens"][-1], _number(entry.logprob))
        written["top_logprobs"].append(tops)
        return self._tokenizer.piece(token_id, first=first)

    def _chat_entry(self, entry: Logprob) -> dict[str, Any]:
        first = self._advance(entry.token_id)
        described = self._described(entry.token_id, entry.logprob, first=first)
        tops = [self._described(index, value, first=first) for index, value in entry.top[: self._k]]
        return {**described, "top_logprobs": tops}

    def _described(self, token_id: int, logprob: float, *, first: bool) -> dict[str, Any]:
        data = self._tokenizer.piece(token_id, first=first)
        label = data.decode("utf-8", "replace") if data else self._tokenizer.token_label(token_id)
        return {"token": label, "logprob": _number(logprob), "bytes": list(data)}

    def _name(self, token_id: int, *, first: bool) -> str:
        """Return a token's text; bytes that are no text are spelled out so that tokens stay apart."""
        data = self._tokenizer.piece(token_id, first=first)
        if not data:
            return self._tokenizer.token_label(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _advance(self, token_id: int) -> bool:
        first = self._first
        if self._tokenizer.piece(token_id):
            self._first = False
        return first


def prompt_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], entries: Sequence[Logprob | None], k: int
) -> dict[str, Any]:
    """Return ``logprobs`` of an echoed prompt; the first token's are null."""
    writer, written = LogprobsWriter(tokenizer, k), _empty()
    decoder = tokenizer.stream_decoder()
    offset = 0
    for token_id, entry in zip(token_ids, entries, strict=True):
        writer.add(written, token_id, entry, offset)
        offset += len(decoder.push(token_id))
    return written


def joined(first: dict[str, Any], second: dict[str, Any] | None) -> dict[str, Any]:
    """Return the ``logprobs`` of a prompt and its completion as one."""
    if second is None:
        return first
    return {key: first[key] + second[key] for key in first}


def _empty() -> dict[str, Any]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _number(value: float) -> float | None:
    return None if math.isnan(value) else max(value, _FLOOR)
