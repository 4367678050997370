"""What packing a tokenizer reports, and the small files that every kind of source ends in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.checkpoint.writer import write_json


@dataclass(frozen=True, slots=True)
class TokenizerReport:
    """What was packed.

    Attributes:
        kind: ``copied``, ``gguf`` or ``sentencepiece``.
        vocab_size: Tokens, added ones included.
        eos_token_ids: Ids that end a text.
        bos_token_id: Id that begins a text, None if there is none.
        chat_template: File that holds the chat template, None if there is none.
        files: Files written.
        warnings: What a reader of the result should know.
    """

    kind: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    chat_template: str | None
    files: tuple[str, ...]
    warnings: tuple[str, ...] = ()


def as_ids(value: object) -> list[int]:
    """Return the ids of a config value that is an id, a list of ids, or null; a negative one stands for none."""
    items = value if isinstance(value, list) else [value]
    return [item for item in items if isinstance(item, int) and not isinstance(item, bool) and item >= 0]


def beyond_vocabulary(last: int, vocab_size: object) -> tuple[str, ...]:
    """Warn of a tokenizer whose last id the model has no row for; a request that needs such a token is refused."""
    if not isinstance(vocab_size, int) or last < vocab_size:
        return ()
    return (f"the tokenizer has ids up to {last}, the model has {vocab_size}: texts with the others are refused",)


def write_generation_config(
    out: Path, base: Mapping[str, Any], *, bos: int | None, pad: int | None, eos: Sequence[int]
) -> None:
    """Write ``generation_config.json``: what the source says, with all end-of-text ids as a list."""
    config = dict(base)
    for key, value in (("bos_token_id", bos), ("pad_token_id", pad)):
        if config.get(key) in (None, -1) and value is not None:
            config[key] = value
    config["eos_token_id"] = list(eos)
    write_json(out / "generation_config.json", config)
