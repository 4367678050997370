"""Which fields of a job decide which stage's result: the marks, and how a stage's values are collected from them."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from typing import Any

STAGES = ("fetch", "convert", "build", "baseline", "validate", "emit", "verify")

_MARK = "identity"


def identity(*stages: str) -> Mapping[str, Any]:
    """Mark a field with the stages whose result it decides; use as ``field(metadata=identity("build"))``.

    Raises:
        ValueError: A name is not a stage.
    """
    unknown = set(stages) - set(STAGES)
    if unknown:
        raise ValueError(f"no such stage: {sorted(unknown)}; stages are {STAGES}")
    return {_MARK: frozenset(stages)}


def collect(part: Any, stage: str) -> dict[str, Any]:
    """Return the marked values of a dataclass and the dataclasses inside it, for one stage, as JSON values.

    Raises:
        ValueError: ``stage`` is not a stage.
    """
    if stage not in STAGES:
        raise ValueError(f"no such stage: {stage!r}; stages are {STAGES}")
    values: dict[str, Any] = {}
    for item in dataclasses.fields(part):
        value = getattr(part, item.name)
        if _MARK in item.metadata:
            if stage in item.metadata[_MARK]:
                values[item.name] = as_json(value)
        elif dataclasses.is_dataclass(value) and (nested := collect(value, stage)):
            values[item.name] = nested
    return values


def as_json(value: Any) -> Any:
    """Turn dataclasses and tuples into objects and lists."""
    if dataclasses.is_dataclass(value):
        return {item.name: as_json(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [as_json(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    return value


def unmarked_fields(kind: type) -> Iterator[str]:
    """Yield the dotted names of leaf fields that do not say whose identity they belong to."""
    hints = typing.get_type_hints(kind)
    for item in dataclasses.fields(kind):
        if _MARK in item.metadata:
            continue
        nested = [t for t in (hints[item.name], *typing.get_args(hints[item.name])) if dataclasses.is_dataclass(t)]
        if not nested:
            yield item.name
        for part in nested:
            if isinstance(part, type):
                yield from (f"{item.name}.{name}" for name in unmarked_fields(part))
