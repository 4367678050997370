"""The schema as a table of dotted keys: what exists, of which type, within which bounds, and what is near a typo."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from pipeline.config.schema import Config

_TRUE = frozenset({"true", "yes", "on"})
_FALSE = frozenset({"false", "no", "off"})
_TYPE_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list: "a list [a,b]",
    dict: "names with values",
}


@dataclass(frozen=True, slots=True)
class Leaf:
    """One key that holds a value.

    Attributes:
        path: Dotted key, ``limits.max_batch_size``.
        kind: ``int``, ``float``, ``bool``, ``str``, ``list`` (of text) or ``dict`` (names that only a release knows).
        is_optional: null is allowed.
        choices: Allowed texts; empty for any.
        minimum: Smallest number, or None.
        maximum: Largest number, or None.
    """

    path: str
    kind: type
    is_optional: bool
    choices: tuple[str, ...]
    minimum: float | None
    maximum: float | None

    def parse(self, text: str) -> Any:
        """Turn what was typed behind ``=`` into a value. Text is taken as it is; lists are not handled here.

        Raises:
            ValueError: With the reason, without the key.
        """
        if self.is_optional and text.lower() in ("null", "auto"):
            return None
        if self.kind is str and text != "null":
            return text
        if self.kind is bool:
            if text.lower() in _TRUE | _FALSE:
                return text.lower() in _TRUE
        elif self.kind is not str and text.isascii() and "_" not in text:  # Python's own forms are nobody else's
            try:
                return self.kind(text)
            except ValueError:
                pass
        raise ValueError(f"{text!r} is not {self.expectation}")

    def problem(self, value: Any) -> str | None:
        """Say what is wrong with a typed value, or None."""
        if value is None or self.kind in (bool, list, dict):
            return None
        if self.choices and value not in self.choices:
            near = nearest(str(value), self.choices)
            return f"{value!r} is not {self.expectation}" + (f"; did you mean {near!r}?" if near else "")
        if isinstance(value, float) and not math.isfinite(value):
            return f"{value!r} is not {self.expectation}"
        if self.minimum is not None and value < self.minimum:
            return f"{value!r} is below {self.minimum:g}"
        if self.maximum is not None and value > self.maximum:
            return f"{value!r} is above {self.maximum:g}"
        return None

    @property
    def expectation(self) -> str:
        """What a value must be, for people."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        return _TYPE_NAMES[self.kind] + (" or null" if self.is_optional else "")


@cache
def leaves() -> Mapping[str, Leaf]:
    """Return every key that holds a value, by dotted path."""
    return {leaf.path: leaf for leaf in _leaves(Config, "")}


def open_section(key: str) -> str:
    """Return the dotted path above ``key`` whose names the schema does not know (``build.flags``); else nothing."""
    section = key.rpartition(".")[0]
    leaf = leaves().get(section)
    return section if leaf is not None and leaf.kind is dict else ""


@cache
def groups() -> tuple[str, ...]:
    """Return the names of the config groups."""
    hints = typing.get_type_hints(Config)
    return tuple(item.name for item in dataclasses.fields(Config) if dataclasses.is_dataclass(hints[item.name]))


@cache
def sections() -> Mapping[str, type]:
    """Return the dotted paths that hold other keys, with the dataclass of each."""
    return dict(_sections(Config, ""))


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate most like ``word``, or None when none is."""
    found = difflib.get_close_matches(word.lower(), list(candidates), n=1, cutoff=0.6)
    return found[0] if found else None


def nearest_key(key: str) -> str | None:
    """Return the existing key that a mistyped one most likely means.

    A bare last part counts (``tp`` for ``parallel.tp``); otherwise the spelling of the whole key decides.
    """
    known = [*leaves(), *groups()]
    last = key.rpartition(".")[2]
    same_end = [path for path in known if path.rpartition(".")[2] == last]
    if len(same_end) == 1:
        return same_end[0]
    section = key.rpartition(".")[0]
    siblings = [path for path in known if path.rpartition(".")[0] == section] if section in sections() else []
    return nearest(key, siblings) or nearest(key, same_end) or nearest(key, known)


def _leaves(kind: Any, prefix: str) -> Iterable[Leaf]:
    hints = typing.get_type_hints(kind)
    for item in dataclasses.fields(kind):
        is_optional, inner = _strip_optional(hints[item.name])
        path = prefix + item.name
        if dataclasses.is_dataclass(cast(Any, inner)):
            yield from _leaves(inner, path + ".")
        else:
            bounds = item.metadata
            yield Leaf(
                path,
                typing.get_origin(inner) or inner,
                is_optional,
                tuple(bounds.get("choices", ())),
                bounds.get("minimum"),
                bounds.get("maximum"),
            )


def _sections(kind: Any, prefix: str) -> Iterable[tuple[str, type]]:
    hints = typing.get_type_hints(kind)
    for item in dataclasses.fields(kind):
        _, inner = _strip_optional(hints[item.name])
        if dataclasses.is_dataclass(cast(Any, inner)):
            yield prefix + item.name, inner
            yield from _sections(inner, f"{prefix}{item.name}.")


def _strip_optional(hint: Any) -> tuple[bool, type]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        inner = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        return True, cast(type, inner[0])
    return False, cast(type, hint)
