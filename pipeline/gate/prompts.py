"""The few prompts whose greedy continuations are checked for broken text."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib import resources

from pipeline.engines.protocol import Engine, Generation
from pipeline.engines.reference.request import Request
from pipeline.errors import SourceError

MAX_NEW_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, ready for the engine.

    Attributes:
        name: Short and unique.
        kind: ``chat`` (the text went through the model's chat template) or ``text``.
        text: What the user said.
        token_ids: What the engine gets.
    """

    name: str
    kind: str
    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Continuation:
    """What a model said to a prompt, greedily."""

    prompt: Prompt
    token_ids: tuple[int, ...]
    text: str


def render_chat(template: str, text: str, special_tokens: dict[str, str]) -> str:
    """Render a one-message conversation with a model's chat template, sandboxed.

    Args:
        template: Jinja source, as in tokenizer_config.json.
        text: The user's message.
        special_tokens: ``bos_token``, ``eos_token`` … as the template expects them.

    Raises:
        SourceError: The template does not render.
    """
    from pipeline.chat_environment import chat_environment

    environment = chat_environment()
    # A prompt that tells the date must be the same for a baseline of last week.
    environment.globals["strftime_now"] = datetime(2024, 7, 26).strftime
    variables = {
        **special_tokens,
        "documents": None,
        "messages": [{"role": "user", "content": text}],
        "tools": None,
        "add_generation_prompt": True,
    }
    try:
        return environment.from_string(template).render(variables)
    except Exception as error:  # a template can raise whatever its expressions raise
        raise SourceError(
            f"chat template of the model does not render: {type(error).__name__}: {error}",
            hint="the template is in tokenizer_config.json or chat_template.jinja of the source",
        ) from error


def shipped_prompts(
    encode: Callable[[str], Sequence[int]],
    *,
    chat_template: str | None = None,
    special_tokens: dict[str, str] | None = None,
) -> tuple[Prompt, ...]:
    """Encode the shipped prompts for one model.

    Args:
        encode: Text to ids; must not add special tokens but must recognise them (templates contain them).
        chat_template: Without one, chat prompts go in as plain text and are of kind ``text``.
        special_tokens: For the template.

    Raises:
        SourceError: The template does not render, or renders nothing.
    """
    raw = json.loads(resources.files("pipeline.gate").joinpath("data").joinpath("prompts.json").read_text("utf-8"))
    prompts = []
    for entry in raw:
        chat = entry["kind"] == "chat" and chat_template is not None
        text = render_chat(chat_template or "", entry["text"], special_tokens or {}) if chat else entry["text"]
        ids = tuple(int(token) for token in encode(text))
        if not ids:
            raise SourceError(f"the chat template makes an empty prompt of {entry['text']!r}")
        prompts.append(Prompt(entry["name"], "chat" if chat else "text", entry["text"], ids))
    return tuple(prompts)


def generate_greedily(
    engine: Engine, prompts: Sequence[Prompt], *, end_ids: Sequence[int], max_new_tokens: int
) -> list[Generation]:
    """Continue every prompt with the most probable tokens, batched."""
    return engine.generate(
        [
            Request(
                request_id=f"gate-{prompt.name}",
                token_ids=prompt.token_ids,
                max_tokens=max_new_tokens,
                end_ids=tuple(end_ids),
            )
            for prompt in prompts
        ]
    )
