"""Is a generated text broken in a way that averages over tokens do not show?"""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_PERIOD = 8
_MINIMUM_RUN = 8
_MINIMUM_REPEATS = 4


def periodic_run(token_ids: Sequence[int], period: int) -> int:
    """Return the length of the longest stretch that repeats itself every ``period`` tokens (0 if none does)."""
    best = run = 0
    for index in range(period, len(token_ids)):
        run = run + 1 if token_ids[index] == token_ids[index - period] else 0
        best = max(best, run)
    return best + period if best else 0


def degeneracy(token_ids: Sequence[int], end_ids: Sequence[int] = (), text: str | None = None) -> str:
    """Name what is wrong with a greedy continuation; empty when nothing is.

    A stretch counts when it repeats at least four times, has at least eight tokens and fills half of the output:
    short echoes are ordinary language.

    Args:
        token_ids: The generated tokens, with or without the closing end token.
        end_ids: Tokens that end a text.
        text: The decoded text where known; lets blank output be seen.
    """
    if token_ids and token_ids[0] in end_ids:
        return "immediate stop"
    body = [token for token in token_ids if token not in end_ids]
    if not body:
        return "empty"
    if text is not None and not text.strip():
        return "blank text"
    for period in range(1, LONGEST_PERIOD + 1):
        run = periodic_run(body, period)
        if run >= max(_MINIMUM_RUN, _MINIMUM_REPEATS * period, len(body) / 2):
            return "one token repeated" if period == 1 else f"cycle of {period} tokens"
    return ""
