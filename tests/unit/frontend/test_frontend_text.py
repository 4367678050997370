"""Text is what transformers makes of the same ids, whole and in pieces. Expected values: make_text_reference.py."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import SourceError
from pipeline.frontend.detokenizer import CleanUpSpaces, ReplaceText
from pipeline.frontend.tokenizer import Tokenizer

DATA = Path(__file__).parents[2] / "data" / "frontend"
REFERENCE: dict[str, Any] = json.loads((DATA / "text.json").read_text("utf-8"))["kinds"]
KINDS = sorted(REFERENCE)
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@cache
def load(kind: str) -> Tokenizer:
    return Tokenizer(DATA / "tokenizers" / kind)


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    decoder = tokenizer.stream_decoder()
    return [*(decoder.push(token_id) for token_id in ids), decoder.finish()]


@pytest.mark.parametrize("kind", KINDS)
def test_decode_equals_transformers(kind: str) -> None:
    for case in REFERENCE[kind]["decoded"]:
        assert load(kind).decode(case["ids"]) == case["text"]


@pytest.mark.parametrize("kind", KINDS)
def test_stream_concatenates_to_transformers_text(kind: str) -> None:
    for case in REFERENCE[kind]["decoded"]:
        assert "".join(streamed(load(kind), case["ids"])) == case["text"], case["ids"]


@pytest.mark.parametrize("kind", KINDS)
def test_encode_equals_transformers(kind: str) -> None:
    for case in REFERENCE[kind]["encoded"]:
        assert load(kind).encode(case["text"]) == case["default"]
        assert load(kind).encode(case["text"], add_special_tokens=False) == case["bare"]


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_equal_transformers(kind: str) -> None:
    assert load(kind).special_tokens == REFERENCE[kind]["special_tokens"]
    assert load(kind).vocab_size == REFERENCE[kind]["vocab_size"]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_stream_equals_library_decode_for_any_ids(kind: str, data: st.DataObject) -> None:
    tokenizer = load(kind)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=30))
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["metaspace_bpe", "byte_level"])
@pytest.mark.parametrize("text", ["👨‍👩‍👧‍👦", "日本語のテキスト", "e\u0301o\u0308", "한국어 हिन्दी"])
def test_stream_never_shows_part_of_a_character(kind: str, text: str) -> None:
    tokenizer = load(kind)
    pieces = streamed(tokenizer, tokenizer.encode(text, add_special_tokens=False))
    assert "".join(pieces) == text
    assert not any(REPLACEMENT in piece for piece in pieces)


def test_stream_ends_a_cut_character_as_transformers_does() -> None:
    tokenizer = load("byte_level")
    ids = tokenizer.encode("a👋", add_special_tokens=False)[:-1]
    pieces = streamed(tokenizer, ids)
    assert not any(REPLACEMENT in piece for piece in pieces[:-1])
    assert "".join(pieces) == tokenizer.decode(ids)


def test_byte_level_text_is_shown_with_the_token_that_completes_it() -> None:
    tokenizer = load("byte_level")
    ids = tokenizer.encode("The quick fox", add_special_tokens=False)
    assert all(streamed(tokenizer, ids)[:-1])


@given(st.lists(st.text(" .'nta", max_size=4), max_size=8))
def test_clean_up_in_pieces_equals_clean_up_of_the_whole(pieces: list[str]) -> None:
    step = CleanUpSpaces()
    text = "".join([*(step.push(piece) for piece in pieces), step.finish()])
    whole = "".join(pieces)
    for rule in CleanUpSpaces.RULES:
        whole = whole.replace(rule, rule.strip())
    assert text == whole


@given(st.lists(st.text("ab", max_size=4), max_size=8), st.text("ab", min_size=1, max_size=3))
def test_replace_in_pieces_equals_replace_of_the_whole(pieces: list[str], pattern: str) -> None:
    step = ReplaceText(pattern, "-")
    text = "".join([*(step.push(piece) for piece in pieces), step.finish()])
    assert text == "".join(pieces).replace(pattern, "-")


def test_byte_level_alphabet_is_the_library_s() -> None:
    from pipeline.frontend.detokenizer import byte_alphabet

    assert sorted(byte_alphabet()) == sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())


@pytest.mark.parametrize("kind", ["metaspace_bpe", "byte_level", "unigram"])
def test_pieces_concatenate_to_the_text(kind: str) -> None:
    tokenizer = load(kind)
    for text in ("Hello world", "naïve 日本 👋 fox"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        data = b"".join(tokenizer.piece(token_id, first=position == 0) for position, token_id in enumerate(ids))
        assert data.decode() == tokenizer.decode(ids)


def test_kept_special_tokens_stay_in_the_text() -> None:
    tokenizer = load("byte_level")
    decoder = tokenizer.stream_decoder(kept=("<|pad|>",))
    ids = tokenizer.encode("<|end|>a<|pad|>b", add_special_tokens=False)
    assert "".join(decoder.push(token_id) for token_id in ids) + decoder.finish() == "a<|pad|>b"


def test_eos_ids_are_the_union_of_both_sources(tmp_path: Path) -> None:
    for path in (DATA / "tokenizers" / "byte_level").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    eos = load("byte_level").eos_ids
    assert eos == (1,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 1]}')
    assert Tokenizer(tmp_path).eos_ids == (7, 1)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert Tokenizer(tmp_path).eos_ids == (9, 1)


def test_missing_or_broken_tokenizer_is_a_source_error(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"no tokenizer\.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(SourceError, match="Cannot read"):
        Tokenizer(tmp_path)
