"""From checked fields to sequences running on the backend, shared by the generating endpoints."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import NamedTuple

from pipeline.engines.reference.request import Sampling
from pipeline.frontend import api_errors
from pipeline.frontend.admission import Admission
from pipeline.frontend.api_errors import ApiError, bad_request, unsupported
from pipeline.frontend.backend import (
    Backend,
    BackendError,
    BackendOverloaded,
    BackendUnavailable,
    Features,
    GenerateRequest,
    Guide,
    Logprob,
    PromptRejected,
)
from pipeline.frontend.chat_template import ChatTemplates
from pipeline.frontend.generation import Answer, EndRules, ShownToken, stop_words
from pipeline.frontend.metrics import Metrics
from pipeline.frontend.schema import Generation
from pipeline.frontend.settings import FrontendSettings
from pipeline.frontend.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

# Texts longer than this are encoded in a thread, so that other streams go on.
_THREAD_CHARS = 16_384


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one sequence starts from.

    Attributes:
        token_ids: The ids.
        text: What echo returns.
        field: Request field it came from.
    """

    token_ids: list[int]
    text: str
    field: str


@dataclass(frozen=True, slots=True)
class Job:
    """One sequence to run: what is sent and what ends it."""

    request: GenerateRequest
    rules: EndRules


class Delta(NamedTuple):
    """What became known about one sequence.

    Attributes:
        job: Position of its job.
        text: New text.
        tokens: Tokens whose text begins in it, when log probabilities were asked for.
        answer: State of the sequence; its ``finish_reason`` is set in the last delta.
        prompt_logprobs: Once, when asked for.
    """

    job: int
    text: str
    tokens: list[ShownToken]
    answer: Answer
    prompt_logprobs: Sequence[Logprob | None] | None = None


class Service:
    """Everything an endpoint needs."""

    def __init__(
        self, settings: FrontendSettings, tokenizer: Tokenizer, templates: ChatTemplates, backend: Backend
    ) -> None:
        self.settings = settings
        self.tokenizer = tokenizer
        self.templates = templates
        self.backend = backend
        self.metrics = Metrics(settings.name)
        self.admission = Admission(settings.max_in_flight, settings.max_queued, settings.queue_timeout_s)
        self.created = settings.created or int(time.time())
        self.fingerprint = "fp_" + secrets.token_hex(5)
        self.draining = False

    def adapter(self, name: str, features: Features) -> int | None:
        """Return the adapter's task id for a model name; None for the model itself.

        Raises:
            ApiError: 404, nobody serves this name; 400, the model takes no adapters.
        """
        task_id = self.resolve_model(name)
        if task_id is not None and not features.lora:
            raise unsupported(f"The model behind {name!r} takes no LoRA adapters.", "model")
        return task_id

    def resolve_model(self, name: str) -> int | None:
        """Return the adapter's task id for a model name; None for the model itself.

        Raises:
            ApiError: 404, nobody serves this name.
        """
        if name == self.settings.name or name in self.settings.aliases:
            return None
        if name in self.settings.lora:
            return self.settings.lora[name]
        raise api_errors.model_not_found(name)

    async def features(self) -> Features:
        """Return what the model can do.

        Raises:
            ApiError: 503, the model cannot be asked.
        """
        try:
            return await self.backend.features()
        except BackendError as error:
            raise as_api_error(error) from error

    def context_length(self, features: Features) -> int | None:
        """Return how many tokens prompt and answer may have together."""
        known = [n for n in (self.settings.max_seq_len, features.max_seq_len) if n is not None]
        return min(known) if known else self.tokenizer.model_max_length

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of a text."""
        if len(text) < _THREAD_CHARS:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)

    def room(self, prompt: Prompt, wanted: int | None, default: int | None, limit: int | None) -> int:
        """Return how many tokens the answer may have.

        Args:
            prompt: What comes first.
            wanted: The client's limit.
            default: The limit when the client gave none; None takes all that is left.
            limit: Context length.

        Raises:
            ApiError: 400 when the prompt, or prompt and answer, do not fit.
        """
        size = len(prompt.token_ids)
        longest = self.settings.max_input_len
        if longest is not None and size > longest:
            message = f"This model takes prompts of at most {longest} tokens, however the {prompt.field} has {size}."
            raise bad_request(message, prompt.field, "context_length_exceeded")
        if limit is None:
            return wanted if wanted is not None else default if default is not None else 2**15
        asked = 1 if wanted is None else wanted
        if size + asked > limit:
            message = (
                f"This model's maximum context length is {limit} tokens. However, you requested {size + asked} tokens "
                f"({size} in the {prompt.field}, {asked} in the completion). Please reduce the length of either."
            )
            raise bad_request(message, prompt.field, "context_length_exceeded")
        left = limit - size
        return wanted if wanted is not None else left if default is None else min(default, left)

    def sampling(self, body: Generation, features: Features) -> Sampling:
        """Return complete sampling values; what the client left out has OpenAI's defaults.

        Raises:
            ApiError: 400 for what this model cannot do.
        """
        temperature = 1.0 if body.temperature is None else body.temperature
        # top_p 0 keeps only the most likely token; backends take 0 as "not given".
        top_p = 1.0 if body.top_p is None else body.top_p
        if features.takes_text and (body.ignore_eos or body.stop_token_ids):
            field = "ignore_eos" if body.ignore_eos else "stop_token_ids"
            raise unsupported(
                f"This model takes text and decides itself which token ends it; {field} has no effect.", field
            )
        if body.min_p and not features.min_p:
            raise unsupported("This model does not support min_p.", "min_p")
        bias = self._logit_bias(body, features) if body.logit_bias else {}
        return Sampling(
            temperature=0.0 if top_p == 0 else temperature,
            top_k=max(0, body.top_k or 0),
            top_p=top_p or 1.0,
            min_p=body.min_p or 0.0,
            repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            seed=secrets.randbits(63) if body.seed is None else body.seed % 2**64,
            logit_bias=bias,
        )

    def end_rules(self, body: Generation, max_tokens: int, kept_tokens: tuple[str, ...] = ()) -> EndRules:
        """Return what ends an answer.

        Args:
            body: The request.
            max_tokens: From :meth:`room`.
            kept_tokens: Special tokens that stay visible in the text.

        Raises:
            ApiError: 400 for a stop string beyond the limit.
        """
        limit = self.settings.max_stop_chars
        if any(len(stop) > limit for stop in body.stop or ()):
            raise bad_request(f"A stop string is longer than {limit} characters.", "stop")
        return EndRules(
            max_tokens=max_tokens,
            stop_strings=tuple(dict.fromkeys(body.stop or ())),
            stop_ids=frozenset(body.stop_token_ids or ()),
            eos_ids=frozenset() if body.ignore_eos else frozenset(self.tokenizer.eos_ids),
            include_stop=body.include_stop_str_in_output,
            kept_tokens=kept_tokens,
        )

    def job(
        self,
        *,
        request_id: str,
        body: Generation,
        prompt: Prompt,
        sampling: Sampling,
        rules: EndRules,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        guide: Guide | None = None,
        lora_task_id: int | None = None,
    ) -> Job:
        """Put one sequence together."""
        end_id = self.tokenizer.eos_ids[0] if self.tokenizer.eos_ids and not body.ignore_eos else None
        request = GenerateRequest(
            request_id=request_id,
            token_ids=prompt.token_ids,
            max_tokens=rules.max_tokens,
            sampling=sampling,
            end_id=end_id,
            stop_words=stop_words(rules, end_id),
            min_tokens=body.min_tokens or 0,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            guide=guide,
            lora_task_id=lora_task_id,
            # A stop string is seen only by this side, so tokens must come as they are made.
            stream=bool(body.stream) or bool(rules.stop_strings),
            text=prompt.text,
        )
        return Job(request, rules)

    async def run(self, jobs: Sequence[Job]) -> AsyncGenerator[Delta, None]:
        """Run sequences at the same time; yield what becomes known, in order of arrival.

        Raises:
            ApiError: What the backend could not do, as an answer.
        """
        if len(jobs) == 1:
            async with aclosing(self._run_one(0, jobs[0])) as deltas:
                async for delta in deltas:
                    yield delta
            return
        async with aclosing(merge([self._starter(index, job) for index, job in enumerate(jobs)])) as deltas:
            async for delta in deltas:
                yield delta

    def _starter(self, index: int, job: Job) -> Callable[[], AsyncGenerator[Delta, None]]:
        return lambda: self._run_one(index, job)

    async def _run_one(self, index: int, job: Job) -> AsyncGenerator[Delta, None]:
        answer = Answer(self.tokenizer, job.rules)
        observed = self.metrics.sequence(len(job.request.token_ids))
        try:
            async with self.admission.place(), aclosing(self.backend.generate(job.request)) as chunks:
                async for chunk in chunks:
                    if chunk.finish_reason in ("cancelled", "error"):
                        raise BackendUnavailable(f"the model ended the sequence: {chunk.finish_reason}")
                    if answer.finish_reason is not None:
                        if chunk.token_ids:
                            break
                        continue
                    observed.tokens(len(chunk.token_ids) or bool(chunk.text))
                    text, tokens = answer.push(chunk)
                    yield Delta(index, text, tokens, answer, chunk.prompt_logprobs)
                    # The backend ends by itself at its limit and end tokens; cancelling it in that very moment would
                    # only be a race. It is cancelled where it cannot know of the end, or goes on all the same.
                    if answer.cut:
                        break
            if answer.finish_reason is None:
                text, tokens = answer.end()
                yield Delta(index, text, tokens, answer)
            observed.finish(answer.finish_reason or "stop", answer.completion_tokens)
        except BackendError as error:
            observed.finish("error", answer.completion_tokens)
            raise as_api_error(error) from error
        finally:
            # Neither finished nor failed: the client left.
            observed.finish("cancelled", answer.completion_tokens)

    def _logit_bias(self, body: Generation, features: Features) -> dict[int, float]:
        if not features.logit_bias:
            raise unsupported("This model does not support logit_bias.", "logit_bias")
        size = features.vocab_size or self.tokenizer.vocab_size
        bias = {}
        for key, value in (body.logit_bias or {}).items():
            if not (key.isascii() and key.isdigit()) or len(key) > 10 or int(key) >= size:
                raise bad_request(f"logit_bias holds {key[:32]!r}, expected token ids below {size}.", "logit_bias")
            bias[int(key)] = value
        return bias


async def merge(starters: Sequence[Callable[[], AsyncGenerator[Delta, None]]]) -> AsyncGenerator[Delta, None]:
    """Run iterators at the same time and yield their items as they come; the first failure ends all."""
    queue: asyncio.Queue[Delta | BaseException | None] = asyncio.Queue(maxsize=2 * len(starters))

    async def forward(start: Callable[[], AsyncGenerator[Delta, None]]) -> None:
        try:
            async with aclosing(start()) as items:
                async for item in items:
                    await queue.put(item)
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(forward(start)) for start in starters]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def as_api_error(error: BackendError) -> ApiError:
    """Return what the client hears of a backend's failure; the backend's own words go to the log."""
    if isinstance(error, PromptRejected):
        return bad_request(str(error))
    _log.warning("backend failed", extra={"reason": str(error)[:2000]})
    if isinstance(error, BackendUnavailable):
        return api_errors.unavailable("The model cannot be reached at the moment.")
    if isinstance(error, BackendOverloaded):
        return api_errors.overloaded("The model's queue is full.")
    return api_errors.internal("The model failed to generate an answer.")
