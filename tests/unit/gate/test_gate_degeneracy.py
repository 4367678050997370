"""What counts as broken text."""

from __future__ import annotations

import pytest

from pipeline.gate.degeneracy import degeneracy, periodic_run


@pytest.mark.parametrize(
    "ids,text,expected",
    [
        ([], None, "empty"),
        ([2], None, "immediate stop"),
        ([2, 5, 6], None, "immediate stop"),
        ([9] * 40, None, "one token repeated"),
        ([5, 6, 7, *[9] * 20], None, "one token repeated"),
        ([4, 7, 9] * 12, None, "cycle of 3 tokens"),
        (list(range(20)) + [4, 7] * 15, None, "cycle of 2 tokens"),
        ([30, 31, 32], " \n\n", "blank text"),
        (list(range(40)), "words", ""),
        ([5, 9, 9, 9, 6, 8, 10, 2], "short echo", ""),
        ([3, 4, 5, 3, 4, 5, 6, 7, 8, 9, 10, 11], "echo", ""),
        ([7, 2], "Yes", ""),
    ],
    ids=lambda value: str(value)[:24],
)
def test_degeneracy_names_the_fault(ids, text, expected):
    assert degeneracy(ids, end_ids=(2,), text=text) == expected


def test_periodic_run_finds_a_run_in_the_middle():
    assert periodic_run([1, 2, 8, 9, 8, 9, 8, 9, 3], 2) == 6
    assert periodic_run([1, 2, 3, 4], 2) == 0
