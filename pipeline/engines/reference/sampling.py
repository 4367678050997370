"""From logits to the next token and its log probability.

Letters: V vocabulary, n rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .errors import EngineError
from .request import Request, Sampling, TokenLogprob

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Ids = npt.NDArray[np.intp]
Bools = npt.NDArray[np.bool_]


def check_sampling(sampling: Sampling, vocab_size: int) -> str:
    """Return what is wrong with the parameters, empty when nothing is."""
    checks = (
        ("temperature", sampling.temperature, sampling.temperature >= 0, "a number of at least 0"),
        ("top_k", sampling.top_k, sampling.top_k >= 0, "at least 0"),
        ("top_p", sampling.top_p, 0 < sampling.top_p <= 1, "in (0, 1]"),
        ("min_p", sampling.min_p, 0 <= sampling.min_p < 1, "in [0, 1)"),
        ("repetition_penalty", sampling.repetition_penalty, sampling.repetition_penalty > 0, "above 0"),
        ("presence_penalty", sampling.presence_penalty, True, "a finite number"),
        ("frequency_penalty", sampling.frequency_penalty, True, "a finite number"),
    )
    for name, value, in_range, expected in checks:
        if not (in_range and math.isfinite(value)):
            return f"{name} is {value}; expected {expected}"
    for token, bias in sampling.logit_bias.items():
        if not 0 <= token < vocab_size:
            return f"logit_bias names token {token}; the vocabulary has {vocab_size}"
        if math.isnan(bias) or bias == math.inf:
            return f"logit_bias of token {token} is {bias}; expected a number or -inf"
    return ""


class Sampler:
    """Chooses the tokens of one request.

    Every token has a random number of its own, keyed by the request's seed and the token's place in the output: what
    else is in the batch changes nothing.
    """

    def __init__(self, request: Request, seed: int) -> None:
        self._sampling = request.sampling
        self._end_ids = request.end_ids
        self._min_tokens = request.min_tokens
        self._key = seed & (2**64 - 1)
        self._prompt = np.unique(np.asarray(request.token_ids, np.intp))
        self._counts: dict[int, int] = {}
        self._made = 0

    def choose(self, logits: F32, allowed: Bools | None = None) -> int | None:
        """Return the next token for raw ``logits`` [V] and count it; None when no token may follow.

        Args:
            logits: Left as they are.
            allowed: [V], the tokens that may follow; None allows all.

        Raises:
            EngineError: The logits hold NaN or infinity.
        """
        token = int(np.argmax(logits))
        # argmax stops at the first NaN, so one look tells about all.
        if not math.isfinite(logits[token]):
            raise EngineError(f"the logit of token {token} is {logits[token]}: the weights or scales are damaged")
        if allowed is not None or not self._is_plain():
            adjusted = self._adjust(logits)
            if allowed is not None:
                adjusted[~allowed] = -np.inf
            if np.isneginf(adjusted.max()):
                return None
            token = int(np.argmax(adjusted)) if self._sampling.temperature == 0 else self._draw(adjusted)
        self._counts[token] = self._counts.get(token, 0) + 1
        self._made += 1
        return token

    def _is_plain(self) -> bool:
        s = self._sampling
        penalties = s.repetition_penalty != 1 or s.presence_penalty != 0 or s.frequency_penalty != 0
        return s.temperature == 0 and not penalties and not s.logit_bias and self._made >= self._min_tokens

    def _adjust(self, logits: F32) -> F64:
        s = self._sampling
        out = logits.astype(np.float64)
        for token, bias in s.logit_bias.items():
            out[token] += bias
        made = np.fromiter(self._counts, np.intp, len(self._counts))
        if s.repetition_penalty != 1:
            # Source: CTRL, arXiv 1909.05858, section 4.1, in the form that also works for negative logits.
            seen = np.union1d(self._prompt, made)
            out[seen] = np.where(out[seen] > 0, out[seen] / s.repetition_penalty, out[seen] * s.repetition_penalty)
        if self._counts and (s.presence_penalty or s.frequency_penalty):
            counts = np.fromiter(self._counts.values(), np.float64, len(self._counts))
            out[made] -= s.presence_penalty + s.frequency_penalty * counts
        if self._made < self._min_tokens:
            out[[token for token in self._end_ids if 0 <= token < out.size]] = -np.inf
        return out

    def _draw(self, adjusted: F64) -> int:
        s = self._sampling
        # Subtracting the largest first keeps a tiny temperature from overflowing.
        scaled = (adjusted - adjusted.max()) / s.temperature
        kept = np.arange(scaled.size)
        if 0 < s.top_k < scaled.size:
            kept = _largest(scaled, s.top_k)
        weights = np.exp(scaled[kept])
        if s.top_p < 1:
            inside = _nucleus(weights, s.top_p)
            kept, weights = kept[inside], weights[inside]
        if s.min_p > 0:
            inside = weights >= s.min_p * weights.max()
            kept, weights = kept[inside], weights[inside]
        order = np.argsort(kept)
        cumulative = np.cumsum(weights[order])
        point = np.random.Generator(np.random.Philox(key=self._key, counter=self._made)).random() * cumulative[-1]
        index = min(int(np.searchsorted(cumulative, point, side="right")), kept.size - 1)
        return int(kept[order[index]])


def _largest(values: npt.NDArray[np.floating], count: int) -> Ids:
    """Return the indices of the ``count`` largest values, largest first, equal ones by index."""
    if count < values.size:
        threshold = np.partition(values, values.size - count)[values.size - count]
        candidates = np.flatnonzero(values >= threshold)
    else:
        candidates = np.arange(values.size)
    return candidates[np.argsort(-values[candidates], kind="stable")][:count]


def _nucleus(weights: F64, top_p: float) -> Ids:
    """Return the indices of the fewest largest weights whose share reaches ``top_p``.

    Source: The Curious Case of Neural Text Degeneration, arXiv 1904.09751, section 3.1. Sorting a whole vocabulary is
    slow, so a growing head of it is sorted until it holds the share.
    """
    wanted = top_p * weights.sum()
    count = min(256, weights.size)
    while True:
        head = _largest(weights, count)
        cumulative = np.cumsum(weights[head])
        if cumulative[-1] >= wanted or count == weights.size:
            return head[: min(int(np.searchsorted(cumulative, wanted)) + 1, count)]
        count = min(count * 8, weights.size)


def token_logprobs(logits: F32, token_ids: Sequence[int], alternatives: int) -> list[TokenLogprob]:
    """Return the log probability of one token per row under the raw distribution.

    Args:
        logits: [n, V] float32, unprocessed.
        token_ids: n chosen tokens.
        alternatives: How many of the likeliest tokens to list, best first.
    """
    ids = np.asarray(token_ids, np.intp)
    top = logits.max(axis=1)
    total = np.exp(logits - top[:, None]).sum(axis=1, dtype=np.float64)
    normalizer = top + np.log(total)
    chosen = logits[np.arange(ids.size), ids]
    ranks = (logits > chosen[:, None]).sum(axis=1) + 1
    result = []
    for row, token in enumerate(ids.tolist()):
        best = _largest(logits[row], min(alternatives, logits.shape[1])) if alternatives else ()
        listed = tuple((int(i), float(logits[row, i] - normalizer[row])) for i in best)
        result.append(TokenLogprob(token, float(chosen[row] - normalizer[row]), int(ranks[row]), listed))
    return result
