"""Follows a JSON object that arrives in pieces and hands out its top-level members."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# Deeper nesting is no tool call anybody wrote.
_MAX_DEPTH = 128


class Member(NamedTuple):
    """Text of a top-level member: all of it, or for streamed members the next piece."""

    key: str
    text: str


class ObjectScanner:
    """Reads one object, character by character, without building values.

    Attributes:
        done: The closing brace has been read.
        failed: The text is not an object.
    """

    def __init__(self, *, streamed: Sequence[str], whole: Sequence[str]) -> None:
        """Say which members are wanted.

        Args:
            streamed: Keys whose value is handed out as it comes.
            whole: Keys whose value is handed out when complete.
        """
        self._streamed = frozenset(streamed)
        self._whole = frozenset(whole)
        self._state = "open"
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._key = ""
        self._value = ""
        self._begun = False
        self.done = False
        self.failed = False

    def push(self, text: str) -> tuple[list[Member], str]:
        """Take more text; return members and what stands behind the object."""
        members: list[Member] = []
        position = 0
        while position < len(text) and not (self.done or self.failed):
            self._step(text[position], members)
            position += 1
        self._flush(members)
        return members, text[position:]

    def _step(self, character: str, members: list[Member]) -> None:
        if self._state == "value":
            self._value_step(character, members)
        elif self._state == "key":
            self._key_step(character)
        elif character.isspace():
            return
        elif self._state == "open":
            self._expect(character == "{", "member")
        elif self._state == "member":
            if character == "}":
                self.done = True
            elif character != ",":
                self._key = ""
                self._expect(character == '"', "key")
        elif self._state == "colon":
            self._expect(character == ":", "value")

    def _expect(self, as_expected: bool, state: str) -> None:
        if as_expected:
            self._state = state
        else:
            self.failed = True

    def _key_step(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._state = "colon"
            return
        self._key += character

    def _value_step(self, character: str, members: list[Member]) -> None:
        if self._in_string:
            self._value += character
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
            return
        if self._depth == 0 and character in ",}":
            self._end_value(members)
            self._state = "member"
            self.done = character == "}"
            return
        if character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
            self.failed = self._depth > _MAX_DEPTH
        elif character in "}]":
            self._depth -= 1
        if self._begun or not character.isspace():
            self._begun = True
            self._value += character

    def _end_value(self, members: list[Member]) -> None:
        text = self._value.rstrip()
        self._value, self._begun = "", False
        if text and (self._key in self._streamed or self._key in self._whole):
            members.append(Member(self._key, text))

    def _flush(self, members: list[Member]) -> None:
        """Hand out what has come of a streamed value; trailing space may be the end, so it waits."""
        if self._state != "value" or self._key not in self._streamed:
            return
        text = self._value if self._in_string else self._value.rstrip()
        self._value = self._value[len(text) :]
        if text:
            members.append(Member(self._key, text))
