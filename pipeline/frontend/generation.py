"""One answer in the making: tokens become text, with stops, limits, counts and log probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipeline.frontend.backend import Chunk, Logprob
from pipeline.frontend.stop_strings import StopMatcher
from pipeline.frontend.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class EndRules:
    """What ends an answer.

    Attributes:
        max_tokens: New tokens at most.
        stop_strings: Texts.
        stop_ids: Tokens given by the client.
        eos_ids: End tokens of the model; never part of the text.
        include_stop: Keep the stop string or stop token in the text.
        kept_tokens: Special tokens that stay visible, for whoever reads tool calls from the text.
    """

    max_tokens: int
    stop_strings: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    eos_ids: frozenset[int] = frozenset()
    include_stop: bool = False
    kept_tokens: tuple[str, ...] = ()


class ShownToken(NamedTuple):
    """A token whose text was shown, with where it begins in the answer."""

    logprob: Logprob
    offset: int


class Answer:
    """Follows one sequence from its first chunk to its end.

    Attributes:
        finish_reason: ``stop`` or ``length`` once the answer has ended.
        completion_tokens: Tokens generated, without the end token.
        cumulative_logprob: Sum over those tokens, when log probabilities arrive.
        cut: Whether the text ended for a reason the backend does not know of.
        text_length: Characters shown so far.
    """

    __slots__ = (
        "_decoder",
        "_pending",
        "_produced",
        "_rules",
        "_special_stops",
        "_stops",
        "_tokenizer",
        "_uncounted",
        "completion_tokens",
        "cumulative_logprob",
        "cut",
        "finish_reason",
        "text_length",
    )

    def __init__(self, tokenizer: Tokenizer, rules: EndRules) -> None:
        self._decoder = tokenizer.stream_decoder(rules.kept_tokens)
        self._rules = rules
        self._tokenizer = tokenizer
        self._uncounted = ""
        self._stops = StopMatcher(rules.stop_strings, include=rules.include_stop)
        special = (tokenizer.special_ids(stop) for stop in rules.stop_strings)
        self._special_stops = frozenset(index for ids in special for index in ids)
        self._pending: list[ShownToken] = []
        self._produced = 0
        self.finish_reason: str | None = None
        self.completion_tokens = 0
        self.cumulative_logprob = 0.0
        self.cut = False
        self.text_length = 0

    def push(self, chunk: Chunk) -> tuple[str, list[ShownToken]]:
        """Take a chunk; return the text to show and the tokens shown with it.

        Once :attr:`finish_reason` is set, further chunks change nothing.
        """
        if self.finish_reason is not None:
            return "", []
        if chunk.text is not None:
            return self._push_text(chunk.text, chunk.text_tokens)
        text = ""
        rules = self._rules
        logprobs = chunk.logprobs
        for position, token_id in enumerate(chunk.token_ids):
            if token_id in rules.eos_ids or token_id in self._special_stops:
                self.cut = token_id not in rules.eos_ids
                return self._end("stop", text)
            stopped = token_id in rules.stop_ids
            if stopped and not rules.include_stop:
                return self._end("stop", text)
            if self.completion_tokens >= rules.max_tokens:
                break
            self.completion_tokens += 1
            if logprobs:
                self.cumulative_logprob += logprobs[position].logprob
                self._pending.append(ShownToken(logprobs[position], self._produced))
            text += self._take(token_id)
            if self._stops.matched is not None or stopped:
                return self._end("stop", text)
        if chunk.finish_reason is not None or self.completion_tokens >= rules.max_tokens:
            at_limit = self.completion_tokens >= rules.max_tokens
            return self._end("length" if at_limit or chunk.finish_reason == "length" else "stop", text)
        return self._show(text)

    def end(self) -> tuple[str, list[ShownToken]]:
        """Say that the backend has nothing more; return the rest."""
        if self.finish_reason is not None:
            return "", []
        self._count_text()
        return self._end("stop" if self.completion_tokens < self._rules.max_tokens else "length", "")

    def _push_text(self, piece: str, count: int | None) -> tuple[str, list[ShownToken]]:
        """Take text of a model that keeps its token ids to itself."""
        if count is None:
            self._uncounted += piece
        else:
            self.completion_tokens += count
        self._produced += len(piece)
        text = self._stops.push(piece)
        if self._stops.matched is not None:
            self._count_text()
            return self._end("stop", text)
        return self._show(text)

    def _count_text(self) -> None:
        if self._uncounted:
            self.completion_tokens += len(self._tokenizer.encode(self._uncounted, add_special_tokens=False))
            self._uncounted = ""

    def _take(self, token_id: int) -> str:
        piece = self._decoder.push(token_id)
        if not piece:
            return ""
        self._produced += len(piece)
        return self._stops.push(piece)

    def _end(self, reason: str, text: str) -> tuple[str, list[ShownToken]]:
        if self._stops.matched is None:
            rest = self._decoder.finish()
            self._produced += len(rest)
            text += self._stops.push(rest)
        matched = self._stops.matched is not None
        if not matched:
            text += self._stops.finish()
        self.cut = self.cut or matched
        self.finish_reason = "stop" if matched else reason
        shown_text, shown = self._show(text)
        if not matched:
            shown += self._pending
        self._pending = []
        return shown_text, shown

    def _show(self, text: str) -> tuple[str, list[ShownToken]]:
        """Count the text and release the tokens that begin in it."""
        self.text_length += len(text)
        if not self._pending:
            return text, []
        held = 0
        while held < len(self._pending) and self._pending[held].offset < self.text_length:
            held += 1
        shown, self._pending = self._pending[:held], self._pending[held:]
        return text, shown


def stop_words(rules: EndRules, end_id: int | None) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences at which the backend itself may end: every end token but the first."""
    extra = (rules.eos_ids | rules.stop_ids) - ({end_id} if end_id is not None else set())
    return tuple((token_id,) for token_id in sorted(extra))


def prompt_entries(entries: Sequence[Logprob | None], token_ids: Sequence[int]) -> list[Logprob | None]:
    """Return one entry per prompt token; the backend's list may lack the first, which has no probability."""
    missing = len(token_ids) - len(entries)
    return [None] * missing + list(entries)
