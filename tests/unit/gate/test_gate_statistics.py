"""Intervals against tables."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from pipeline.gate.statistics import block_means, mean_interval, proportion_interval, student_quantile
from pipeline.gate.thresholds import samples_needed


# Source: the usual table of Student's t, two-sided 95 % and 99 %.
@pytest.mark.parametrize(
    "confidence,degrees,expected",
    [(0.95, 1, 12.706), (0.95, 2, 4.303), (0.95, 5, 2.571), (0.95, 30, 2.042), (0.95, 120, 1.980), (0.99, 10, 3.169)],
)
def test_student_quantile_agrees_with_the_table(confidence, degrees, expected):
    assert student_quantile(confidence, degrees) == pytest.approx(expected, abs=6e-4)


def test_mean_interval_is_the_textbook_one():
    # mean 3, s = sqrt(2.5), n = 5, t(4) = 2.776: 3 +- 2.776 * 0.7071
    interval = mean_interval(np.array([1.0, 2.0, 3.0, 4.0, 5.0]), 0.95)
    assert (interval.low, interval.high) == pytest.approx((1.0368, 4.9632), abs=1e-3)


def test_mean_interval_is_infinite_for_one_sample():
    assert mean_interval(np.array([1.0]), 0.95).half_width == math.inf


def test_mean_interval_covers_the_truth_as_often_as_it_says():
    random = np.random.default_rng(0)
    inside = 0
    for _ in range(2000):
        interval = mean_interval(random.standard_normal(8), 0.9)
        inside += interval.low <= 0 <= interval.high
    assert inside / 2000 == pytest.approx(0.9, abs=0.02)


def test_proportion_interval_is_wilsons():
    # 32 of 100 at 95 %: (0.2367, 0.4166), worked from the formula with z = 1.96.
    interval = proportion_interval(32, 100, 0.95)
    assert (interval.low, interval.high) == pytest.approx((0.2367, 0.4166), abs=1e-4)
    assert proportion_interval(20, 20, 0.95).low < 1
    assert proportion_interval(0, 0, 0.95).low == 0


@pytest.mark.parametrize("length,sizes", [(10, [4, 4, 2]), (9, [4, 5]), (3, [3]), (8, [4, 4])])
def test_block_means_joins_a_short_last_block(length, sizes):
    values = np.arange(length, dtype=np.float64)
    edges = np.cumsum([0, *sizes])
    expected = [values[a:b].mean() for a, b in itertools.pairwise(edges)]
    assert block_means(values, 4) == pytest.approx(expected)


def test_samples_needed_follows_the_square_law():
    # (1.96 * 0.1 / 0.01)^2 = 384.1
    assert samples_needed(0.01, 0.1, 0.95) == 385
    assert samples_needed(0.0, 0.1, 0.95) is None
