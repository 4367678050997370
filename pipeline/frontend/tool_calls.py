"""Tool calls as text: parsers that turn what a model writes into OpenAI's tool calls, while it is being written.

A parser is fed text and gives back parts: plain text for ``content``, or :class:`ToolDelta`. Arguments are passed on
as the model writes them, so the client sees them grow; a call becomes known when its name is complete.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from pipeline.frontend.json_scan import Member, ObjectScanner


class ToolDelta(NamedTuple):
    """New characters of one call.

    Attributes:
        call: Position among the calls of the message.
        name: Set in the first delta of a call.
        arguments: More of the JSON text of the arguments.
        call_id: Set in the first delta of a call.
    """

    call: int
    name: str | None = None
    arguments: str = ""
    call_id: str | None = None


Part = str | ToolDelta

# What stands in front of calls; in many vocabularies these are special tokens.
TOOL_MARKS: dict[str, tuple[str, ...]] = {
    "llama3": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]",),
    "hermes": ("<tool_call>", "</tool_call>"),
}


class ToolParser(Protocol):
    """Reads one answer."""

    def push(self, text: str) -> list[Part]:
        """Take more text; return what is known."""

    def finish(self) -> list[Part]:
        """End the answer; return the rest. Text that turned out not to be a call comes back as text."""


def new_call_id() -> str:
    """Return an id for a call."""
    return f"call_{uuid.uuid4().hex[:24]}"


class CallReader:
    """Reads one JSON object ``{"name": …, "arguments": {…}}`` and emits its deltas."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._scanner = ObjectScanner(streamed=("arguments", "parameters"), whole=("name",))
        self._name: str | None = None
        self._early = ""
        self.raw = ""

    @property
    def known(self) -> bool:
        """Whether the name has been seen."""
        return self._name is not None

    @property
    def done(self) -> bool:
        """Whether the object is complete."""
        return self._scanner.done

    @property
    def failed(self) -> bool:
        """Whether the text is not such an object."""
        return self._scanner.failed or (self._scanner.done and self._name is None)

    def push(self, text: str) -> tuple[list[Part], str]:
        """Take more text; return deltas and what stands behind the object."""
        members, rest = self._scanner.push(text)
        self.raw += text[: len(text) - len(rest)]
        return self._deltas(members), rest

    def _deltas(self, members: Sequence[Member]) -> list[Part]:
        parts: list[Part] = []
        for member in members:
            if member.key == "name":
                name = _json_text(member.text)
                if name:
                    self._name = name
                    parts.append(ToolDelta(self._index, name, self._early, new_call_id()))
            elif self._name is None:
                self._early += member.text
            else:
                parts.append(ToolDelta(self._index, arguments=member.text))
        return parts


class _CallList:
    """State that all parsers share: text before calls, and one call after another."""

    def __init__(self) -> None:
        self.count = 0
        self.reader: CallReader | None = None

    def open(self) -> CallReader:
        self.reader = CallReader(self.count)
        return self.reader

    def close(self) -> None:
        if self.reader is not None and self.reader.known:
            self.count += 1
        self.reader = None


class HermesParser:
    """``<tool_call>{"name": …, "arguments": …}</tool_call>``, any number, text between them (Hermes, Qwen)."""

    _OPEN, _CLOSE = TOOL_MARKS["hermes"]

    def __init__(self) -> None:
        self._calls = _CallList()
        self._held = ""
        self._inside = False

    def push(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while self._held:
            before = (len(self._held), self._inside)
            parts += self._inner() if self._inside else self._outer()
            if (len(self._held), self._inside) == before:
                break
        return parts

    def finish(self) -> list[Part]:
        held, self._held = self._held, ""
        reader = self._calls.reader
        if not self._inside:
            return [held] if held.strip() or self._calls.count == 0 else []
        if reader is None or reader.known:
            return []
        return [self._OPEN + reader.raw + held]

    def _outer(self) -> list[Part]:
        position = self._held.find(self._OPEN)
        if position >= 0:
            text, self._held = self._held[:position], self._held[position + len(self._OPEN) :]
            self._inside = True
            self._calls.open()
            return _text(text, strip=self._calls.count > 0)
        keep = _overlap(self._held, self._OPEN)
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return _text(text, strip=self._calls.count > 0)

    def _inner(self) -> list[Part]:
        reader = self._calls.reader
        if reader is not None and not reader.done and not reader.failed:
            parts, self._held = reader.push(self._held)
            return parts
        position = self._held.find(self._CLOSE)
        if position < 0:
            return []
        skipped, self._held = self._held[:position], self._held[position + len(self._CLOSE) :]
        self._inside = False
        if reader is not None and reader.failed:
            self._calls.close()
            return [self._OPEN + reader.raw + skipped + self._CLOSE]
        self._calls.close()
        return []


class JsonCallsParser:
    """Calls written as JSON, alone or in a list or separated by ``;``, behind an optional mark.

    Serves Mistral (``[TOOL_CALLS][{…}, {…}]``) and Llama 3 (``<|python_tag|>{…}; {…}`` or ``{…}`` as the whole
    answer). An answer that does not begin with the mark or an object is text.
    """

    def __init__(self, mark: str, *, bare_objects: bool, listed: bool) -> None:
        """Set the format.

        Args:
            mark: Text in front of the calls.
            bare_objects: Whether an answer that begins with ``{`` is a call without a mark.
            listed: Whether calls stand in a JSON list.
        """
        self._mark = mark
        self._bare = bare_objects
        self._separators = " \t\r\n,;[]" if listed else " \t\r\n,;"
        self._calls = _CallList()
        self._held = ""
        self._state = "start"

    def push(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        if self._state == "start":
            parts += self._begin(final=False)
        if self._state == "text":
            parts += self._plain()
        if self._state == "calls":
            parts += self._read()
        return parts

    def finish(self) -> list[Part]:
        parts: list[Part] = self._begin(final=True) if self._state == "start" else []
        if self._state == "calls":
            parts += self._read()
            reader = self._calls.reader
            if reader is not None and not reader.known:
                parts.append(reader.raw + self._held)
            elif reader is None and self._held.strip():
                parts.append(self._held)
        elif self._held:
            parts.append(self._held)
        self._held = ""
        return parts

    def _begin(self, *, final: bool) -> list[Part]:
        """Decide what the answer begins with."""
        stripped = self._held.lstrip()
        if not final and (not stripped or self._mark.startswith(stripped)):
            return []
        if stripped.startswith(self._mark) and self._mark:
            self._held = stripped[len(self._mark) :]
            self._state = "calls"
        elif self._bare and stripped.startswith("{"):
            self._held = stripped
            self._state = "calls"
        else:
            self._state = "text"
        return []

    def _plain(self) -> list[Part]:
        """Pass text on up to a mark."""
        position = self._held.find(self._mark)
        if position >= 0:
            text, self._held = self._held[:position], self._held[position + len(self._mark) :]
            self._state = "calls"
            return _text(text, strip=False)
        keep = _overlap(self._held, self._mark)
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return _text(text, strip=False)

    def _read(self) -> list[Part]:
        parts: list[Part] = []
        while self._held:
            reader = self._calls.reader
            if reader is None:
                rest = self._held.lstrip(self._separators)
                if not rest:
                    self._held = ""
                    break
                if rest[0] != "{":
                    self._state, text, self._held = "text", rest, ""
                    parts += _text(text, strip=False)
                    break
                self._held = rest
                reader = self._calls.open()
            found, self._held = reader.push(self._held)
            parts += found
            if reader.failed:
                parts.append(reader.raw + self._held)
                self._held, self._state = "", "text"
                self._calls.close()
                break
            if not reader.done:
                break
            self._calls.close()
        return parts


def tool_parser(name: str) -> ToolParser:
    """Return a fresh parser: ``llama3``, ``mistral`` or ``hermes``."""
    if name == "hermes":
        return HermesParser()
    if name == "mistral":
        return JsonCallsParser(TOOL_MARKS[name][0], bare_objects=False, listed=True)
    return JsonCallsParser(TOOL_MARKS["llama3"][0], bare_objects=True, listed=False)


def _text(text: str, *, strip: bool) -> list[Part]:
    """Return text as a part; between calls, space alone is no content."""
    return [text] if text and not (strip and not text.strip()) else []


def _overlap(text: str, mark: str) -> int:
    """Return how many characters at the end of a text may begin a mark."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-size:]):
            return size
    return 0


def _json_text(text: str) -> str | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
