"""Which token ids end a text, and which one pads: read once from the tokenizer's files, used everywhere."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import SourceError


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """Ids of a tokenizer folder.

    Attributes:
        end_ids: Every id that ends an answer, in the order found: generation_config first, then the tokenizer's own.
        pad_id: Padding; an end id, or 0, when the tokenizer has none.
    """

    end_ids: tuple[int, ...]
    pad_id: int


def read_special_ids(tokenizer: Path) -> SpecialIds:
    """Read the union of ``generation_config.json`` and the tokenizer's own end-of-text token.

    Args:
        tokenizer: Folder with ``tokenizer.json`` and, if they exist, ``tokenizer_config.json`` and
            ``generation_config.json``.

    Raises:
        SourceError: A file is damaged, or names a token that the tokenizer does not have.
    """
    generation = _read_json(tokenizer / "generation_config.json")
    config = _read_json(tokenizer / "tokenizer_config.json")
    ids = generation.get("eos_token_id")
    named = [_token_id(tokenizer, config, "eos_token")]
    ends = [*(ids if isinstance(ids, list) else [ids]), *named]
    end_ids = tuple(dict.fromkeys(int(token) for token in ends if token is not None))
    pad = generation.get("pad_token_id")
    if pad is None:
        pad = _token_id(tokenizer, config, "pad_token")
    return SpecialIds(end_ids, int(pad) if pad is not None else next(iter(end_ids), 0))


def _token_id(tokenizer: Path, config: dict[str, Any], role: str) -> int | None:
    token = config.get(role)
    text = token.get("content") if isinstance(token, dict) else token
    if text is None:
        return None
    data = _read_json(tokenizer / "tokenizer.json")
    for added in data.get("added_tokens") or []:
        if added.get("content") == text:
            return int(added["id"])
    vocab = (data.get("model") or {}).get("vocab")
    if isinstance(vocab, dict) and text in vocab:
        return int(vocab[text])
    if isinstance(vocab, list):  # unigram: a list of [text, score]
        position = next((index for index, entry in enumerate(vocab) if entry[0] == text), None)
        if position is not None:
            return position
    raise SourceError(
        f"{tokenizer / 'tokenizer_config.json'} names {role} {text!r}, which tokenizer.json does not have",
        hint="take both files from the same model",
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(data, dict):
        raise SourceError(f"{path} holds {type(data).__name__}, expected an object")
    return data
