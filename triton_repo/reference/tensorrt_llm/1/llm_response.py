"""Collect what the engine says about one sequence and lay it out as the outputs of the tensorrtllm backend."""

import time
from collections.abc import Callable, Iterable

import numpy as np
from llm_request import Call
from reference.request import TokenEvent, TokenLogprob


class Sequence:
    """One sampled sequence of one call.

    Shapes below leave out the batch dimension in front. n is the number of new tokens of this response, p the number
    of prompt tokens, k the alternatives asked for, v the vocabulary.

    Args:
        call: What was asked for.
        row: Row of the Triton request.
        index: Which of the call's sequences.
    """

    def __init__(self, call: Call, row: int, index: int) -> None:
        self.call = call
        self.finish_reason: str | None = None
        self.error = ""
        self._row = row
        self._index = index
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._generation_logits: list[np.ndarray] = []
        self._prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self._context_logits: np.ndarray | None = None
        self._sent = 0  # tokens that earlier responses held
        self._is_first = True
        self._arrived_ns = time.time_ns()
        self._first_ns = 0
        self._last_ns = 0

    def add(self, event: TokenEvent) -> None:
        """Take over one event of the engine."""
        if event.prompt_logprobs is not None:
            self._prompt_logprobs = event.prompt_logprobs
        if event.context_logits is not None:
            self._context_logits = event.context_logits
        if event.finish_reason is not None:
            self.finish_reason = event.finish_reason
            self.error = event.error
        # An end id closes the sequence and is not part of it; a stop word is.
        is_end = event.finish_reason == "stop" and event.token_id in self.call.template.end_ids
        if event.token_id is None or is_end:
            return
        self._tokens.append(event.token_id)
        if event.logprob is not None:
            self._logprobs.append(event.logprob)
        if event.generation_logits is not None:
            self._generation_logits.append(event.generation_logits)
        self._last_ns = time.time_ns()
        self._first_ns = self._first_ns or self._last_ns

    @property
    def is_due(self) -> bool:
        """Whether a response should be sent now."""
        return self.finish_reason is not None or (self.call.streaming and len(self._tokens) > self._sent)

    def take(self, wanted: Iterable[str]) -> dict[str, np.ndarray]:
        """Return the outputs of the next response, with batch dimension; tokens are handed out once.

        Args:
            wanted: Names the client asked for. Those that do not apply to this response are left out; what the
                backend always answers is there, empty if need be, since an ensemble needs every output of a step.
        """
        built = {name: _OUTPUTS[name](self) for name in wanted if name in _OUTPUTS}
        self._sent = len(self._tokens)
        self._generation_logits = []
        self._is_first = False
        return {name: array[np.newaxis] for name, array in built.items() if array is not None}

    @property
    def _new(self) -> list[int]:
        return self._tokens[self._sent :]

    def _output_ids(self) -> np.ndarray:
        return np.array([[*self.call.prompt_ids, *self._new] if self.call.include_input else self._new], np.int32)

    def _sequence_length(self) -> np.ndarray:
        return _integer(len(self.call.prompt_ids) * self.call.include_input + len(self._tokens) - self._sent)

    def _output_log_probs(self) -> np.ndarray:
        """[1, all tokens so far]: upstream repeats the earlier ones in every answer of a stream."""
        return np.array([[entry.logprob for entry in self._logprobs]], np.float32)

    def _cum_log_probs(self) -> np.ndarray:
        return self._output_log_probs().sum(axis=1, dtype=np.float64).astype(np.float32)

    def _first_context_logits(self) -> np.ndarray:
        """[p, v] in the first response when asked for, else [0, 0]."""
        is_there = self._is_first and self._context_logits is not None
        return np.asarray(self._context_logits if is_there else np.zeros((0, 0)), np.float32)

    def _new_generation_logits(self) -> np.ndarray:
        """[1, n, v] when asked for, else [0, 0, 0]."""
        rows = self._generation_logits
        return np.asarray(np.stack(rows)[np.newaxis] if rows else np.zeros((0, 0, 0)), np.float32)

    def _reason(self) -> np.ndarray | None:
        return None if self.finish_reason is None else np.array([self.finish_reason.encode()], np.object_)

    def _top(self) -> tuple[np.ndarray, np.ndarray] | None:
        depth = self.call.top_logprobs
        return _alternatives(self._logprobs[self._sent :], depth) if depth else None

    def _prompt(self) -> tuple[TokenLogprob | None, ...] | None:
        return self._prompt_logprobs if self._is_first else None

    def _prompt_token_logprobs(self) -> np.ndarray | None:
        entries = self._prompt()
        if entries is None:
            return None
        return np.array([np.nan if entry is None else entry.logprob for entry in entries], np.float32)

    def _prompt_top(self) -> tuple[np.ndarray, np.ndarray] | None:
        entries = self._prompt()
        return None if entries is None else _alternatives(entries, self.call.template.prompt_logprobs or 0)


def _integer(value: int) -> np.ndarray:
    return np.array([value], np.int32)


def _nanoseconds(value: int) -> np.ndarray:
    return np.array([value], np.int64)


def _part(pair: tuple[np.ndarray, np.ndarray] | None, which: int) -> np.ndarray | None:
    return None if pair is None else pair[which]


def _alternatives(
    entries: "list[TokenLogprob] | tuple[TokenLogprob | None, ...]", depth: int
) -> tuple[np.ndarray, np.ndarray]:
    """Lay alternatives out as ids and values [entries, depth]; -1 and NaN where an entry has none."""
    ids = np.full((len(entries), depth), -1, np.int32)
    values = np.full((len(entries), depth), np.nan, np.float32)
    for position, entry in enumerate(entries):
        for place, (token, logprob) in enumerate(entry.top[:depth] if entry is not None else ()):
            ids[position, place] = token
            values[position, place] = logprob
    return ids, values


# Output name to what makes it; None means that it does not apply to this response.
_OUTPUTS: dict[str, Callable[[Sequence], np.ndarray | None]] = {
    "output_ids": Sequence._output_ids,
    "sequence_length": Sequence._sequence_length,
    "cum_log_probs": Sequence._cum_log_probs,
    "output_log_probs": Sequence._output_log_probs,
    "context_logits": Sequence._first_context_logits,
    "generation_logits": Sequence._new_generation_logits,
    "batch_index": lambda sequence: _integer(sequence._row),
    "sequence_index": lambda sequence: _integer(sequence._index),
    "num_input_tokens": lambda sequence: _integer(len(sequence.call.prompt_ids)),
    "num_output_tokens": lambda sequence: _integer(len(sequence._new)),
    "arrival_time_ns": lambda sequence: _nanoseconds(sequence._arrived_ns),
    "first_scheduled_time_ns": lambda sequence: _nanoseconds(sequence._arrived_ns),  # joins the running batch at once
    "first_token_time_ns": lambda sequence: _nanoseconds(sequence._first_ns),
    "last_token_time_ns": lambda sequence: _nanoseconds(sequence._last_ns),
    # The reference engine's cache has no blocks, and it drafts nothing.
    "kv_cache_alloc_new_blocks": lambda _: _integer(0),
    "kv_cache_reused_blocks": lambda _: _integer(0),
    "kv_cache_alloc_total_blocks": lambda _: _integer(0),
    "total_accepted_draft_tokens": lambda _: _integer(0),
    "total_draft_tokens": lambda _: _integer(0),
    "acceptance_rate": lambda _: np.zeros(1, np.float32),
    "context_phase_params": lambda _: np.zeros(0, np.uint8),
    # This project's own.
    "finish_reason": Sequence._reason,
    "top_logprobs_ids": lambda sequence: _part(sequence._top(), 0),
    "top_logprobs": lambda sequence: _part(sequence._top(), 1),
    "prompt_token_logprobs": Sequence._prompt_token_logprobs,
    "prompt_top_ids": lambda sequence: _part(sequence._prompt_top(), 0),
    "prompt_top_logprobs": lambda sequence: _part(sequence._prompt_top(), 1),
    "preceding_ids": lambda sequence: np.array(sequence._tokens[: sequence._sent], np.int32),
    "is_last": lambda sequence: np.array([sequence.finish_reason is not None]),
}
