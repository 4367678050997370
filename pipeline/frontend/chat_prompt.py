"""Messages as chat templates expect them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Protocol

from pipeline.frontend.api_errors import bad_request, unsupported
from pipeline.frontend.chat_template import TemplateFailed
from pipeline.frontend.schema import Message, Tool, ToolCall
from pipeline.frontend.service import Service

# Conversations longer than this are rendered in a thread.
_THREAD_CHARS = 16_384


class Conversation(Protocol):
    """The fields of a request that make its prompt."""

    messages: Any
    chat_template_kwargs: dict[str, Any] | None
    add_generation_prompt: bool
    continue_final_message: bool


async def render_chat(service: Service, body: Conversation, *, tools: Sequence[Tool] | None) -> str:
    """Return the prompt text.

    Raises:
        ApiError: 400 when a message cannot be shown to this model or its template refuses the conversation.
    """
    knows_developer = service.templates.mentions("developer")
    messages = [_plain(message, knows_developer=knows_developer) for message in body.messages]
    described = [tool.model_dump(exclude_none=True) for tool in tools] if tools else None

    def render() -> str:
        return service.templates.render(
            messages,
            tools=described,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            variables=body.chat_template_kwargs,
        )

    try:
        if sum(len(str(message["content"])) for message in messages) < _THREAD_CHARS:
            return render()
        return await asyncio.to_thread(render)
    except TemplateFailed as error:
        raise bad_request(str(error), "messages") from error


def _plain(message: Message, *, knows_developer: bool) -> dict[str, Any]:
    """Return a message as a dict without the fields that are not set."""
    role = message.role
    if role == "developer" and not knows_developer:
        role = "system"
    plain: dict[str, Any] = {"role": role, "content": _text(message)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, name)
        if value is not None:
            plain[name] = value
    if message.tool_calls:
        plain["tool_calls"] = [_call(call) for call in message.tool_calls]
    return plain


def _text(message: Message) -> str:
    """Return the text of a message; parts stand on lines of their own."""
    content = message.content
    if content is None:
        if message.role != "assistant":
            raise bad_request(f"A message with role {message.role} has no content.", "messages")
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        if part.type not in ("text", "input_text", "refusal"):
            message_text = f"A message has a part of type {part.type[:64]!r}; this model reads text only."
            raise unsupported(message_text, "messages")
        if part.text is None:
            raise bad_request("A text part of a message has no text.", "messages")
        texts.append(part.text)
    return "\n".join(texts)


def _call(call: ToolCall) -> dict[str, Any]:
    """Return a call with its arguments as a value, as templates expect; broken JSON stays text."""
    arguments: Any = call.function.arguments
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = arguments
        arguments = parsed if isinstance(parsed, dict) else arguments
    plain: dict[str, Any] = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    if call.id is not None:
        plain["id"] = call.id
    return plain
