"""The text model's own logic: stop strings, streams, drafts."""

from __future__ import annotations

import itertools
import random
from types import ModuleType

import pytest
from conftest import ROOT, load_model_file


@pytest.fixture(scope="module")
def bls() -> ModuleType:
    return load_model_file(
        ROOT / "triton_repo" / "engine" / "tensorrt_llm_bls" / "1" / "bls_decoding.py", "bls_decoding"
    )


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("ABCDEFGHIJK", ["DEFGHIJ"], "ABC"),  # known fault E3
        ("ABCDEFGHIJK", ["DEFX"], "ABCDEFGHIJK"),
        ("aaab", ["aab"], "a"),
        ("xyz", ["yz", "xyz"], ""),
        ("abcd", ["cd", "bc"], "a"),
        ("abc", ["", "zz"], "abc"),
        ("", ["a"], ""),
    ],
)
def test_text_is_cut_before_a_stop_string_however_it_arrives(
    bls: ModuleType, text: str, stops: list[str], expected: str
) -> None:
    for size in range(1, 4):
        cutter = bls.StopCutter(stops)
        parts = [cutter.feed(text[at : at + size]) for at in range(0, len(text), size)]
        shown = "".join(parts)
        assert expected.startswith(shown)  # nothing of the stop string was ever out
        assert shown + cutter.feed("", is_last=True) == expected
        assert cutter.is_stopped == (expected != text)


def test_word_list_is_split_by_its_offsets(bls: ModuleType) -> None:
    assert bls.words_of([[7, 8, 9], [2, 3, -1]]) == [[7, 8], [9]]
    assert bls.words_of([[0], [-1]]) == []


def recite(text: list[int], position: int) -> int | None:
    return text[position] if position < len(text) else None


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("draft_tokens", [1, 3, 8])
def test_drafts_change_nothing(bls: ModuleType, seed: int, draft_tokens: int) -> None:
    numbers = random.Random(seed)
    text = [numbers.randrange(5) for _ in range(numbers.randrange(1, 40))]  # ends with an end id after that
    calls = itertools.count()

    def draft(ids: list[int], count: int) -> tuple[list[int], None]:
        wanted = [recite(text, len(ids) - 2 + k) for k in range(count)]
        known = list(itertools.takewhile(lambda token: token is not None, wanted))
        return [token if numbers.random() < 0.7 else 9 for token in known if token is not None], None

    def target(ids: list[int], drafted: list[int], details: object, count: int) -> list[int]:
        next(calls)
        answer: list[int] = []
        while len(answer) < count:
            token = recite(text, len(ids) - 2 + len(answer))
            if token is None:
                break
            answer.append(token)
            if len(answer) > len(drafted) or drafted[len(answer) - 1] != token:
                break
        return answer

    for limit in (1, 7, 100):
        counts = bls.Drafting()
        rounds = bls.speculate(
            [0, 0],
            max_tokens=limit,
            draft_tokens=draft_tokens,
            stop_words=[],
            draft=draft,
            target=target,
            counts=counts,
        )
        assert [token for ids in rounds for token in ids] == text[:limit]
        assert 0 <= counts.accepted <= counts.drafted
    assert next(calls) > 0


def test_stop_word_across_two_rounds_ends_the_answer(bls: ModuleType) -> None:
    answers = iter([[1, 2], [3, 4]])
    rounds = bls.speculate(
        [0],
        max_tokens=10,
        draft_tokens=1,
        stop_words=[[2, 3]],
        draft=lambda ids, count: ([len(ids) if len(ids) < 2 else 3], None),
        target=lambda ids, drafted, details, count: next(answers),
        counts=bls.Drafting(),
    )
    assert list(rounds) == [[1, 2], [3]]
