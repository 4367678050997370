"""Paired statistics, small and exact enough to be checked by hand. No random numbers: same input, same interval."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """A two-sided confidence interval."""

    low: float
    high: float
    confidence: float

    @property
    def half_width(self) -> float:
        """Half the distance between the ends."""
        return (self.high - self.low) / 2


def _student_within(t: float, degrees: int) -> float:
    """Return P(|T| <= t) for Student's t with ``degrees`` degrees of freedom.

    Source: Abramowitz & Stegun, 26.7.3 and 26.7.4 (finite sums for whole degrees of freedom).
    """
    theta = math.atan(t / math.sqrt(degrees))
    cosine = math.cos(theta)
    term = total = 1.0
    if degrees % 2:
        if degrees == 1:
            return 2 * theta / math.pi
        term = total = cosine
        for k in range(3, degrees, 2):
            term *= cosine * cosine * (k - 1) / k
            total += term
        return 2 / math.pi * (theta + math.sin(theta) * total)
    for k in range(2, degrees, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    return math.sin(theta) * total


def student_quantile(confidence: float, degrees: int) -> float:
    """Return t such that a Student variable lies in [-t, t] with probability ``confidence``."""
    low, high = 0.0, 1.0
    while _student_within(high, degrees) < confidence:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_within(middle, degrees) < confidence else (low, middle)
    return (low + high) / 2


def block_means(values: Floats, block: int) -> Floats:
    """Average consecutive blocks of ``values`` [n]; a last block shorter than half a block joins the one before.

    Neighbouring tokens err together; blocks longer than that memory may be treated as independent.
    """
    count = max(1, (len(values) + block // 2) // block)
    edges = [index * block for index in range(count)]
    sizes = np.diff([*edges, len(values)])
    means: Floats = np.add.reduceat(values, edges) / sizes
    return means


def mean_interval(samples: Floats, confidence: float) -> Interval:
    """Return the t interval of the mean of independent ``samples`` [n]; infinite for fewer than two."""
    mean = float(samples.mean())
    if len(samples) < 2:
        return Interval(-math.inf, math.inf, confidence)
    error = float(samples.std(ddof=1)) / math.sqrt(len(samples))
    reach = student_quantile(confidence, len(samples) - 1) * error
    return Interval(mean - reach, mean + reach, confidence)


def proportion_interval(successes: int, trials: int, confidence: float) -> Interval:
    """Return Wilson's score interval of a proportion. Source: E. B. Wilson, JASA 22 (1927), 209-212."""
    if trials == 0:
        return Interval(0.0, 1.0, confidence)
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share = successes / trials
    scale = 1 + z * z / trials
    centre = (share + z * z / (2 * trials)) / scale
    reach = z / scale * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return Interval(max(0.0, centre - reach), min(1.0, centre + reach), confidence)
