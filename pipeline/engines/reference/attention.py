"""Attention over cached keys and values, one sequence at a time.

Letters: T packed tokens of a step, n tokens of one segment, H query heads, K key/value heads, g = H/K, d head size,
S cached tokens a query may see, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .threads import Workers

F32 = npt.NDArray[np.float32]

GROWTH = 256
MOST_SCORES = 16_000_000
PIECE_TOKENS = 128
WORTH_SPLITTING = 2_000_000


class KvCache:
    """Keys and values of one sequence; grows with it.

    Keys are stored transposed, so that both products of attention run over contiguous rows.

    Attributes:
        keys: [L, K, d, capacity] float32, rotated.
        values: [L, K, capacity, d] float32.
        length: Tokens stored.
    """

    def __init__(self, layers: int, kv_heads: int, head_size: int) -> None:
        self.keys: F32 = np.empty((layers, kv_heads, head_size, 0), np.float32)
        self.values: F32 = np.empty((layers, kv_heads, 0, head_size), np.float32)
        self.length = 0

    @property
    def capacity(self) -> int:
        """Tokens that fit without growing."""
        return int(self.values.shape[2])

    def reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` in all; grows by half at least, so that copying stays a small share."""
        if tokens <= self.capacity:
            return
        capacity = max(-(-tokens // GROWTH) * GROWTH, self.capacity * 3 // 2)
        layers, kv_heads, head_size, _ = self.keys.shape
        keys = np.empty((layers, kv_heads, head_size, capacity), np.float32)
        values = np.empty((layers, kv_heads, capacity, head_size), np.float32)
        keys[..., : self.length] = self.keys[..., : self.length]
        values[:, :, : self.length] = self.values[:, :, : self.length]
        self.keys, self.values = keys, values


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one sequence in a packed step.

    Attributes:
        cache: Already has room for ``start + count`` tokens.
        offset: First row in the packed step.
        start: Position of the first token in its sequence.
        count: Tokens, n.
    """

    cache: KvCache
    offset: int
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """What differs between models or layers.

    Attributes:
        scale: Factor of the query, usually 1/sqrt(d).
        window: A query sees this many newest positions, its own included; None for all.
        softcap: Scores are bounded to it by tanh; None for no bound.
        quantize_kv: Rounds keys and values to what an 8-bit cache holds; None for a float cache.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    quantize_kv: Callable[[F32], F32] | None = None

    def first_seen(self, position: int) -> int:
        """Return the oldest position that a query sees."""
        return 0 if self.window is None else max(0, position - self.window + 1)


def attend(
    q: F32, k: F32, v: F32, segments: Sequence[Segment], layer: int, rule: AttentionRule, workers: Workers
) -> F32:
    """Store the new keys and values and return what each query gathers.

    Args:
        q: [T, H, d] float32, rotated; scaled in place.
        k: [T, K, d] float32, rotated.
        v: [T, K, d] float32.

    Returns:
        [T, H*d] float32.
    """
    tokens, heads, head_size = q.shape
    kv_heads = k.shape[1]
    q *= np.float32(rule.scale)
    if rule.quantize_kv is not None:
        k, v = rule.quantize_kv(k), rule.quantize_kv(v)
    grouped = q.reshape(tokens, kv_heads, heads // kv_heads, head_size)
    out = np.empty_like(grouped)
    for segment in segments:
        rows = slice(segment.offset, segment.offset + segment.count)
        end = segment.start + segment.count
        segment.cache.keys[layer, :, :, segment.start : end] = k[rows].transpose(1, 2, 0)
        segment.cache.values[layer, :, segment.start : end] = v[rows].transpose(1, 0, 2)
    decoding = [segment for segment in segments if segment.count == 1]
    if decoding:
        _attend_decoding(grouped, out, decoding, layer, rule)
    if len(decoding) < len(segments):
        prefilling = [segment for segment in segments if segment.count > 1]
        _attend_prefilling(grouped, out, prefilling, layer, rule, workers)
    return out.reshape(tokens, heads * head_size)


def _attend_decoding(q: F32, out: F32, segments: Sequence[Segment], layer: int, rule: AttentionRule) -> None:
    """Attend with one query per sequence.

    The scores of all sequences stand in one array, padded to the longest: only the products are done one by one.
    """
    _, kv_heads, group, _ = q.shape
    spans = [(rule.first_seen(segment.start), segment.start + 1) for segment in segments]
    lengths = [end - first for first, end in spans]
    width = max(lengths)
    scores = np.empty((len(segments), kv_heads, group, width), np.float32)
    for row, (segment, (first, end)) in enumerate(zip(segments, spans, strict=True)):
        np.matmul(q[segment.offset], segment.cache.keys[layer, :, :, first:end], out=scores[row, ..., : end - first])
    if rule.softcap is not None:
        _cap(scores, rule.softcap)
    for row, length in enumerate(lengths):
        if length < width:
            scores[row, ..., length:] = -np.inf
    total = _exponentiate(scores)
    for row, (segment, (first, end)) in enumerate(zip(segments, spans, strict=True)):
        target = out[segment.offset]
        np.matmul(scores[row, ..., : end - first], segment.cache.values[layer, :, first:end], out=target)
        target /= total[row]


def _attend_prefilling(
    q: F32, out: F32, segments: Sequence[Segment], layer: int, rule: AttentionRule, workers: Workers
) -> None:
    """Attend with many queries per sequence, in pieces of bounded size that the workers share."""
    heads, head_size = q.shape[1] * q.shape[2], q.shape[3]
    pieces: list[tuple[Segment, int, int]] = []
    work = 0
    for segment in segments:
        end = segment.start + segment.count
        step = max(1, min(PIECE_TOKENS, MOST_SCORES // (heads * end)))
        pieces += [(segment, first, min(first + step, segment.count)) for first in range(0, segment.count, step)]
        work += segment.count * end * heads * head_size

    def piece(index: int) -> None:
        segment, first, last = pieces[index]
        rows = slice(segment.offset + first, segment.offset + last)
        out[rows] = _attend_rows(q[rows], segment, segment.start + first, layer, rule)

    if work >= WORTH_SPLITTING * len(pieces):
        workers.run(piece, len(pieces))
    else:
        for index in range(len(pieces)):
            piece(index)


def _attend_rows(q: F32, segment: Segment, position: int, layer: int, rule: AttentionRule) -> F32:
    """Attend with the queries [n, K, g, d] at ``position`` and on; returns [n, K, g, d]."""
    count, kv_heads, group, head_size = q.shape
    end = position + count
    first = rule.first_seen(position)
    keys = segment.cache.keys[layer, :, :, first:end]
    values = segment.cache.values[layer, :, first:end]
    scores = np.matmul(q.transpose(1, 0, 2, 3).reshape(kv_heads, count * group, head_size), keys)
    if rule.softcap is not None:
        _cap(scores, rule.softcap)
    key_positions = np.arange(first, end)
    own = np.arange(position, end)[:, None]
    hidden = key_positions > own
    if rule.window is not None:
        hidden |= key_positions <= own - rule.window
    masked = scores.reshape(kv_heads, count, group, end - first)
    masked += np.where(hidden, np.float32(-np.inf), np.float32(0))[:, None, :]
    total = _exponentiate(scores)
    gathered: F32 = np.matmul(scores, values)
    gathered /= total
    attended: F32 = gathered.reshape(kv_heads, count, group, head_size).transpose(1, 0, 2, 3)
    return attended


def _cap(scores: F32, bound: float) -> None:
    scores /= np.float32(bound)
    np.tanh(scores, out=scores)
    scores *= np.float32(bound)


def _exponentiate(scores: F32) -> F32:
    """Turn scores into unnormalized probabilities in place and return their sums, [..., 1]."""
    scores -= np.maximum.reduce(scores, axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    total: F32 = np.add.reduce(scores, axis=-1, keepdims=True)
    return total
