from __future__ import annotations

import pytest

from pipeline.facts import precisions
from pipeline.facts.releases import has_engine_builder, is_at_least, parse


def test_releases_sort_with_candidates_before_finals() -> None:
    names = ["0.18.2", "0.20.0", "1.0.0", "1.2.1", "1.3.0rc6", "1.3.0rc20", "1.3.0rc21", "1.3.0", "1.4.0rc1"]
    assert sorted(reversed(names), key=lambda name: parse(name) or (0, 0, 0, 0, 0)) == names


@pytest.mark.parametrize(
    ("release", "expected"),
    [("1.2.1", True), ("1.3.0rc20", True), ("1.3.0rc21", False), ("1.3.0", False), ("1.4.0", False), ("latest", False)],
)
def test_engine_builder_ends_with_rc21(release: str, expected: bool) -> None:
    assert has_engine_builder(release) is expected


def test_words_are_newer_than_numbers() -> None:
    assert is_at_least("latest", "9.9")
    assert not is_at_least("1.0.0", "latest")


@pytest.mark.parametrize(
    ("sm", "name"),
    [
        (75, None),
        (80, "Ampere"),
        (86, "Ampere"),
        (89, "Ada"),
        (90, "Hopper"),
        (103, "Blackwell"),
        (120, "Blackwell RTX"),
    ],
)
def test_generation_follows_from_compute_capability(sm: int, name: str | None) -> None:
    assert precisions.generation(sm) == name


@pytest.mark.parametrize(
    ("algorithm", "sm", "expected"),
    # Support matrix of the engine backend.
    [("FP8", 80, "no"), ("FP8", 89, "yes"), ("NVFP4", 90, "no"), ("NVFP4", 100, "yes"), ("W8A16", 100, "no")],
)
def test_support_is_that_of_the_matrix(algorithm: str, sm: int, expected: str) -> None:
    assert precisions.support(algorithm, sm) == expected
