"""Axes and bars of the charts."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from pipeline.report.plots import block_differences, histogram, interval_strip, label, ticks


@pytest.mark.parametrize(
    "low,high,expected",
    [
        (0, 1, [0, 0.25, 0.5, 0.75, 1]),
        (-0.011, 0.011, [-0.01, 0, 0.01]),
        (0, 32, [0, 10, 20, 30]),
        (-13.7, 0, [-10, -5, 0]),
    ],
)
def test_ticks_are_round(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize("value,expected", [(0, "0"), (0.25, "0.25"), (-5.0, "-5"), (2e-5, "2e-5")])
def test_label_is_short(value, expected):
    assert label(value) == expected


def bars(markup):
    return [e for e in ElementTree.fromstring(markup).iter("rect") if e.get("class").startswith("bar")]


def test_block_differences_draws_losses_upwards():
    text = {"block_differences": [0.1, -0.05, 0.0], "block_tokens": 64}
    worse, better, _ = bars(block_differences(text, 1.05))
    assert (worse.get("class"), better.get("class")) == ("bar worse", "bar better")
    zero = float(worse.get("y")) + float(worse.get("height"))
    assert float(better.get("y")) == pytest.approx(zero, abs=0.2)
    assert float(worse.get("height")) == pytest.approx(2 * float(better.get("height")), rel=0.02)


def test_block_differences_survives_nothing_but_zeros():
    assert len(bars(block_differences({"block_differences": [0.0, 0.0], "block_tokens": 64}, None))) == 2


def test_histogram_drops_empty_decades_at_the_ends():
    drawn = histogram("t", "x", [-4, -3, -2, -1, 0, 1], [0, 0, 5, 0, 0], powers_of_ten=True)
    assert len(bars(drawn)) == 1
    assert "10⁻²" in drawn and "10¹" not in drawn


def test_interval_strip_says_in_words_what_it_draws():
    measure = {"value": 1.02, "interval": [1.0, 1.04], "limit": 1.05, "limit_is": "at most", "status": "passed"}
    assert "1.02, interval 1 to 1.04, limit at most 1.05" in interval_strip(measure)
    assert interval_strip({**measure, "interval": [None, None]}) == ""
