"""``/v1/completions``: text or token ids in, text out."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import orjson

from pipeline.frontend.api_errors import bad_request, unsupported
from pipeline.frontend.backend import Features, Logprob
from pipeline.frontend.generation import Answer
from pipeline.frontend.guides import guide_of
from pipeline.frontend.logprobs_format import LogprobsWriter, joined, prompt_logprobs
from pipeline.frontend.schema import CompletionRequest
from pipeline.frontend.service import Delta, Job, Prompt, Service
from pipeline.frontend.streaming import DONE, event
from pipeline.frontend.usage import access_record, usage


@dataclass(frozen=True, slots=True)
class _Choice:
    """A job with the prompt it belongs to."""

    prompt: Prompt
    job: Job


class Completion:
    """One request, checked and ready to run."""

    def __init__(
        self,
        service: Service,
        body: CompletionRequest,
        prompts: list[Prompt],
        choices: list[_Choice],
        answer_id: str,
    ) -> None:
        self._service = service
        self._body = body
        self._prompts = prompts
        self._choices = choices
        self._per_prompt = len(choices) // len(prompts)
        self._head = {
            "id": answer_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": service.fingerprint,
        }
        self._prompt_scores: dict[int, dict[str, Any]] = {}
        self._answers: dict[int, Answer] = {}

    @classmethod
    async def prepare(cls, service: Service, body: CompletionRequest) -> Completion:
        """Check a request and put its sequences together; nothing is sent yet.

        Raises:
            ApiError: What is wrong with it.
        """
        service.resolve_model(body.model)
        features = await service.features()
        lora = service.adapter(body.model, features)
        _check(body, features)
        prompts = await _prompts(service, body, features)
        n, per_prompt = body.n or 1, max(body.n or 1, body.best_of or 1)
        if len(prompts) * per_prompt > service.settings.max_choices:
            raise bad_request(
                f"{len(prompts)} prompts with {per_prompt} answers each are more than "
                f"{service.settings.max_choices} sequences in one request.",
                "prompt",
            )
        sampling, guide = service.sampling(body, features), guide_of(body, features)
        limit = service.context_length(features)
        # best_of ranks by log probability, so it needs them even when the client does not.
        logprobs = 0 if body.logprobs is None and per_prompt > n else body.logprobs
        answer_id = f"cmpl-{uuid.uuid4().hex}"
        choices: list[_Choice] = []
        for prompt in prompts:
            rules = service.end_rules(body, service.room(prompt, body.max_tokens, 16, limit))
            for position in range(per_prompt):
                job = service.job(
                    request_id=f"{answer_id}-{len(choices)}",
                    body=body,
                    prompt=prompt,
                    sampling=replace(sampling, seed=((sampling.seed or 0) + position) % 2**64),
                    rules=rules,
                    logprobs=logprobs,
                    # A stream may show any of a prompt's answers first, so each brings the prompt's scores along.
                    prompt_logprobs=body.logprobs if body.echo and (position == 0 or body.stream) else None,
                    guide=guide,
                    lora_task_id=lora,
                )
                choices.append(_Choice(prompt, job))
        return cls(service, body, prompts, choices, answer_id)

    def record(self) -> dict[str, Any]:
        """Return what the access log says about the request, so far."""
        reasons = [answer.finish_reason for _, answer in sorted(self._answers.items())]
        prompts = [prompt.text for prompt in self._prompts]
        return access_record(self._body, self._usage(self._answers), reasons, prompts)

    async def response(self) -> dict[str, Any]:
        """Run and return the whole answer."""
        texts = [""] * len(self._choices)
        tokens: list[list[Any]] = [[] for _ in self._choices]
        answers = self._answers
        async with aclosing(self._deltas()) as deltas:
            async for delta in deltas:
                texts[delta.job] += delta.text
                tokens[delta.job] += delta.tokens
                answers[delta.job] = delta.answer
        choices: list[dict[str, Any]] = []
        for index in self._best(answers):
            written = None
            if self._body.logprobs is not None:
                written = self._writer(index).completion(tokens[index], self._base(index))
                written = joined(self._prompt_score(index), written) if self._body.echo else written
            text = (self._choices[index].prompt.text if self._body.echo else "") + texts[index]
            reason = answers[index].finish_reason
            choices.append({"index": len(choices), "text": text, "logprobs": written, "finish_reason": reason})
        return {**self._head, "choices": choices, "usage": self._usage(answers)}

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Run and yield events."""
        options = self._body.stream_options
        extra = {"usage": None} if options and options.include_usage else {}
        writers = [self._writer(index) for index in range(len(self._choices))]
        answers = self._answers
        before = [_before(self._head, index) for index in range(len(self._choices))]
        after = b',"logprobs":null,"finish_reason":null}]' + (b',"usage":null' if extra else b"") + b"}\n\n"
        async with aclosing(self._deltas()) as deltas:
            async for delta in deltas:
                index, data = delta.job, b""
                if index not in answers and self._body.echo:
                    written = self._prompt_score(index) if self._body.logprobs is not None else None
                    text = self._choices[index].prompt.text
                    data += event({**self._head, "choices": [_choice(index, text, written, None)], **extra})
                answers[index] = delta.answer
                if self._body.logprobs is None:
                    if delta.text:
                        data += before[index] + orjson.dumps(delta.text) + after
                elif delta.text or delta.tokens:
                    written = writers[index].completion(delta.tokens, self._base(index))
                    data += event({**self._head, "choices": [_choice(index, delta.text, written, None)], **extra})
                if delta.answer.finish_reason is not None:
                    last = _choice(index, "", None, delta.answer.finish_reason)
                    data += event({**self._head, "choices": [last], **extra})
                if data:
                    yield data
        if extra:
            yield event({**self._head, "choices": [], "usage": self._usage(answers)})
        yield DONE

    async def _deltas(self) -> AsyncGenerator[Delta, None]:
        """Run what has to run; with max_tokens 0 that may be nothing."""
        if self._body.max_tokens == 0 and not (self._body.echo and self._body.logprobs is not None):
            for index, choice in enumerate(self._choices):
                answer = Answer(self._service.tokenizer, choice.job.rules)
                answer.end()
                yield Delta(index, "", [], answer)
            return
        async with aclosing(self._service.run([choice.job for choice in self._choices])) as deltas:
            async for delta in deltas:
                if delta.prompt_logprobs is not None:
                    self._keep_prompt_score(delta.job, list(delta.prompt_logprobs))
                yield delta

    def _keep_prompt_score(self, index: int, entries: list[Logprob | None]) -> None:
        ids = self._choices[index].prompt.token_ids
        score = prompt_logprobs(self._service.tokenizer, ids, entries, self._body.logprobs or 0)
        self._prompt_scores[index // self._per_prompt] = score

    def _prompt_score(self, index: int) -> dict[str, Any]:
        known = self._prompt_scores.get(index // self._per_prompt)
        if known is not None:
            return known
        ids = self._choices[index].prompt.token_ids
        return prompt_logprobs(self._service.tokenizer, ids, [None] * len(ids), 0)

    def _writer(self, index: int) -> LogprobsWriter:
        return LogprobsWriter(self._service.tokenizer, self._body.logprobs or 0)

    def _base(self, index: int) -> int:
        return len(self._choices[index].prompt.text) if self._body.echo else 0

    def _best(self, answers: dict[int, Answer]) -> list[int]:
        """Return the jobs to show: per prompt the n with the highest log probability per token."""
        n = self._body.n or 1
        shown: list[int] = []
        for start in range(0, len(self._choices), self._per_prompt):
            candidates = list(range(start, start + self._per_prompt))
            if self._per_prompt > n:
                candidates.sort(key=lambda index: -_mean_logprob(answers[index]))
            shown += candidates[:n]
        return shown

    def _usage(self, answers: dict[int, Answer]) -> dict[str, Any]:
        return usage(sum(len(prompt.token_ids) for prompt in self._prompts), answers.values())


def _mean_logprob(answer: Answer) -> float:
    return answer.cumulative_logprob / max(1, answer.completion_tokens)


def _choice(index: int, text: str, logprobs: Any, reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _before(head: dict[str, Any], index: int) -> bytes:
    """Return a text event up to the text; the same for all of a stream, so it is made once."""
    return b"data: " + orjson.dumps(head)[:-1] + b',"choices":[{"index":%d,"text":' % index


def _check(body: CompletionRequest, features: Features) -> None:
    """Refuse combinations that cannot be honoured."""
    if body.suffix:
        raise unsupported("suffix is not supported: this model does not fill in the middle.", "suffix")
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options is only allowed when stream is true.", "stream_options")
    if body.best_of is not None and body.best_of < (body.n or 1):
        raise bad_request(f"best_of is {body.best_of}, expected at least n = {body.n}.", "best_of")
    if body.best_of is not None and body.best_of > (body.n or 1):
        if body.stream:
            raise bad_request("best_of cannot be combined with stream.", "best_of")
        if not features.logprobs:
            raise unsupported("best_of needs log probabilities, which this model does not give.", "best_of")
    if body.logprobs is None:
        return
    if not features.logprobs:
        raise unsupported("This model does not give log probabilities.", "logprobs")
    if body.logprobs and not features.top_logprobs:
        raise unsupported("This model gives log probabilities of chosen tokens only; use logprobs 0.", "logprobs")
    if body.echo and not features.prompt_logprobs:
        raise unsupported("This model gives no log probabilities of prompts; use echo without logprobs.", "logprobs")


async def _prompts(service: Service, body: CompletionRequest, features: Features) -> list[Prompt]:
    """Return the prompts in order."""
    given: Any = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if not given:
        raise bad_request("prompt is an empty list, expected text or token ids.", "prompt")
    if isinstance(given[0], int):
        given = [given]
    size = max(service.tokenizer.vocab_size, features.vocab_size or 0)
    prompts = []
    for entry in given:
        if isinstance(entry, str):
            ids = await service.encode(entry, add_special_tokens=body.add_special_tokens)
            prompts.append(Prompt(ids or _begin(service), entry, "prompt"))
            continue
        ids = list(entry)
        if features.takes_text:
            raise unsupported("This model takes text; give the prompt as text.", "prompt")
        if ids and max(ids) >= size:
            raise bad_request(f"prompt holds token id {max(ids)}, expected ids below {size}.", "prompt")
        prompts.append(Prompt(ids or _begin(service), service.tokenizer.decode(ids), "prompt"))
    return prompts


def _begin(service: Service) -> list[int]:
    """Return what stands for an empty prompt: the token that begins, or else ends, a document."""
    if service.tokenizer.bos_id is not None:
        return [service.tokenizer.bos_id]
    if service.tokenizer.eos_ids:
        return [service.tokenizer.eos_ids[0]]
    raise bad_request("The prompt is empty, and this model has no token to begin with.", "prompt")
