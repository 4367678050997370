"""Which sequences run in a step: slots, waiting requests, chunked prefill."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .attention import KvCache, Segment
from .request import FinishReason, Request, TokenLogprob
from .sampling import Sampler

F32 = npt.NDArray[np.float32]


class Sequence:
    """A running request: its cache, what it has made, and what of its prompt was scored."""

    def __init__(self, request: Request, cache: KvCache, max_tokens: int) -> None:
        seed = request.sampling.seed
        self.request = request
        self.cache = cache
        self.max_tokens = max_tokens
        self.sampler = Sampler(request, secrets.randbits(64) if seed is None else seed)
        self.output: list[int] = []
        self.prompt_logprobs: list[TokenLogprob | None] = [None]
        self.context_logits: list[F32] = []

    @property
    def is_decoding(self) -> bool:
        """Whether only its newest token is missing from the cache."""
        return bool(self.output)

    @property
    def pending(self) -> int:
        """Tokens that are known but not in the cache yet."""
        return len(self.request.token_ids) + len(self.output) - self.cache.length

    @property
    def wants_prompt_scores(self) -> bool:
        """Whether logits of every prompt position are needed."""
        return self.request.prompt_logprobs is not None or self.request.return_context_logits

    def next_tokens(self, count: int) -> tuple[int, ...]:
        """Return the next ``count`` tokens to run."""
        if self.is_decoding:
            return (self.output[-1],)
        return self.request.token_ids[self.cache.length : self.cache.length + count]

    def choose(self, logits: F32) -> int | None:
        """Return the next token for ``logits`` [vocab] and append it; None when nothing may follow.

        Raises:
            EngineError: The logits are damaged.
            ValueError: What guides the request cannot go on.
        """
        allowed = self.request.allowed
        token = self.sampler.choose(logits, None if allowed is None else allowed(self.output))
        if token is not None:
            self.output.append(token)
        return token

    def finish_reason(self) -> FinishReason | None:
        """Say why the sequence ends with its newest token; None when it goes on."""
        request = self.request
        if self.output and self.output[-1] in request.end_ids:
            return "stop"
        for stop in request.stop_sequences:
            if stop and tuple(self.output[-len(stop) :]) == tuple(stop):
                return "stop"
        return "length" if len(self.output) >= self.max_tokens else None


@dataclass(frozen=True, slots=True)
class Step:
    """The packed tokens of one step, and whose they are."""

    sequences: tuple[Sequence, ...]
    segments: tuple[Segment, ...]
    token_ids: npt.NDArray[np.intp]


class Scheduler:
    """In-flight batching: requests take a slot when one is free and leave when they end.

    Every step runs one token of each decoding sequence, and fills up to ``max_num_tokens`` with prompt tokens of the
    others, oldest first: a long prompt is cut into chunks and does not hold up the rest.
    """

    def __init__(self, *, max_batch_size: int, max_num_tokens: int) -> None:
        self._max_batch_size = max_batch_size
        self._max_num_tokens = max(max_num_tokens, max_batch_size)
        self._waiting: deque[tuple[Request, int]] = deque()
        self.running: dict[str, Sequence] = {}

    def add(self, request: Request, max_tokens: int) -> None:
        """Queue a request."""
        self._waiting.append((request, max_tokens))

    def remove(self, request_id: str) -> bool:
        """Drop a waiting or running request; False when there is none of that id."""
        before = len(self._waiting)
        self._waiting = deque(entry for entry in self._waiting if entry[0].request_id != request_id)
        return self.running.pop(request_id, None) is not None or len(self._waiting) < before

    def live_ids(self) -> list[str]:
        """Return the ids of running and waiting requests, oldest first."""
        return [*self.running, *(request.request_id for request, _ in self._waiting)]

    def admit(self, new_caches: Iterable[KvCache]) -> None:
        """Move waiting requests into free slots, each with the next cache."""
        caches = iter(new_caches)
        while self._waiting and len(self.running) < self._max_batch_size:
            request, max_tokens = self._waiting.popleft()
            self.running[request.request_id] = Sequence(request, next(caches), max_tokens)

    def next_step(self) -> Step | None:
        """Choose the tokens of the next step and make room for them; None when nothing runs."""
        decoding = [sequence for sequence in self.running.values() if sequence.is_decoding]
        budget = self._max_num_tokens - len(decoding)
        chosen = [(sequence, 1) for sequence in decoding]
        for sequence in self.running.values():
            if not sequence.is_decoding and budget > 0:
                count = min(sequence.pending, budget)
                budget -= count
                chosen.append((sequence, count))
        if not chosen:
            return None
        segments: list[Segment] = []
        token_ids: list[int] = []
        for sequence, count in chosen:
            start = sequence.cache.length
            sequence.cache.reserve(start + count)
            segments.append(Segment(sequence.cache, len(token_ids), start, count))
            token_ids += sequence.next_tokens(count)
        return Step(tuple(sequence for sequence, _ in chosen), tuple(segments), np.asarray(token_ids, np.intp))
