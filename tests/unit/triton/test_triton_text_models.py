"""Encoding and decoding in preprocessing and postprocessing, without a server."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from triton_models import BOS, EOS, IM_END

TEXTS = ["the User: the", "  two  spaces ", "Łódź – naïve", "日本語のテキスト", "👩‍👩‍👧‍👦 family", "tab\tnew\nline"]


@pytest.fixture(scope="module")
def encoder(preprocessing: ModuleType, tokenizer: Path) -> Any:
    return preprocessing.TextEncoder(tokenizer, add_special_tokens=True)


@pytest.fixture(scope="module")
def decoder(postprocessing: ModuleType, tokenizer: Path) -> Any:
    return postprocessing.TextDecoder(tokenizer, skip_special_tokens=True, end_ids=(EOS, IM_END))


@pytest.fixture(scope="module")
def metaspace_decoder(postprocessing: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A sentencepiece-like tokenizer with byte fallback; its decoder strips the first space of a text."""
    from tokenizers import Tokenizer, decoders, models

    pieces = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], "▁Hello", "▁world", "ly", "▁"]
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    folder = tmp_path_factory.mktemp("metaspace")
    tokenizer.save(str(folder / "tokenizer.json"))
    return postprocessing.TextDecoder(folder, skip_special_tokens=True)


def streamed(decoder: Any, ids: list[int], chunk: int) -> list[str]:
    starts = range(0, len(ids), chunk)
    return [decoder.delta(ids[:s], ids[s : s + chunk], is_last=s + chunk >= len(ids)) for s in starts]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("chunk", [1, 2, 8])
def test_stream_adds_up_to_the_text_and_cuts_no_character(encoder: Any, decoder: Any, text: str, chunk: int) -> None:
    ids = encoder.encode_word(text)
    parts = streamed(decoder, ids, chunk)
    assert "".join(parts) == text == decoder.decode(ids)
    assert not any("\ufffd" in part for part in parts)


@pytest.mark.parametrize("chunk", [1, 2, 8])
def test_stream_keeps_spaces_and_bytes_of_a_sentencepiece_tokenizer(metaspace_decoder: Any, chunk: int) -> None:
    smile = [3 + byte for byte in "🙂".encode()]
    ids = [259, 260, 261, *smile, 262, 260]
    assert "".join(streamed(metaspace_decoder, ids, chunk)) == "Hello worldly🙂  world"


def test_bytes_that_never_complete_are_released_at_the_end(encoder: Any, decoder: Any) -> None:
    ids = encoder.encode_word("a日")[:-1]
    assert "".join(streamed(decoder, ids, 1)) == decoder.decode(ids)
    assert decoder.delta(ids[:-1], ids[-1:], is_last=False) == ""


def test_end_token_that_is_not_special_leaves_no_marker(postprocessing: ModuleType, tokenizer: Path) -> None:
    end = 40
    decoder = postprocessing.TextDecoder(tokenizer, skip_special_tokens=True, end_ids=(end,))
    assert decoder.decode([41, end]) == decoder.decode([41])


@pytest.mark.parametrize("text", ["the", "<s>the", ""])
def test_prompt_has_bos_exactly_once(encoder: Any, text: str) -> None:
    ids = encoder.encode_prompt(text)
    assert ids[0] == BOS
    assert ids.count(BOS) == 1


def test_special_tokens_are_left_to_the_text_when_switched_off(preprocessing: ModuleType, tokenizer: Path) -> None:
    encoder = preprocessing.TextEncoder(tokenizer, add_special_tokens=False)
    assert BOS not in encoder.encode_prompt("the")
    assert encoder.encode_prompt("<s>the")[0] == BOS


def test_stop_word_is_given_in_every_way_it_may_be_cut(encoder: Any) -> None:
    variants = encoder.word_variants("User:")
    assert encoder.encode_word("User:") in variants
    assert encoder.encode_word("\nUser:") in variants  # one token in this vocabulary
    assert len(variants) == 2


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], [[0], [-1]]),
        ([[7]], [[7], [1]]),
        ([[7, 8], [9]], [[7, 8, 9], [2, 3, -1]]),
    ],
)
def test_word_list_has_the_backends_format(
    preprocessing: ModuleType, words: list[list[int]], expected: list[list[int]]
) -> None:
    packed = preprocessing.word_list(words)
    assert packed.dtype == np.int32
    assert packed.tolist() == expected
