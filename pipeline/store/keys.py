"""Keys: what makes two pieces of work the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.errors import StoreError
from pipeline.logs import has_secret

# Raised when the meaning of a key or the layout of a record changes; old records then are plain misses.
FORMAT = 1


@dataclass(frozen=True, slots=True)
class KeyDocument:
    """Everything that decides what a stage makes.

    Attributes:
        stage: Name of the stage.
        version: Version of the stage's meaning.
        identity: JSON values that decide the output (options, toolchain, hardware where it matters); no host paths.
        inputs: Key of each input, by the name of the stage that makes it.
    """

    stage: str
    version: int
    identity: Mapping[str, Any]
    inputs: Mapping[str, str]


def canonical_json(value: object) -> bytes:
    """Serialize JSON values so that equal values give equal bytes: sorted keys, no white space, ASCII.

    Raises:
        TypeError: A value or a key of a mapping has no JSON form; nothing is coerced, or 1 and "1" would be one key.
        ValueError: A number is NaN or infinite.
    """
    _refuse_coercion(value)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, default=_as_dict).encode("ascii")


def action_key(document: KeyDocument) -> str:
    """Return the key of a piece of work, known before any of its inputs exists: 64 hex digits.

    Raises:
        StoreError: The identity holds a secret.
        TypeError: The identity holds something that is not a JSON value.
    """
    return _digest("action", document, document.inputs)


def content_key(document: KeyDocument, contents: Mapping[str, str]) -> str:
    """Return the key of the same work by what its inputs contain.

    It finds a finished result when an input was made in another way but came out the same.

    Args:
        document: What decides the output; its input keys do not count here.
        contents: Digest of what is to be seen of each input, by stage name.
    """
    return _digest("content", document, contents)


def _digest(kind: str, document: KeyDocument, inputs: Mapping[str, str]) -> str:
    payload = canonical_json(
        [FORMAT, kind, document.stage, document.version, dict(document.identity), dict(inputs)],
    )
    if has_secret(payload.decode("ascii")):
        raise StoreError(
            f"the identity of stage {document.stage} holds a secret, which would end up in the store's records",
            hint="Give tokens by environment variable (HF_TOKEN), never as part of a name or URL.",
        )
    return hashlib.sha256(payload).hexdigest()


def _as_dict(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{value!r} of type {type(value).__name__} has no JSON form")


def _refuse_coercion(value: object) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"key {key!r} must be text, not {type(key).__name__}")
            _refuse_coercion(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _refuse_coercion(item)
