"""``/v1/chat/completions``: a conversation in, the next message out."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import orjson

from pipeline.frontend.api_errors import bad_request, unsupported
from pipeline.frontend.backend import Features
from pipeline.frontend.chat_prompt import render_chat
from pipeline.frontend.generation import Answer
from pipeline.frontend.guides import guide_of
from pipeline.frontend.logprobs_format import LogprobsWriter
from pipeline.frontend.schema import ChatRequest
from pipeline.frontend.service import Delta, Job, Prompt, Service
from pipeline.frontend.streaming import DONE, event
from pipeline.frontend.tool_calls import Part, ToolDelta, ToolParser
from pipeline.frontend.tool_choice import ToolPlan, plan_tools
from pipeline.frontend.usage import access_record, usage


class _Turn:
    """One choice in the making: text, tool calls and log probabilities."""

    def __init__(self, service: Service, plan: ToolPlan, k: int) -> None:
        self.answer: Answer | None = None
        self.writer = LogprobsWriter(service.tokenizer, k)
        self._parser: ToolParser | None = plan.parser()
        self._plan = plan
        self.content = ""
        self.calls: list[dict[str, Any]] = []
        self.logprobs: list[dict[str, Any]] = []

    def take(self, delta: Delta) -> list[Part]:
        """Take a delta; return its parts."""
        self.answer = delta.answer
        if self._parser is None:
            parts: list[Part] = [delta.text] if delta.text else []
        else:
            parts = self._parser.push(delta.text) if delta.text else []
            if delta.answer.finish_reason is not None:
                parts += self._parser.finish()
        if self._plan.single:
            parts = [part for part in parts if isinstance(part, str) or part.call == 0]
        for part in parts:
            if isinstance(part, str):
                self.content += part
            else:
                self._add_call(part)
        return parts

    @property
    def finish_reason(self) -> str | None:
        """``tool_calls`` when the model ended with calls it chose to make."""
        reason = self.answer.finish_reason if self.answer else None
        return "tool_calls" if reason == "stop" and self.calls and self._plan.named is None else reason

    def message(self) -> dict[str, Any]:
        """Return the whole message."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content, "refusal": None}
        if self.calls:
            message["content"] = self.content if self.content.strip() else None
            message["tool_calls"] = self.calls
        return message

    def _add_call(self, delta: ToolDelta) -> None:
        if delta.name is not None:
            function = {"name": delta.name, "arguments": delta.arguments}
            self.calls.append({"id": delta.call_id, "type": "function", "function": function})
        else:
            self.calls[-1]["function"]["arguments"] += delta.arguments


class Chat:
    """One request, checked and ready to run."""

    def __init__(
        self, service: Service, body: ChatRequest, prompt: Prompt, jobs: list[Job], plan: ToolPlan, answer_id: str
    ) -> None:
        self._service = service
        self._body = body
        self._prompt = prompt
        self._jobs = jobs
        self._turns = [_Turn(service, plan, body.top_logprobs or 0) for _ in jobs]
        self._head = {
            "id": answer_id,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": service.fingerprint,
        }

    @classmethod
    async def prepare(cls, service: Service, body: ChatRequest) -> Chat:
        """Check a request and put its sequences together; nothing is sent yet.

        Raises:
            ApiError: What is wrong with it.
        """
        service.resolve_model(body.model)
        features = await service.features()
        lora = service.adapter(body.model, features)
        _check(body, features)
        plan = plan_tools(body, features, service.settings.tool_parser)
        guide = plan.guide or guide_of(body, features)
        text = await render_chat(service, body, tools=plan.shown)
        prompt = Prompt(await service.encode(text, add_special_tokens=False), text, "messages")
        if not prompt.token_ids:
            raise bad_request("The chat template made an empty prompt of these messages.", "messages")
        wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        room = service.room(prompt, wanted, None, service.context_length(features))
        rules = service.end_rules(body, room, plan.kept_tokens)
        sampling = service.sampling(body, features)
        answer_id = f"chatcmpl-{uuid.uuid4().hex}"
        jobs = [
            service.job(
                request_id=f"{answer_id}-{position}",
                body=body,
                prompt=prompt,
                sampling=replace(sampling, seed=((sampling.seed or 0) + position) % 2**64),
                rules=rules,
                logprobs=(body.top_logprobs or 0) if body.logprobs else None,
                guide=guide,
                lora_task_id=lora,
            )
            for position in range(body.n or 1)
        ]
        return cls(service, body, prompt, jobs, plan, answer_id)

    def record(self) -> dict[str, Any]:
        """Return what the access log says about the request, so far."""
        return access_record(
            self._body, self._usage(), [turn.finish_reason for turn in self._turns], [self._prompt.text]
        )

    async def response(self) -> dict[str, Any]:
        """Run and return the whole answer."""
        async with aclosing(self._service.run(self._jobs)) as deltas:
            async for delta in deltas:
                turn = self._turns[delta.job]
                turn.take(delta)
                if delta.tokens:
                    turn.logprobs += turn.writer.chat(delta.tokens)["content"]
        choices = [
            {
                "index": index,
                "message": turn.message(),
                "logprobs": {"content": turn.logprobs, "refusal": None} if self._body.logprobs else None,
                "finish_reason": turn.finish_reason,
            }
            for index, turn in enumerate(self._turns)
        ]
        return {**self._head, "choices": choices, "usage": self._usage()}

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Run and yield events."""
        options = self._body.stream_options
        extra = {"usage": None} if options and options.include_usage else {}
        head = {**self._head, "object": "chat.completion.chunk"}
        opening = b"data: " + orjson.dumps(head)[:-1] + b',"choices":[{"index":%d,"delta":'
        after = b',"finish_reason":null}]' + (b',"usage":null' if extra else b"") + b"}\n\n"
        plain = b'},"logprobs":null' + after
        async with aclosing(self._service.run(self._jobs)) as deltas:
            async for delta in deltas:
                index = delta.job
                turn, data, before = self._turns[index], b"", opening % index
                if turn.answer is None:
                    data += before + b'{"role":"assistant","content":"","refusal":null' + plain
                parts = turn.take(delta)
                if self._body.logprobs:
                    data += self._scored(before, parts, delta, turn, after)
                else:
                    for part in parts:
                        if isinstance(part, str):
                            data += before + b'{"content":' + orjson.dumps(part) + plain
                        else:
                            data += before + orjson.dumps(_tool_delta(part))[:-1] + plain
                if turn.finish_reason is not None:
                    last = {"index": index, "delta": {}, "logprobs": None, "finish_reason": turn.finish_reason}
                    data += event({**head, "choices": [last], **extra})
                if data:
                    yield data
        if extra:
            yield event({**head, "choices": [], "usage": self._usage()})
        yield DONE

    def _scored(self, before: bytes, parts: list[Part], delta: Delta, turn: _Turn, after: bytes) -> bytes:
        """Return events with log probabilities: they go with the first part of a delta."""
        written = orjson.dumps(turn.writer.chat(delta.tokens)) if delta.tokens else b"null"
        data = b""
        for part in parts or ([""] if delta.tokens else []):
            shown = {"content": part} if isinstance(part, str) else _tool_delta(part)
            data += before + orjson.dumps(shown) + b',"logprobs":' + written + after
            written = b"null"
        return data

    def _usage(self) -> dict[str, Any]:
        answers = [turn.answer for turn in self._turns if turn.answer is not None]
        return usage(len(self._prompt.token_ids), answers)


def _tool_delta(part: ToolDelta) -> dict[str, Any]:
    function: dict[str, Any] = {"arguments": part.arguments}
    call: dict[str, Any] = {"index": part.call, "function": function}
    if part.name is not None:
        function["name"] = part.name
        call |= {"id": part.call_id, "type": "function"}
    return {"tool_calls": [call]}


def _check(body: ChatRequest, features: Features) -> None:
    """Refuse combinations that cannot be honoured."""
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options is only allowed when stream is true.", "stream_options")
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs to be true.", "top_logprobs")
    if body.modalities is not None and body.modalities != ["text"]:
        raise unsupported("This model answers with text only.", "modalities")
    if body.continue_final_message and body.messages[-1].role != "assistant":
        raise bad_request("continue_final_message needs the last message to be the assistant's.", "messages")
    if not body.logprobs:
        return
    if not features.logprobs:
        raise unsupported("This model does not give log probabilities.", "logprobs")
    if body.top_logprobs and not features.top_logprobs:
        message = "This model gives log probabilities of chosen tokens only; use top_logprobs 0."
        raise unsupported(message, "top_logprobs")
