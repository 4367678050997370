"""Collect what the engine says about one sequence and lay it out as the outputs of the tensorrtllm backend."""

import time

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
        self.row = row
        self.index = index
        self.finish_reason: str | None = None
        self.error = ""
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._generation_logits: list[np.ndarray] = []
        self._prompt_logprobs: tuple | None = None
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

    def take(self, wanted: frozenset[str]) -> dict[str, np.ndarray]:
        """Return the outputs of the next response, with batch dimension; tokens are handed out once.

        Args:
            wanted: Names the client asked for.
        """
        new = self._tokens[self._sent :]
        outputs = {**self._token_outputs(new), **self._logit_outputs(), **self._counters(len(new))}
        outputs.update(self._own_outputs(wanted))
        self._sent = len(self._tokens)
        self._is_first = False
        return {name: array[np.newaxis] for name, array in outputs.items() if name in wanted}

    def _token_outputs(self, new: list[int]) -> dict[str, np.ndarray]:
        ids = [*self.call.prompt_ids, *new] if self.call.include_input else new
        logprobs = np.array([entry.logprob for entry in self._logprobs], np.float32)
        return {
            "output_ids": np.array([ids], np.int32),
            "sequence_length": np.array([len(ids)], np.int32),
            "cum_log_probs": np.array([logprobs.sum(dtype=np.float64)], np.float32),
            "output_log_probs": logprobs[np.newaxis],  # all so far, as upstream answers while streaming
        }

    def _logit_outputs(self) -> dict[str, np.ndarray]:
        """Return logits, empty when not asked for: an ensemble needs every output of a step."""
        context = self._context_logits if self._is_first else None
        rows, self._generation_logits = self._generation_logits, []
        generation = np.stack(rows)[np.newaxis] if rows else np.zeros((0, 0, 0), np.float32)
        return {
            "context_logits": np.zeros((0, 0), np.float32) if context is None else np.asarray(context, np.float32),
            "generation_logits": np.asarray(generation, np.float32),
        }

    def _counters(self, new: int) -> dict[str, np.ndarray]:
        integers = {
            "batch_index": self.row,
            "sequence_index": self.index,
            "kv_cache_alloc_new_blocks": 0,  # the reference engine's cache has no blocks and drafts nothing
            "kv_cache_reused_blocks": 0,
            "kv_cache_alloc_total_blocks": 0,
            "total_accepted_draft_tokens": 0,
            "total_draft_tokens": 0,
            "num_input_tokens": len(self.call.prompt_ids),
            "num_output_tokens": new,
        }
        times = {
            "arrival_time_ns": self._arrived_ns,
            "first_scheduled_time_ns": self._arrived_ns,  # requests join the running batch at once
            "first_token_time_ns": self._first_ns,
            "last_token_time_ns": self._last_ns,
        }
        return {
            **{name: np.array([value], np.int32) for name, value in integers.items()},
            **{name: np.array([value], np.int64) for name, value in times.items()},
            "acceptance_rate": np.zeros(1, np.float32),
            "context_phase_params": np.zeros(0, np.uint8),
        }

    def _own_outputs(self, wanted: frozenset[str]) -> dict[str, np.ndarray]:
        """Return this project's outputs; those that do not apply to this response are left out."""
        outputs = {
            "preceding_ids": np.array(self._tokens[: self._sent], np.int32),
            "is_last": np.array([self.finish_reason is not None]),
        }
        if self.finish_reason is not None:
            outputs["finish_reason"] = np.array([self.finish_reason.encode()], np.object_)
        if self.call.top_logprobs and "top_logprobs" in wanted:
            entries = self._logprobs[self._sent :]
            outputs["top_logprobs_ids"], outputs["top_logprobs"] = _alternatives(entries, self.call.top_logprobs)
        if self._is_first and self._prompt_logprobs is not None:
            entries = self._prompt_logprobs
            own = [np.nan if entry is None else entry.logprob for entry in entries]
            outputs["prompt_token_logprobs"] = np.array(own, np.float32)
            depth = self.call.template.prompt_logprobs or 0
            outputs["prompt_top_ids"], outputs["prompt_top_logprobs"] = _alternatives(entries, depth)
        return outputs


def _alternatives(entries: "list[TokenLogprob | None] | tuple", depth: int) -> "tuple[np.ndarray, np.ndarray]":
    """Lay alternatives out as [entries, depth]; -1 and NaN where an entry has none."""
    ids = np.full((len(entries), depth), -1, np.int32)
    values = np.full((len(entries), depth), np.nan, np.float32)
    for position, entry in enumerate(entries):
        for place, (token, logprob) in enumerate(entry.top[:depth] if entry is not None else ()):
            ids[position, place] = token
            values[position, place] = logprob
    return ids, values
