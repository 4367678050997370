"""The tokenizer as the gate needs it: text to ids, ids to text, and a name for both."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.errors import SourceError
from pipeline.gate.baseline import tokenizer_digest
from pipeline.gate.prompts import Prompt, shipped_prompts
from pipeline.gate.protocol import Protocol


@dataclass(frozen=True, slots=True)
class GateTokenizer:
    """A tokenizer folder (tokenizer.json, tokenizer_config.json, generation_config.json).

    Attributes:
        chat_template: Jinja source, None for base models.
        special_tokens: ``bos_token`` … as the template expects them.
        end_ids: Tokens that end a text.
        bos_id: First token, where there is one.
    """

    _tokenizer: Any = field(repr=False)
    chat_template: str | None
    special_tokens: dict[str, str]
    end_ids: tuple[int, ...]
    bos_id: int | None

    @classmethod
    def load(cls, folder: Path) -> GateTokenizer:
        """Read the folder.

        Raises:
            SourceError: A file is missing or cannot be read.
        """
        from tokenizers import Tokenizer

        path = folder / "tokenizer.json"
        if not path.is_file():
            raise SourceError(f"{path}: missing; the gate needs a fast tokenizer")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every kind of damage
            raise SourceError(f"{path}: not a tokenizer: {error}") from error
        config = _json(folder / "tokenizer_config.json")
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        special = {name: _content(config[name]) for name in names if config.get(name)}
        bos = special.get("bos_token")
        return cls(
            tokenizer,
            _template(config, folder),
            special,
            _end_ids(folder, tokenizer, special.get("eos_token")),
            tokenizer.token_to_id(bos) if bos else None,
        )

    @property
    def digest(self) -> str:
        """Name the tokenizer; see :func:`pipeline.gate.baseline.tokenizer_digest`."""
        return tokenizer_digest(self._tokenizer.get_vocab(with_added_tokens=True))

    def encode(self, text: str) -> list[int]:
        """Return ids without adding special tokens; those written in the text are recognised."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text, special tokens spelled out."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    def text_ids(self, text: str, protocol: Protocol) -> npt.NDArray[np.int32]:
        """Return the first ``protocol.tokens`` ids of the text, int32.

        Raises:
            SourceError: The text has fewer tokens than the protocol wants.
        """
        ids = self.encode(text)
        if len(ids) < protocol.tokens:
            raise SourceError(
                f"{protocol.text}: {len(ids)} tokens with this tokenizer, protocol {protocol.name!r} needs "
                f"{protocol.tokens}",
                hint="lower gate.tokens or name a longer text",
            )
        return np.asarray(ids[: protocol.tokens], dtype=np.int32)

    def prompts(self) -> tuple[Prompt, ...]:
        """Encode the shipped prompts, chat prompts through the model's template."""
        return shipped_prompts(self.encode, chat_template=self.chat_template, special_tokens=self.special_tokens)


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise SourceError(f"{path}: holds {type(found).__name__}; expected a JSON object")
    return found


def _content(token: Any) -> str:
    """Return the text of a special token, given as text or as an object with ``content``."""
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _template(config: dict[str, Any], folder: Path) -> str | None:
    """Return the chat template: chat_template.jinja, else a text, else the one named ``default`` of several."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):
        wrong = [entry for entry in found if not isinstance(entry, dict) or not {"name", "template"} <= entry.keys()]
        if wrong:
            raise SourceError(
                f"{folder / 'tokenizer_config.json'}: chat_template has {wrong[0]!r}; expected name and template"
            )
        found = next((entry["template"] for entry in found if entry["name"] == "default"), None)
    if found is not None and not isinstance(found, str):
        raise SourceError(f"{folder / 'tokenizer_config.json'}: chat_template is {found!r}; expected text")
    return found


def _end_ids(folder: Path, tokenizer: Any, eos: str | None) -> tuple[int, ...]:
    """Return the ids that end a text: generation_config.json, then config.json, then the tokenizer's eos token."""
    for name in ("generation_config.json", "config.json"):
        found = _json(folder / name).get("eos_token_id")
        if found is not None:
            return tuple(found) if isinstance(found, list) else (int(found),)
    index = tokenizer.token_to_id(eos) if eos else None
    return () if index is None else (int(index),)
