"""The reference engine: a TensorRT-LLM checkpoint executed in numpy.

It reads nothing but the checkpoint, so it can tell whether a conversion is right. It batches in flight, like the real
engine, so it can stand in for it behind Triton.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .attention import KvCache, Segment
from .errors import EngineError
from .loading import load_model
from .model import Model
from .request import EngineInfo, Generation, Request, TokenEvent, TokenLogprob
from .sampling import check_sampling, token_logprobs
from .scheduler import Scheduler, Step
from .scheduler import Sequence as Running
from .threads import MAX_AUTOMATIC, Workers, available_cpus, hold_blas_to_one_thread, requested_threads
from .weights import checkpoint_digest

F32 = npt.NDArray[np.float32]


class ReferenceEngine:
    """Runs one checkpoint. Not safe for use by several threads at once; see :class:`~.loop.EngineLoop`."""

    def __init__(
        self, model: Model, folder: Path, *, max_batch_size: int, max_num_tokens: int, threads: int | None = None
    ) -> None:
        hold_blas_to_one_thread()
        self.model = model
        self.max_seq_len = model.max_seq_len
        self._folder = folder
        self._max_num_tokens = max_num_tokens
        self._is_automatic = threads is None
        self._workers = Workers(threads or min(available_cpus(), MAX_AUTOMATIC))
        self._scheduler = Scheduler(max_batch_size=max_batch_size, max_num_tokens=max_num_tokens)
        self._reports: list[TokenEvent] = []

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        max_batch_size: int = 16,
        max_seq_len: int | None = None,
        max_num_tokens: int = 256,
        threads: int | None = None,
    ) -> ReferenceEngine:
        """Load a checkpoint folder.

        Args:
            path: Folder with ``config.json`` and ``rank*.safetensors``.
            max_batch_size: Sequences that run at once.
            max_seq_len: Prompt plus output tokens; the model's own limit by default, and at most that.
            max_num_tokens: Tokens of one step; longer prompts are run in chunks.
            threads: Worker threads; None takes ``REFERENCE_ENGINE_THREADS`` or finds the best by measurement.

        Raises:
            EngineError: The checkpoint cannot be executed, or a limit is out of range.
        """
        for name, value in (("max_batch_size", max_batch_size), ("max_num_tokens", max_num_tokens)):
            if value < 1:
                raise EngineError(f"{name} is {value}; expected at least 1")
        model = load_model(Path(path), max_seq_len=max_seq_len)
        return cls(
            model,
            Path(path),
            max_batch_size=max_batch_size,
            max_num_tokens=max_num_tokens,
            threads=requested_threads(threads),
        )

    @cached_property
    def info(self) -> EngineInfo:
        """Say which engine this is; reads the whole checkpoint once for its digest."""
        return EngineInfo("reference", checkpoint_digest(self._folder), self.model.config.vocab_size, self.max_seq_len)

    @property
    def workers(self) -> Workers:
        """The threads, for whoever drives the model itself."""
        return self._workers

    @property
    def live(self) -> int:
        """Requests that are running or waiting."""
        return len(self._scheduler.live_ids())

    @property
    def has_work(self) -> bool:
        """Whether :meth:`step` has anything to do or to tell."""
        return bool(self._reports) or self.live > 0

    def submit(self, request: Request) -> None:
        """Take a request in; it joins the batch at the next step.

        A request that cannot run is answered by an ``error`` event of the next step.

        Raises:
            EngineError: A live request has the same id.
        """
        if request.request_id in self._scheduler.live_ids():
            raise EngineError(f"request id {request.request_id!r} is taken by a live request")
        room = self.max_seq_len - len(request.token_ids)
        problem = self._problem(request, room)
        if problem:
            self._reports.append(TokenEvent(request.request_id, finish_reason="error", error=problem))
        else:
            self._scheduler.add(request, min(request.max_tokens, room))

    def cancel(self, request_id: str) -> None:
        """End a request; its last event says ``cancelled``. An unknown or ended id is ignored."""
        if self._scheduler.remove(request_id):
            self._reports.append(TokenEvent(request_id, finish_reason="cancelled"))

    def abort_all(self) -> list[str]:
        """Drop every request without events, after a failure; returns their ids."""
        ids = self._scheduler.live_ids()
        for request_id in ids:
            self._scheduler.remove(request_id)
        return ids

    def step(self) -> list[TokenEvent]:
        """Run one step of the batch and return what happened; nothing may, while a long prompt is read in chunks."""
        events, self._reports = self._reports, []
        self._scheduler.admit(self._new_caches())
        step = self._scheduler.next_step()
        if step is not None:
            events += self._run(step)
        return events

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Run the requests, batched, and return them in the order given.

        Raises:
            EngineError: A request cannot run, ids repeat, or the engine has other live requests.
        """
        if self.live:
            raise EngineError(f"generate needs an idle engine; {self.live} requests are live")
        tokens: dict[str, list[TokenEvent]] = {request.request_id: [] for request in requests}
        reasons: dict[str, str] = {}
        try:
            for request in requests:
                self.submit(request)
            while len(reasons) < len(tokens):
                for event in self.step():
                    if event.finish_reason == "error":
                        raise EngineError(f"request {event.request_id!r}: {event.error}")
                    if event.token_id is not None:
                        tokens[event.request_id].append(event)
                    if event.finish_reason is not None:
                        reasons[event.request_id] = event.finish_reason
        finally:
            self.abort_all()
            self._reports.clear()
        return [
            Generation(
                name,
                tuple(event.token_id for event in events if event.token_id is not None),
                reasons[name],
                tuple(event.logprob for event in events if event.logprob is not None),
            )
            for name, events in tokens.items()
        ]

    def logits(self, token_ids: Sequence[int]) -> F32:
        """Return the logits of every position: [tokens, vocab] float32.

        Raises:
            EngineError: No tokens, too many, or ids outside the vocabulary.
        """
        problem = self._token_problem(token_ids, self.max_seq_len - len(token_ids))
        if problem:
            raise EngineError(problem)
        cache = self.model.new_cache()
        cache.reserve(len(token_ids))
        out = np.empty((len(token_ids), self.model.config.vocab_size), np.float32)
        for start in range(0, len(token_ids), self._max_num_tokens):
            chunk = np.asarray(token_ids[start : start + self._max_num_tokens], np.intp)
            hidden = self._forward(chunk, [Segment(cache, 0, start, chunk.size)])
            out[start : start + chunk.size] = self.model.logits(hidden, self._workers)
        return out

    def close(self) -> None:
        """End the worker threads."""
        self._workers.close()

    def _forward(self, token_ids: npt.NDArray[np.intp], segments: Sequence[Segment]) -> F32:
        if self._is_automatic:
            self._workers.choose(lambda: self.model.probe(self._workers))
        hidden = self.model.forward(token_ids, segments, self._workers)
        for segment in segments:
            segment.cache.length += segment.count
        return hidden

    def _run(self, step: Step) -> list[TokenEvent]:
        hidden = self._forward(step.token_ids, step.segments)
        firsts = [_first_scored(*pair) for pair in zip(step.sequences, step.segments, strict=True)]
        rows = [
            np.arange(segment.offset + first, segment.offset + segment.count)
            for first, segment in zip(firsts, step.segments, strict=True)
        ]
        needed = np.concatenate(rows)
        if not needed.size:
            return []
        logits = self.model.logits(np.ascontiguousarray(hidden[:, needed]), self._workers)
        ends = np.cumsum([some.size for some in rows])
        pairs = zip(step.sequences, np.split(logits, ends[:-1]), strict=True)
        return [event for sequence, some in pairs if (event := self._advance(sequence, some)) is not None]

    def _advance(self, sequence: Running, logits: F32) -> TokenEvent | None:
        """Take the logits of a sequence's newest positions; choose its next token unless its prompt is unfinished."""
        request = sequence.request
        is_first = not sequence.is_decoding
        if is_first and sequence.wants_prompt_scores:
            self._score_prompt(sequence, logits)
        if sequence.pending:
            return None
        token: int | None = None
        logprob: TokenLogprob | None = None
        if sequence.max_tokens > 0:
            try:
                token = sequence.choose(logits[-1])
            except ValueError as error:  # an EngineError, or what guides the request cannot go on
                self._scheduler.remove(request.request_id)
                return TokenEvent(request.request_id, finish_reason="error", error=str(error))
            if token is not None and request.logprobs is not None:
                logprob = token_logprobs(logits[-1:], [token], request.logprobs)[0]
        reason = "stop" if token is None and sequence.max_tokens > 0 else sequence.finish_reason()
        if reason is not None:
            self._scheduler.remove(request.request_id)
        is_scored = is_first and request.prompt_logprobs is not None
        return TokenEvent(
            request.request_id,
            token,
            logprob,
            reason,
            prompt_logprobs=tuple(sequence.prompt_logprobs) if is_scored else None,
            context_logits=np.concatenate(sequence.context_logits) if is_first and sequence.context_logits else None,
            generation_logits=logits[-1].copy() if request.return_generation_logits and token is not None else None,
        )

    def _score_prompt(self, sequence: Running, logits: F32) -> None:
        """Keep what was asked for of the newest prompt positions."""
        request = sequence.request
        if request.return_context_logits:
            sequence.context_logits.append(logits.copy())
        if request.prompt_logprobs is not None:
            end = sequence.cache.length
            targets = request.token_ids[end - len(logits) + 1 : end + 1]
            if targets:
                sequence.prompt_logprobs += token_logprobs(logits[: len(targets)], targets, request.prompt_logprobs)

    def _problem(self, request: Request, room: int) -> str:
        problem = self._token_problem(request.token_ids, room)
        if problem:
            return problem
        if request.max_tokens < 0:
            return f"max_tokens is {request.max_tokens}; expected at least 0"
        if room == 0 and request.max_tokens > 0:
            return f"a prompt of {len(request.token_ids)} tokens leaves no room in the context of {self.max_seq_len}"
        for name, value in (("logprobs", request.logprobs), ("prompt_logprobs", request.prompt_logprobs)):
            if value is not None and value < 0:
                return f"{name} is {value}; expected at least 0"
        return check_sampling(request.sampling, self.model.config.vocab_size)

    def _token_problem(self, token_ids: Sequence[int], room: int) -> str:
        if not token_ids:
            return "the prompt is empty; expected at least one token"
        if room < 0:
            return f"a prompt of {len(token_ids)} tokens is longer than the context of {self.max_seq_len}"
        vocab_size = self.model.config.vocab_size
        outside = [token for token in token_ids if not 0 <= token < vocab_size]
        return f"token id {outside[0]} is outside the vocabulary of {vocab_size}" if outside else ""

    def _new_caches(self) -> Iterator[KvCache]:
        while True:
            yield self.model.new_cache()


def _first_scored(sequence: Running, segment: Segment) -> int:
    """Return the first token of the segment whose logits are needed; ``segment.count`` for none."""
    if sequence.wants_prompt_scores and not sequence.is_decoding:
        return 0
    return segment.count if sequence.pending else segment.count - 1
