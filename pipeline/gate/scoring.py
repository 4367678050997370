"""Turns an engine and a text into per-token scores, one window of logits at a time.

Shape letters: n scored tokens, k recorded alternatives, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.engines.protocol import Engine
from pipeline.gate.protocol import Protocol

Progress = Callable[[float, "float | None", str], None]

# Rows of logits turned into log probabilities at once: bounds the temporaries to 64 * V * 4 bytes.
_ROWS = 64


class NothingMeasured(Exception):
    """The engine's answer cannot be scored. Becomes the verdict ``invalid``; never leaves the gate."""


@dataclass(frozen=True, slots=True)
class TextScores:
    """Scores of tokens 1 … n of a text under its protocol.

    Attributes:
        logprobs: [n] float32, log probability of each token given its context.
        top1: [n] int32, the most probable token at each position.
        alternatives: [n, k] int32, the token ids whose log probabilities are in ``alternative_logprobs``.
        alternative_logprobs: [n, k] float32.
    """

    logprobs: npt.NDArray[np.float32]
    top1: npt.NDArray[np.int32]
    alternatives: npt.NDArray[np.int32]
    alternative_logprobs: npt.NDArray[np.float32]


def score_text(
    engine: Engine,
    token_ids: npt.NDArray[np.int32],
    protocol: Protocol,
    *,
    top_k: int = 0,
    alternatives: npt.NDArray[np.int32] | None = None,
    bos_id: int | None = None,
    progress: Progress | None = None,
) -> TextScores:
    """Score each token of ``token_ids`` [protocol.tokens] but the first, once.

    Args:
        engine: Whose logits count.
        token_ids: The text; no more than ``protocol.tokens`` are used.
        protocol: Windows.
        top_k: Record the engine's own k best tokens per position.
        alternatives: [n, k] token ids to look up instead of the engine's own best.
        bos_id: Goes before every window when the protocol says so.
        progress: Called with scored tokens so far, all tokens, ``tokens``.

    Raises:
        NothingMeasured: No token to score, or logits that are absent, of the wrong shape, not finite, equal for all
            tokens, or the same at every position.
    """
    total = min(protocol.tokens, len(token_ids)) - 1
    if total < 1:
        raise NothingMeasured(f"no scored tokens: the text has {len(token_ids)} tokens, at least 2 are needed")
    if protocol.add_bos and bos_id is None:
        raise NothingMeasured(f"protocol {protocol.name!r} wants a first token (add_bos) and the tokenizer has none")
    prefix = [bos_id] if protocol.add_bos and bos_id is not None else []
    parts: list[TextScores] = []
    first_row: npt.NDArray[np.float32] | None = None
    varies = False
    for window in protocol.windows(len(token_ids)):
        logits = engine.logits([*prefix, *token_ids[window.start : window.stop].tolist()])
        logits = _checked(logits, len(prefix) + window.stop - window.start, engine.info.vocab_size)
        rows = logits[len(prefix) + window.first_scored - window.start - 1 : len(logits) - 1]
        first_row = rows[0].copy() if first_row is None else first_row
        varies = varies or bool((rows != first_row).any())
        wanted = None if alternatives is None else alternatives[window.first_scored - 1 : window.stop - 1]
        parts.append(_score_rows(rows, token_ids[window.first_scored : window.stop], top_k, wanted))
        del logits, rows  # before the next window is made: one window of logits in memory, not two
        if progress is not None:
            progress(float(window.stop - 1), float(total), "tokens")
    if total > 1 and not varies:
        raise NothingMeasured("identical scores for all positions: the logits do not depend on the text")
    return TextScores(
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate([part.top1 for part in parts]),
        np.concatenate([part.alternatives for part in parts]),
        np.concatenate([part.alternative_logprobs for part in parts]),
    )


def score_continuation(engine: Engine, context: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool]:
    """Return the summed log probability of ``continuation`` after ``context`` and whether greedy would choose it.

    Raises:
        NothingMeasured: As in :func:`score_text`.
    """
    ids = [*context, *continuation]
    logits = _checked(engine.logits(ids), len(ids), engine.info.vocab_size)
    scores = _score_rows(logits[len(context) - 1 : -1], np.asarray(continuation, dtype=np.int32), 0, None)
    return float(scores.logprobs.sum(dtype=np.float64)), bool((scores.top1 == np.asarray(continuation)).all())


def _checked(logits: npt.NDArray[np.float32], positions: int, vocab_size: int) -> npt.NDArray[np.float32]:
    """Refuse what cannot be scored; cut vocabulary padding."""
    if logits is None or getattr(logits, "ndim", 0) != 2 or logits.size == 0:
        raise NothingMeasured("no scored tokens: the engine returned no logits")
    if logits.shape[0] != positions or logits.shape[1] < vocab_size:
        raise NothingMeasured(
            f"the engine returned logits of shape {list(logits.shape)}, expected [{positions}, {vocab_size}]"
        )
    return logits[:, :vocab_size]


def _score_rows(
    rows: npt.NDArray[np.float32],
    targets: npt.NDArray[np.int32],
    top_k: int,
    wanted: npt.NDArray[np.int32] | None,
) -> TextScores:
    """Score ``targets`` [n] under ``rows`` [n, V]."""
    count, vocab = rows.shape
    width = wanted.shape[1] if wanted is not None else min(top_k, vocab)
    logprobs = np.empty(count, np.float32)
    top1 = np.empty(count, np.int32)
    ids = np.empty((count, width), np.int32)
    values = np.empty((count, width), np.float32)
    for begin in range(0, count, _ROWS):
        part = slice(begin, min(begin + _ROWS, count))
        chunk = rows[part].astype(np.float32, copy=False)
        best = chunk.max(axis=1)
        if not np.isfinite(best).all():  # the largest of a row with NaN is NaN
            raise NothingMeasured("the logits contain NaN or inf")
        sums = np.exp(chunk - best[:, None]).sum(axis=1, dtype=np.float64)
        if vocab > 1 and bool((chunk.min(axis=1) == best).all()):
            raise NothingMeasured("all tokens tied: the logits of a position are all equal")
        normalizer = (best + np.log(sums)).astype(np.float32)
        index = np.arange(len(chunk))
        logprobs[part] = chunk[index, targets[part]] - normalizer
        top1[part] = chunk.argmax(axis=1)
        if width:
            ids[part] = wanted[part] if wanted is not None else _best(chunk, width)
            values[part] = np.take_along_axis(chunk, ids[part], axis=1) - normalizer[:, None]
    if not (np.isfinite(logprobs).all() and np.isfinite(values).all()):
        raise NothingMeasured("the logits contain NaN or inf")
    return TextScores(logprobs, top1, ids, values)


def _best(chunk: npt.NDArray[np.float32], width: int) -> npt.NDArray[np.int32]:
    """Return the ids of the ``width`` largest values per row, largest first."""
    ids = np.argpartition(chunk, -width, axis=1)[:, -width:]
    order = np.argsort(-np.take_along_axis(chunk, ids, axis=1), axis=1, kind="stable")
    return np.take_along_axis(ids, order, axis=1).astype(np.int32)
