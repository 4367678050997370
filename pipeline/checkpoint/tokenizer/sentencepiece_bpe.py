"""SentencePiece's byte-pair encoding, written plainly: the witness that a converted tokenizer is the same.

Source: the algorithm of ``bpe_model.cc`` of google/sentencepiece: join the neighbours whose joined text is the
piece of the highest score, the leftmost of equals, until nothing can be joined. Any split of a piece may be joined,
which a list of ranked merges expresses only if ties between splits of one piece are broken the same way; see
:func:`ranked_merges`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping

from pipeline.checkpoint.tokenizer.sentencepiece_model import PieceKind, SentencePieceModel

SPACE = "\u2581"


def normal_pieces(model: SentencePieceModel) -> dict[str, tuple[int, float]]:
    """Return the pieces that text is made of: text to id and score."""
    return {p.text: (i, p.score) for i, p in enumerate(model.pieces) if p.kind is PieceKind.NORMAL}


class SentencePieceEncoder:
    """Encodes text that holds no user-defined symbol, as SentencePiece does."""

    def __init__(self, model: SentencePieceModel) -> None:
        """Prepare the lookup tables."""
        self._pieces = normal_pieces(model)
        self._bytes = {p.text: i for i, p in enumerate(model.pieces) if p.kind is PieceKind.BYTE}
        self._model = model

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without begin or end tokens."""
        normalized = text.replace(" ", SPACE)
        if self._model.add_dummy_prefix and text:
            normalized = SPACE + normalized
        return list(self._ids(self._segment(list(normalized))))

    def _segment(self, symbols: list[str]) -> list[str]:
        """Join characters until nothing can be joined."""
        pieces = self._pieces
        following = list(range(1, len(symbols) + 1))
        preceding = list(range(-1, len(symbols) - 1))
        queue: list[tuple[float, int, int, str]] = []

        def offer(left: int, right: int) -> None:
            if left >= 0 and right < len(symbols):
                joined = symbols[left] + symbols[right]
                if joined in pieces:
                    heapq.heappush(queue, (-pieces[joined][1], left, right, joined))

        for i in range(len(symbols) - 1):
            offer(i, i + 1)
        while queue:
            _, left, right, joined = heapq.heappop(queue)
            if not symbols[left] or not symbols[right] or symbols[left] + symbols[right] != joined:
                continue
            symbols[left], symbols[right] = joined, ""
            following[left] = following[right]
            if following[left] < len(symbols):
                preceding[following[left]] = left
            offer(preceding[left], left)
            offer(left, following[left])
        return [symbol for symbol in symbols if symbol]

    def _ids(self, symbols: list[str]) -> Iterator[int]:
        previous_unknown = False
        for symbol in symbols:
            unknown = symbol not in self._pieces
            if not unknown:
                yield self._pieces[symbol][0]
            elif self._model.byte_fallback:
                yield from (self._bytes[f"<0x{byte:02X}>"] for byte in symbol.encode("utf-8"))
            elif not previous_unknown:
                yield self._model.unk_id
            previous_unknown = unknown


def ranked_merges(pieces: Mapping[str, tuple[int, float]]) -> tuple[list[tuple[str, str]], list[str]]:
    """Return merges in order of rank, and the pieces for which no order is right everywhere.

    Merges of one piece P compete only where x + y = y + z = P; SentencePiece takes the left pair. So where P
    repeats with period i, the split at i must come before the split at len(P) - i. Powers of a shorter text want
    both orders; whether that ever shows depends on the other pieces, so they are returned to be tried.
    """
    merges: list[tuple[str, str]] = []
    doubtful: list[str] = []
    for text in sorted((t for t in pieces if len(t) > 1), key=lambda t: -pieces[t][1]):
        size = len(text)
        splits = [i for i in range(1, size) if text[:i] in pieces and text[i:] in pieces]
        periods = {i for i in splits if size - i in splits and i != size - i and text[i:] == text[: size - i]}
        if any(size - i in periods for i in periods):
            doubtful.append(text)
        first = sorted(periods)
        merges.extend((text[:i], text[i:]) for i in [*first, *(i for i in splits if i not in periods)])
    return merges, doubtful
