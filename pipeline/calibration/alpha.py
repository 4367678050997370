"""Choice of the smoothing strength by the loss on calibration text. The evaluation text plays no part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
Loss = Callable[[float], float]

# Source: SmoothQuant, arXiv 2211.10438, figure 10: good values lie between 0.4 and 0.9; modelopt's default is 1.
_COARSE = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_STEP = 0.05


def choose_alpha(loss: Loss) -> tuple[float, Mapping[float, float]]:
    """Return the strength with the least loss, and all losses: a coarse grid, then the two neighbours of its best."""
    losses = {alpha: loss(alpha) for alpha in _COARSE}
    best = min(losses, key=lambda alpha: losses[alpha])
    for near in (round(best - _STEP, 2), round(best + _STEP, 2)):
        if near <= 1.0:
            losses[near] = loss(near)
    return min(losses, key=lambda alpha: losses[alpha]), losses


def divergence(expected: Sequence[F32], found: Sequence[F32]) -> float:
    """Return the mean divergence of next-token distributions, nats per token.

    Args:
        expected: Logits [T, V] of each sequence under the unquantized model.
        found: The same under the candidate.
    """
    total, tokens = 0.0, 0
    for true, other in zip(expected, found, strict=True):
        p, q = _log_softmax(true), _log_softmax(other)
        total += float((np.exp(p) * (p - q)).sum(dtype=np.float64))
        tokens += len(true)
    return total / tokens


def _log_softmax(logits: F32) -> F32:
    shifted: F32 = logits - logits.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted
