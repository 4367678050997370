"""What is measured, exactly: which text, how many tokens, which windows. Two results compare only if this is equal."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib import resources
from typing import Any

from pipeline.errors import SourceError

EVALUATION_TEXT = "eval_en_austen_persuasion_v1.txt"
# Source: the file as shipped; see data/NOTICE.
EVALUATION_TEXT_SHA256 = "aa1893d80967ad0ea5c23f8d4a8c060222c4a6571e4a9782fa35944d16105da1"


@dataclass(frozen=True, slots=True)
class Window:
    """One forward pass: tokens ``start:stop`` go in, tokens ``first_scored:stop`` are scored."""

    start: int
    stop: int
    first_scored: int


@dataclass(frozen=True, slots=True)
class Protocol:
    """A perplexity protocol over the first ``tokens`` tokens of one text.

    Windows of ``window`` tokens move on by ``stride``; each token but the first is scored once, in the first window
    that reaches it, so behind the first window every token has at least ``window - stride`` tokens of context. The
    context of a token depends on its position alone: a shorter protocol's scores are a prefix of a longer one's.

    Attributes:
        name: ``quick``, ``standard`` or a name of the user's.
        text: Name of the text, for people.
        text_digest: sha256 of its bytes.
        tokens: Tokens taken from the start of the text.
        window: Tokens per forward pass at most.
        stride: Tokens between window starts; less than ``window``.
        add_bos: Put the tokenizer's first token before every window (off: the text speaks for itself).
    """

    name: str
    text: str
    text_digest: str
    tokens: int
    window: int = 1024
    stride: int = 512
    add_bos: bool = False

    def __post_init__(self) -> None:
        if self.tokens < 2 or not 1 <= self.stride < self.window:
            raise SourceError(
                f"gate protocol {self.name!r}: tokens={self.tokens} window={self.window} stride={self.stride}; "
                "expected at least 2 tokens and 1 <= stride < window"
            )

    def windows(self, available: int | None = None) -> Iterator[Window]:
        """Yield the windows over the first ``min(tokens, available)`` tokens."""
        total = self.tokens if available is None else min(self.tokens, available)
        start, scored = 0, 1
        while scored < total:
            stop = min(start + self.window, total)
            yield Window(start, stop, scored)
            start, scored = start + self.stride, stop

    def forward_tokens(self) -> int:
        """Count the tokens that go through the model, for time estimates."""
        return sum(window.stop - window.start for window in self.windows())

    def longest_pass(self) -> int:
        """Return how many tokens the longest forward pass has."""
        return min(self.window, self.tokens) + int(self.add_bos)

    def obstacle(self, max_seq_len: int) -> str:
        """Say why an engine of this context length cannot run the protocol; empty when it can."""
        if self.longest_pass() <= max_seq_len:
            return ""
        return (
            f"the engine takes {max_seq_len} tokens, a window of protocol {self.name!r} has {self.longest_pass()}: "
            f"set gate.window={max_seq_len} gate.stride={max_seq_len // 2} or raise limits.max_seq_len"
        )

    def covers(self, other: Protocol) -> bool:
        """Say whether scores taken under this protocol contain those of ``other``."""
        return (
            replace(other, name=self.name, text=self.text, tokens=self.tokens) == self and self.tokens >= other.tokens
        )

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)


STANDARD = Protocol("standard", EVALUATION_TEXT, EVALUATION_TEXT_SHA256, tokens=8192)
# 3 windows, 3072 tokens of prefill: about ten seconds at the 300-500 tokens/s of the numpy engine on two slow cores.
QUICK = Protocol("quick", EVALUATION_TEXT, EVALUATION_TEXT_SHA256, tokens=2048)
PROTOCOLS = {protocol.name: protocol for protocol in (QUICK, STANDARD)}


def shipped_text() -> str:
    """Return the evaluation text that ships with the package.

    Raises:
        SourceError: The file is not the one the protocols name.
    """
    data = resources.files("pipeline.gate").joinpath("data").joinpath(EVALUATION_TEXT).read_bytes()
    return verified_text(data, STANDARD)


def verified_text(data: bytes, protocol: Protocol) -> str:
    """Decode ``data`` after checking that it is the text ``protocol`` names.

    Raises:
        SourceError: The sha256 differs or the bytes are not UTF-8.
    """
    found = hashlib.sha256(data).hexdigest()
    if found != protocol.text_digest:
        raise SourceError(
            f"{protocol.text}: sha256 is {found}, the gate protocol expects {protocol.text_digest}",
            hint="reinstall the package, or name your own text with its digest",
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SourceError(f"{protocol.text}: not UTF-8 at byte {error.start}") from error
