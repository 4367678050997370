"""Say why a key has no result: what changed since the job's last one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.store.keys import KeyDocument, action_key
from pipeline.store.store import NEVER_BUILT, Miss, Store

_MAX_CHANGES = 3
_MAX_VALUE_CHARS = 60
_ABSENT = object()


def explain(store: Store, job: str, document: KeyDocument) -> str:
    """Return the reason for a miss: ``precision.dtype: "float16" → "bfloat16"``, ``input convert changed``,
    ``stage version 1 → 2``, ``never built``, ``artefact damaged: …``.

    Args:
        store: Where to look.
        job: Name of the job; its last record of the same stage is what is compared.
        document: What decides the output that is wanted.

    Raises:
        StoreError: The store cannot be read.
    """
    found = store.lookup(action_key(document))
    if isinstance(found, Miss) and found.reason != NEVER_BUILT:
        return found.reason
    last = store.latest(job, document.stage)
    if last is None:
        return NEVER_BUILT
    return describe_changes(last.document, document) or NEVER_BUILT


def describe_changes(old: KeyDocument, new: KeyDocument) -> str:
    """Name what differs between two documents of one stage; empty when nothing does."""
    changes = []
    if old.version != new.version:
        changes.append(f"stage version {old.version} → {new.version}")
    before, after = flatten(old.identity), flatten(new.identity)
    for path in [*after, *(p for p in before if p not in after)]:
        left, right = before.get(path, _ABSENT), after.get(path, _ABSENT)
        if left != right or type(left) is not type(right):
            changes.append(f"{path}: {_show(left)} → {_show(right)}")
    for name in new.inputs:
        if name not in old.inputs:
            changes.append(f"input {name} is new")
        elif old.inputs[name] != new.inputs[name]:
            changes.append(f"input {name} changed")
    changes += [f"input {name} is gone" for name in old.inputs if name not in new.inputs]
    if len(changes) > _MAX_CHANGES:
        changes[_MAX_CHANGES:] = [f"and {len(changes) - _MAX_CHANGES} more"]
    return ", ".join(changes)


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn nested mappings into dotted paths; lists stay values."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            flat |= flatten(item, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = list(item) if isinstance(item, tuple) else item
    return flat


def _show(value: object) -> str:
    if value is _ABSENT:
        return "nothing"
    text = value if isinstance(value, str) and value else repr(value)
    return text if len(text) <= _MAX_VALUE_CHARS else text[: _MAX_VALUE_CHARS - 1] + "…"
