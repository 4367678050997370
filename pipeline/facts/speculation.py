"""Speculative decoding: the modes by the names people use, and the lengths that follow from their parameters."""

from __future__ import annotations

MODES = ("none", "draft_target", "medusa", "eagle", "lookahead", "redrafter")


def lookahead_draft_len(window: int, ngram: int, verification: int) -> int:
    """Return the draft tokens that a lookahead window needs: (N-2) + (W-1+G)(N-1).

    Source: upstream's lookahead example; window 7, n-gram 7, verification 7 give 83.
    """
    return (ngram - 2) + (window - 1 + verification) * (ngram - 1)
