"""Token ids to text, piece by piece, exactly as decoding the whole sequence would give.

The decoder chains of the ``tokenizers`` library are functions on complete token lists. Here each link is a transducer:
it emits what no later token can change and holds back the rest. So the concatenation of all pieces equals the
library's ``decode`` of the whole list, for any chunking, and an incomplete character is never emitted.

Chains with a link that cannot be followed token by token (CTC, Replace with a regular expression) are decoded at the
end, in one piece: right, but not streaming.

Source: behaviour of the Rust decoders of ``tokenizers`` 0.22 and 0.23, compared in ``tests/unit/frontend``.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TokenStep(Protocol):
    """A link that maps a list of tokens to a list of tokens."""

    def push(self, token: str) -> Sequence[str]:
        """Take one token; return the finished ones."""

    def finish(self) -> Sequence[str]:
        """Return what was held back."""


class TextStep(Protocol):
    """A link behind the point where all tokens became one text."""

    def push(self, text: str) -> str:
        """Take more text; return what is final."""

    def finish(self) -> str:
        """Return what was held back."""


class _MapTokens:
    """Tokens map one to one; ``function`` also gets whether the token is the first."""

    def __init__(self, function: Callable[[str, bool], str]) -> None:
        self._function = function
        self._first = True

    def push(self, token: str) -> Sequence[str]:
        first, self._first = self._first, False
        return (self._function(token, first),)

    def finish(self) -> Sequence[str]:
        return ()


class _ByteFallback:
    """``<0xE2>`` tokens become characters.

    A run of byte tokens is one unit: if it is not valid UTF-8 as a whole, each byte becomes U+FFFD. So a run is held
    until another token ends it.
    """

    def __init__(self) -> None:
        self._run = bytearray()

    def push(self, token: str) -> Sequence[str]:
        match = _BYTE_TOKEN.fullmatch(token)
        if match:
            self._run.append(int(match[1], 16))
            return ()
        return (*self.finish(), token) if self._run else (token,)

    def finish(self) -> Sequence[str]:
        run, self._run = bytes(self._run), bytearray()
        if not run:
            return ()
        try:
            return (run.decode("utf-8"),)
        except UnicodeDecodeError:
            return (_REPLACEMENT,) * len(run)


class _WordSuffix:
    """BPE with an end-of-word suffix: it is a space, and nothing in the last token."""

    def __init__(self, suffix: str) -> None:
        self._suffix = suffix
        self._held: str | None = None

    def push(self, token: str) -> Sequence[str]:
        held, self._held = self._held, token
        return () if held is None else (held.replace(self._suffix, " "),)

    def finish(self) -> Sequence[str]:
        held, self._held = self._held, None
        return () if held is None else (held.replace(self._suffix, ""),)


class ReplaceText:
    """``str.replace`` over a text that arrives in pieces."""

    def __init__(self, pattern: str, content: str) -> None:
        self._pattern = pattern
        self._content = content
        self._held = ""

    def push(self, text: str) -> str:
        pattern = self._pattern
        *done, rest = (self._held + text).split(pattern)
        keep = 0
        for size in range(min(len(pattern) - 1, len(rest)), 0, -1):
            if pattern.startswith(rest[-size:]):
                keep = size
                break
        self._held = rest[len(rest) - keep :]
        return self._content.join((*done, rest[: len(rest) - keep]))

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


class _StripText:
    """Removes up to ``start`` leading and ``stop`` trailing ``content`` characters of the whole text."""

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content = content
        self._start = start
        self._stop = stop
        self._held = ""

    def push(self, text: str) -> str:
        while self._start and text:
            if text[0] != self._content:
                self._start = 0
                break
            text = text[1:]
            self._start -= 1
        if not self._stop:
            return text
        text = self._held + text
        keep = len(text)
        while keep and len(text) - keep < self._stop and text[keep - 1] == self._content:
            keep -= 1
        self._held = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        self._held = ""
        return ""


class _MapText:
    """Characters map one to one whatever stands around them."""

    def __init__(self, old: str, new: str) -> None:
        self._old = old
        self._new = new

    def push(self, text: str) -> str:
        return text.replace(self._old, self._new)

    def finish(self) -> str:
        return ""


class CleanUpSpaces:
    """The ten replacements of ``clean_up_tokenization_spaces``, one after another.

    Source: ``PreTrainedTokenizerBase.clean_up_tokenization`` of transformers, observed behaviour.
    """

    RULES = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")

    def __init__(self) -> None:
        self._rules = [ReplaceText(rule, rule.strip()) for rule in self.RULES]

    def push(self, text: str) -> str:
        for rule in self._rules:
            text = rule.push(text)
        return text

    def finish(self) -> str:
        text = ""
        for rule in self._rules:
            text = rule.push(text) + rule.finish()
        return text


class UnfollowableDecoder(Exception):
    """A decoder chain that cannot be followed token by token."""


class StreamDecoder(Protocol):
    """Text of one sequence."""

    def push(self, token_id: int) -> str:
        """Take the next token; return the text that became final, often none."""

    def finish(self) -> str:
        """End the sequence; return the rest of the text."""


class StepDecoder:
    """Follows a chain of token steps and text steps."""

    def __init__(
        self,
        token_of: Callable[[int], str | None],
        token_steps: Sequence[TokenStep],
        text_steps: Sequence[TextStep],
    ) -> None:
        self._token_of = token_of
        self._token_steps = token_steps
        self._text_steps = text_steps

    def push(self, token_id: int) -> str:
        token = self._token_of(token_id)
        if token is None:
            return ""
        tokens: Sequence[str] = (token,)
        for step in self._token_steps:
            tokens = [out for token in tokens for out in step.push(token)]
        text = "".join(tokens)
        for text_step in self._text_steps:
            text = text_step.push(text)
        return text

    def finish(self) -> str:
        tokens: list[str] = []
        for step in self._token_steps:
            tokens = [out for token in tokens for out in step.push(token)]
            tokens.extend(step.finish())
        text = "".join(tokens)
        for text_step in self._text_steps:
            text = text_step.push(text) + text_step.finish()
        return text


class ByteDecoder:
    """Byte-level chains: tokens are bytes, the text is their UTF-8 reading with U+FFFD for what is invalid."""

    def __init__(self, bytes_of: Callable[[int], bytes], text_steps: Sequence[TextStep]) -> None:
        self._bytes_of = bytes_of
        self._text_steps = text_steps
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        text = self._utf8.decode(self._bytes_of(token_id))
        for step in self._text_steps:
            text = step.push(text)
        return text

    def finish(self) -> str:
        text = self._utf8.decode(b"", True)
        for step in self._text_steps:
            text = step.push(text) + step.finish()
        return text


class WholeDecoder:
    """Decodes at the end, for chains nobody can follow."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        return ""

    def finish(self) -> str:
        ids, self._ids = self._ids, []
        return self._decode(ids) if ids else ""


def flatten(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the links of a decoder description of ``tokenizer.json`` in order."""
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return [link for inner in decoder["decoders"] for link in flatten(inner)]
    return [decoder]


def byte_alphabet() -> dict[str, int]:
    """Return the character that byte-level vocabularies write for each byte.

    Printable Latin-1 characters stand for themselves, the other bytes follow from U+0100 on (GPT-2's vocabulary).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


def is_byte_level(links: Sequence[dict[str, Any]]) -> bool:
    """Say whether the chain begins by turning tokens into bytes."""
    return bool(links) and links[0].get("type") == "ByteLevel"


def token_steps(links: Sequence[dict[str, Any]]) -> tuple[list[TokenStep], list[TextStep]]:
    """Build fresh steps for a chain that is not byte-level.

    Raises:
        UnfollowableDecoder: A link needs the whole list.
    """
    if not links:
        return [_MapTokens(lambda token, first: token if first else " " + token)], []
    steps: list[TokenStep] = []
    for position, link in enumerate(links):
        if link.get("type") == "Fuse":
            return steps, text_steps(links[position + 1 :])
        steps.append(_token_step(link))
    return steps, []


def _token_step(link: dict[str, Any]) -> TokenStep:
    kind = link.get("type")
    if kind == "ByteFallback":
        return _ByteFallback()
    if kind == "Metaspace":
        mark, space = link["replacement"], _metaspace_start(link)
        return _MapTokens(lambda token, first: token.replace(mark, space if first else " "))
    if kind == "Replace":
        pattern, content = _literal(link), link["content"]
        return _MapTokens(lambda token, first: token.replace(pattern, content))
    if kind == "Strip":
        content, start, stop = link["content"], link["start"], link["stop"]
        return _MapTokens(lambda token, first: _strip(token, content, start, stop))
    if kind == "WordPiece":
        prefix, cleanup = link["prefix"], link["cleanup"]
        return _MapTokens(lambda token, first: _word_piece(token, first, prefix, clean=cleanup))
    if kind == "BPEDecoder":
        return _WordSuffix(link["suffix"])
    raise UnfollowableDecoder(str(kind))


def text_steps(links: Sequence[dict[str, Any]]) -> list[TextStep]:
    """Build fresh steps for the links behind a Fuse or ByteLevel link.

    Raises:
        UnfollowableDecoder: A link cannot work on a text that arrives in pieces.
    """
    steps: list[TextStep] = []
    for link in links:
        kind = link.get("type")
        if kind == "Replace":
            steps.append(ReplaceText(_literal(link), link["content"]))
        elif kind == "Strip":
            steps.append(_StripText(link["content"], link["start"], link["stop"]))
        elif kind == "Metaspace":
            steps.append(_MapText(link["replacement"], _metaspace_start(link)))
        elif kind != "Fuse":
            raise UnfollowableDecoder(str(kind))
    return steps


def _metaspace_start(link: dict[str, Any]) -> str:
    """Return what the space mark means in the first token."""
    return " " if link.get("prepend_scheme") == "never" else ""


def _literal(link: dict[str, Any]) -> str:
    pattern = link["pattern"].get("String")
    if not pattern:
        raise UnfollowableDecoder("Replace with a regular expression")
    return str(pattern)


def _strip(token: str, content: str, start: int, stop: int) -> str:
    first = 0
    while first < min(start, len(token)) and token[first] == content:
        first += 1
    last = len(token)
    while last > first and len(token) - last < stop and token[last - 1] == content:
        last -= 1
    return token[first:last]


_WORD_PIECE_RULES = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " do not", " 's", " 've", " 're")


def _word_piece(token: str, first: bool, prefix: str, *, clean: bool) -> str:
    if not first:
        token = token[len(prefix) :] if token.startswith(prefix) else " " + token
    if clean:
        for rule in _WORD_PIECE_RULES:
            token = token.replace(rule, " don't" if rule == " do not" else rule.strip())
    return token
