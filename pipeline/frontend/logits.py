"""Log probabilities from logits, for engines that return nothing better."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.frontend.backend import Logprob


def score(rows: npt.NDArray[Any], token_ids: Sequence[int], k: int) -> list[Logprob]:
    """Return the log probability of each token and the k most likely ones.

    Args:
        rows: [N, V] float16 or float32; row i is the distribution that token i was drawn from.
        token_ids: N ids.
        k: Number of alternatives.
    """
    entries = []
    for row, token_id in zip(rows, token_ids, strict=True):
        # Row by row: the copy in float32 of a long prompt's logits would be as large as the logits themselves.
        shifted = row.astype(np.float32) - np.float32(row.max())
        values = shifted - np.log(np.exp(shifted).sum())
        top: list[int] = []
        if k:
            best = np.argpartition(values, -min(k, len(values)))[-k:]
            top = best[np.argsort(-values[best], kind="stable")].tolist()
        entries.append(Logprob(token_id, float(values[token_id]), [(index, float(values[index])) for index in top]))
    return entries
