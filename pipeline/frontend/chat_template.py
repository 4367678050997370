"""Chat templates: where they are found and how they are rendered, as transformers does both."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from pipeline.chat_environment import chat_environment
from pipeline.errors import SourceError

# Stands behind a message that is to be continued; its space shows whether the template trims messages.
_MARK = "\N{INVISIBLE SEPARATOR}continue here\N{INVISIBLE SEPARATOR} "


class TemplateFailed(Exception):
    """A template refused the conversation or failed on it. The text is fit for the client."""


class ChatTemplates:
    """The templates of one tokenizer, compiled."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, Any]) -> None:
        """Compile all templates.

        Args:
            sources: Name to template text; ``default`` and ``tool_use`` have a meaning.
            special_tokens: Variables such as ``bos_token``.

        Raises:
            SourceError: A template has a syntax error.
        """
        self._special_tokens = dict(special_tokens)
        self._sources = dict(sources)
        self._templates: dict[str, jinja2.Template] = {}
        environment = chat_environment()
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
            except jinja2.TemplateSyntaxError as error:
                raise SourceError(f"Chat template {name!r} line {error.lineno}: {error.message}.") from error

    @classmethod
    def from_folder(
        cls, folder: Path, special_tokens: Mapping[str, Any], *, override: Path | None = None
    ) -> ChatTemplates:
        """Find the templates of a tokenizer folder.

        Raises:
            SourceError: A file cannot be read, or a template has a syntax error.
        """
        if override is not None:
            return cls({"default": _read(override)}, special_tokens)
        return cls(find_templates(folder), special_tokens)

    def __bool__(self) -> bool:
        return bool(self._templates)

    def mentions(self, word: str) -> bool:
        """Say whether any template names a word, such as a role."""
        return any(word in source for source in self._sources.values())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text.

        Args:
            messages: The conversation; values are strings, lists and dicts only.
            tools: Function descriptions; chooses the ``tool_use`` template where there is one.
            add_generation_prompt: Open the assistant's turn.
            continue_final_message: Leave the last message open instead.
            variables: More template variables; they win over the special tokens.

        Raises:
            TemplateFailed: No template fits, or it failed.
        """
        template = self._choose(tools)
        arguments: dict[str, Any] = {
            **self._special_tokens,
            "documents": None,
            **(variables or {}),
            "messages": _with_mark(messages) if continue_final_message else list(messages),
            "tools": list(tools) if tools is not None else None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        try:
            text = template.render(arguments)
        except jinja2.TemplateError as error:
            reason = error.message or "no reason given"
            raise TemplateFailed(f"The chat template refused the messages: {reason}") from error
        except (RecursionError, MemoryError, OverflowError) as error:
            raise TemplateFailed("The chat template needs too many resources for these messages.") from error
        except Exception as error:  # a template can raise whatever its expressions raise
            raise TemplateFailed(f"The chat template failed on the messages ({type(error).__name__}).") from error
        return _cut_at_mark(text) if continue_final_message else text

    def _choose(self, tools: Sequence[Mapping[str, Any]] | None) -> jinja2.Template:
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        if name in self._templates:
            return self._templates[name]
        if not self._templates:
            raise TemplateFailed("This model has no chat template; use /v1/completions, or configure a template.")
        raise TemplateFailed(f"This model has no default chat template, only {sorted(self._templates)}.")


def find_templates(folder: Path) -> dict[str, str]:
    """Return name to template text.

    Separate files win over the tokenizer configuration: ``chat_template.jinja`` is the default,
    ``additional_chat_templates/*.jinja`` are named. Then ``chat_template`` of tokenizer_config.json (a text or a list
    of named texts), then ``chat_template.json``.

    Raises:
        SourceError: A file cannot be read, or its chat_template is neither a text nor a list of named texts.
    """
    found: dict[str, str] = {}
    single = folder / "chat_template.jinja"
    if single.is_file():
        found["default"] = _read(single)
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[path.name.removesuffix(".jinja")] = _read(path)
    for name in ("tokenizer_config.json", "chat_template.json"):
        if found or not (folder / name).is_file():
            continue
        try:
            document = json.loads(_read(folder / name))
        except (ValueError, RecursionError) as error:
            raise SourceError(f"{folder / name} is not JSON: {error}.") from error
        value = document.get("chat_template") if isinstance(document, dict) else None
        found = {"default": value} if isinstance(value, str) else _named(value, folder / name)
    return found


def _named(value: Any, path: Path) -> dict[str, str]:
    """Return the templates of a list of named texts; no list at all has none."""
    entries = [] if value is None else value
    if not isinstance(entries, list):
        raise SourceError(f"{path}: chat_template is a {type(entries).__name__}, expected a text or a list.")
    found = {}
    for entry in entries:
        name, text = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(text, str):
            raise SourceError(f"{path}: chat_template has {entry!r}, expected an object with name and template.")
        found[name] = text
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"Cannot read the chat template {path}: {error}.") from error


def _with_mark(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages with a mark behind the text of the last one."""
    final = dict(messages[-1])
    content = final.get("content")
    if isinstance(content, str) and content.strip():
        final["content"] = content + _MARK
        return [*messages[:-1], final]
    if isinstance(content, list):
        parts = [dict(part) for part in content]
        for part in reversed(parts):
            if str(part.get("text") or "").strip():
                part["text"] += _MARK
                final["content"] = parts
                return [*messages[:-1], final]
    raise TemplateFailed("The final message has no text to continue.")


def _cut_at_mark(text: str) -> str:
    """End the prompt where the mark stands; a template that trims the message trims its space too."""
    position = text.rfind(_MARK.strip())
    if position < 0:
        raise TemplateFailed("The chat template drops the final message, so it cannot be continued.")
    cut = text[:position]
    return cut if text.startswith(_MARK, position) else cut.rstrip()
