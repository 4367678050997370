"""The model's tokenizer, read from a folder without transformers and behaving as transformers reads it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers

from pipeline.errors import SourceError
from pipeline.frontend.detokenizer import (
    ByteDecoder,
    CleanUpSpaces,
    StepDecoder,
    StreamDecoder,
    TextStep,
    UnfollowableDecoder,
    WholeDecoder,
    byte_alphabet,
    flatten,
    is_byte_level,
    text_steps,
    token_steps,
)

_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# What the tokenizer classes of transformers fill in when the configuration leaves a token out.
# Source: signatures of the *TokenizerFast classes of transformers 4.57.
_CLASS_DEFAULTS: dict[str, dict[str, str]] = {
    "Llama": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "Gemma": {"unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"},
    "GPT2": {"unk_token": "<|endoftext|>", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
    "Qwen2": {"unk_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
    "Bert": {
        "unk_token": "[UNK]",
        "sep_token": "[SEP]",
        "pad_token": "[PAD]",
        "cls_token": "[CLS]",
        "mask_token": "[MASK]",
    },
}

# Classes that rebuild the post-processor from add_bos_token (default true) and add_eos_token (default false).
_BOS_CLASSES = ("Llama", "CodeLlama", "Gemma", "Cohere")


class Tokenizer:
    """Encodes prompts and decodes answers.

    Attributes:
        special_tokens: Role to token text, for chat templates.
        eos_ids: Ids that end an answer: generation_config's, then the tokenizer's.
        bos_id: Id of the beginning-of-sequence token.
        vocab_size: Number of ids, added tokens included.
        model_max_length: From tokenizer_config, None when unset or absurd.
    """

    def __init__(self, folder: Path, *, clean_up_spaces: bool | None = None) -> None:
        """Read ``tokenizer.json`` and what stands beside it.

        Raises:
            SourceError: A file is missing or damaged.
        """
        config = _read_json(folder / "tokenizer_config.json")
        self._tokenizer = _load(folder / "tokenizer.json")
        class_name = str(config.get("tokenizer_class") or "").removesuffix("Fast").removesuffix("Tokenizer")
        declared = _declared_tokens(folder, config)
        named = _CLASS_DEFAULTS.get(class_name, {}) | declared
        extra = [_content(token) for token in config.get("additional_special_tokens") or ()]
        self.special_tokens: dict[str, Any] = {role: named[role] for role in _ROLES if named.get(role)}
        if extra:
            self.special_tokens["additional_special_tokens"] = extra
        self._add_tokens(config.get("added_tokens_decoder") or {}, [*self.special_tokens_flat(), *extra])
        _set_prefix_space(self._tokenizer, config)
        if class_name in _BOS_CLASSES:
            self._set_post_processor(config)
        declared_clean_up = bool(config.get("clean_up_tokenization_spaces"))
        self._clean_up = declared_clean_up if clean_up_spaces is None else clean_up_spaces
        self._skipped = {
            index: token.content for index, token in self._tokenizer.get_added_tokens_decoder().items() if token.special
        }
        self._links = flatten(_decoder_description(self._tokenizer))
        self._alphabet = byte_alphabet()
        self._piece_cache: dict[int, bytes] = {}
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.bos_id = self._id("bos_token")
        self.eos_ids = _eos_ids(folder, self._id("eos_token"))
        length = config.get("model_max_length")
        self.model_max_length = int(length) if isinstance(length, int | float) and 0 < length < 1e9 else None
        self._bytes_of = lru_cache(maxsize=None)(self._token_bytes) if is_byte_level(self._links) else None
        self._token_of = lru_cache(maxsize=None)(self._token_text)
        self._followable = self._can_follow()

    def special_tokens_flat(self) -> list[str]:
        """Return the texts of the tokens that have a role."""
        return [self.special_tokens[role] for role in _ROLES if role in self.special_tokens]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text.

        Args:
            text: Any text; special tokens written in it are recognised.
            add_special_tokens: Let the post-processor add BOS and the like. False for rendered chat templates,
                which bring their own.
        """
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of complete ids."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        if self._clean_up:
            for rule in CleanUpSpaces.RULES:
                text = text.replace(rule, rule.strip())
        return text

    def stream_decoder(self, kept: Sequence[str] = ()) -> StreamDecoder:
        """Return a decoder for one answer.

        Args:
            kept: Special tokens to show as they are written; all others are skipped.
        """
        if not self._followable:
            return WholeDecoder(self.decode)
        shown = {index: text for index, text in self._skipped.items() if text in kept} if kept else {}
        tail: list[TextStep] = [CleanUpSpaces()] if self._clean_up else []
        if self._bytes_of is not None:
            bytes_of = self._bytes_of
            if shown:
                return ByteDecoder(
                    lambda index: shown[index].encode() if index in shown else self._token_bytes(index),
                    [*text_steps(self._links[1:]), *tail],
                )
            return ByteDecoder(bytes_of, [*text_steps(self._links[1:]), *tail])
        steps, texts = token_steps(self._links)
        if shown:
            return StepDecoder(lambda index: shown.get(index) or self._token_of(index), steps, [*texts, *tail])
        return StepDecoder(self._token_of, steps, [*texts, *tail])

    def is_known(self, token_id: int) -> bool:
        """Say whether the id belongs to a token."""
        return self._tokenizer.id_to_token(token_id) is not None

    def special_ids(self, text: str) -> tuple[int, ...]:
        """Return the ids of skipped special tokens that are written like this."""
        return tuple(index for index, content in self._skipped.items() if content == text)

    def token_label(self, token_id: int) -> str:
        """Return how a token is written for people: special tokens by name, others as their text."""
        if token_id in self._skipped:
            return str(self._skipped[token_id])
        return self.piece(token_id).decode("utf-8", "replace")

    def piece(self, token_id: int, *, first: bool = False) -> bytes:
        """Return the bytes that a token adds to a text; none for special tokens.

        Args:
            token_id: Any id.
            first: Whether it begins the text: sentencepiece-style tokenizers drop the space there.
        """
        if self._bytes_of is not None:
            return self._bytes_of(token_id)
        if first:
            return self._decoded_alone(token_id)
        if token_id not in self._piece_cache:
            self._piece_cache[token_id] = self._decoded_inside(token_id)
        return self._piece_cache[token_id]

    def _decoded_alone(self, token_id: int) -> bytes:
        token = self._token_of(token_id)
        if token is None:
            return b""
        if self._is_byte_token(token):
            return bytes([int(token[3:5], 16)])
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=True)
        return text.encode("utf-8")

    def _decoded_inside(self, token_id: int) -> bytes:
        """Decode behind another token and cut that one's text off."""
        token = self._token_of(token_id)
        if token is None:
            return b""
        if self._is_byte_token(token):
            return bytes([int(token[3:5], 16)])
        anchor = self._anchor()
        before: str = self._tokenizer.decode([anchor], skip_special_tokens=True)
        after: str = self._tokenizer.decode([anchor, token_id], skip_special_tokens=True)
        return after[len(before) :].encode("utf-8")

    def _is_byte_token(self, token: str) -> bool:
        has_fallback = any(link.get("type") == "ByteFallback" for link in self._links)
        return has_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">")

    @lru_cache(maxsize=1)  # noqa: B019 - one tokenizer lives as long as the process
    def _anchor(self) -> int:
        """Return a token that decodes to plain letters."""
        for index in range(self.vocab_size):
            token = self._token_of(index)
            if token and token.isascii() and token.isalpha():
                return index
        return 0

    def _token_text(self, token_id: int) -> str | None:
        """Return the vocabulary's spelling; None for ids that decoding drops."""
        if token_id in self._skipped:
            return None
        token: str | None = self._tokenizer.id_to_token(token_id)
        return None if token is None or token in self._skipped.values() else token

    def _token_bytes(self, token_id: int) -> bytes:
        token = self._token_text(token_id)
        if token is None:
            return b""
        # One character outside the alphabet makes the whole token plain text: so added tokens are written.
        if all(character in self._alphabet for character in token):
            return bytes(self._alphabet[character] for character in token)
        return token.encode("utf-8")

    def _can_follow(self) -> bool:
        try:
            if self._bytes_of is not None:
                text_steps(self._links[1:])
            else:
                token_steps(self._links)
        except UnfollowableDecoder:
            return False
        return True

    def _add_tokens(self, declared: dict[str, Any], special: Sequence[str]) -> None:
        """Add what the configuration declares and ``tokenizer.json`` lacks."""
        present = self._tokenizer.get_added_tokens_decoder()
        added = []
        for index, entry in sorted(declared.items(), key=lambda item: int(item[0])):
            token = _added_token(entry, special=bool(entry.get("special")) or entry["content"] in special)
            if repr(present.get(int(index))) != repr(token):
                added.append(token)
        known = {token.content for token in (*present.values(), *added)}
        for text in dict.fromkeys(special):
            if text not in known:
                added.append(tokenizers.AddedToken(text, special=True))
        if added:
            self._tokenizer.add_tokens(added)

    def _set_post_processor(self, config: dict[str, Any]) -> None:
        add_bos, add_eos = config.get("add_bos_token", True), config.get("add_eos_token", False)
        bos, eos = self.special_tokens.get("bos_token"), self.special_tokens.get("eos_token")
        head = f"{bos}:0 " if add_bos and bos else ""
        tail = f" {eos}:0" if add_eos and eos else ""
        pair = f"{head}$A:0{tail} {head.replace(':0', ':1')}$B:1{tail.replace(':0', ':1')}"
        used = [(text, self._tokenizer.token_to_id(text)) for text, on in ((bos, head), (eos, tail)) if on]
        self._tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{head}$A:0{tail}", pair=pair, special_tokens=used
        )

    def _id(self, role: str) -> int | None:
        text = self.special_tokens.get(role)
        index: int | None = self._tokenizer.token_to_id(text) if text else None
        return index


def _load(path: Path) -> Any:
    if not path.is_file():
        raise SourceError(
            f"The tokenizer folder {path.parent} has no tokenizer.json.",
            hint="Point frontend.tokenizer at a folder with tokenizer.json.",
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for everything
        raise SourceError(f"Cannot read {path}: {error}.") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object, empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        document = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(f"Cannot read {path}: {error}.") from error
    if not isinstance(document, dict):
        raise SourceError(f"{path} holds a {type(document).__name__}, expected an object.")
    return document


def _content(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _added_token(entry: dict[str, Any], *, special: bool) -> Any:
    options = {key: bool(entry[key]) for key in ("single_word", "lstrip", "rstrip", "normalized") if key in entry}
    options.setdefault("normalized", not entry.get("special", False))
    return tokenizers.AddedToken(str(entry["content"]), special=special, **options)


def _declared_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return role to token text from tokenizer_config, with special_tokens_map where that is still read."""
    declared = {role: _content(config[role]) for role in _ROLES if config.get(role)}
    if "added_tokens_decoder" not in config:
        legacy = _read_json(folder / "special_tokens_map.json")
        declared |= {role: _content(legacy[role]) for role in _ROLES if legacy.get(role)}
        if legacy.get("additional_special_tokens"):
            extra = [*(config.get("additional_special_tokens") or ()), *legacy["additional_special_tokens"]]
            config["additional_special_tokens"] = list(dict.fromkeys(_content(token) for token in extra))
    return declared


def _eos_ids(folder: Path, tokenizer_eos: int | None) -> tuple[int, ...]:
    """Return the union of both sources, generation_config first."""
    value = _read_json(folder / "generation_config.json").get("eos_token_id")
    listed = value if isinstance(value, list) else [] if value is None else [value]
    ids = [index for index in listed if isinstance(index, int)]
    if tokenizer_eos is not None:
        ids.append(tokenizer_eos)
    return tuple(dict.fromkeys(ids))


def _set_prefix_space(tokenizer: Any, config: dict[str, Any]) -> None:
    """Let the configuration decide whether a text gets a space in front; it says no when it says nothing."""
    wanted = config.get("add_prefix_space", False)
    present = getattr(tokenizer.pre_tokenizer, "add_prefix_space", None)
    if wanted is not None and present is not None and present != wanted:
        tokenizer.pre_tokenizer.add_prefix_space = wanted


def _decoder_description(tokenizer: Any) -> dict[str, Any] | None:
    if tokenizer.decoder is None:
        return None
    description: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    return description
