"""Guided decoding of the reference model: what may follow, what is refused, and where it is offered."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from triton_models import EOS, IM_END, VOCAB_SIZE

from pipeline.triton.model_config import parameters_of, read_config
from pipeline.triton.repository import has_guided_decoding

TOKENIZERS = Path(__file__).parents[2] / "data" / "frontend" / "tokenizers"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "size": {"type": "integer"}},
    "required": ["city", "size"],
    "additionalProperties": False,
}


def walk(guided: ModuleType, tokenizer: Path, kind: str, text: str, seed: int, limit: int = 400) -> str | None:
    """Follow a guide at random until it lets the answer end; None when the limit comes first."""
    decoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    random = np.random.default_rng(seed)
    follow = guided.Guides(tokenizer / "tokenizer.json", VOCAB_SIZE, [EOS, IM_END]).compile(kind, text).fresh()
    output: list[int] = []
    while len(output) < limit:
        allowed = follow(output)
        if allowed[EOS]:
            assert allowed[IM_END]
            return decoder.decode(output, skip_special_tokens=False)
        output.append(int(random.choice(np.flatnonzero(allowed))))
    return None


@pytest.mark.parametrize("seed", range(4))
def test_any_path_through_a_schema_gives_a_document_of_that_schema(
    guided: ModuleType, tokenizer: Path, seed: int
) -> None:
    text = walk(guided, tokenizer, "json_schema", json.dumps(SCHEMA), seed)
    assert text is not None
    document = json.loads(text)
    assert document["city"] in ("Paris", "Rome") and isinstance(document["size"], int) and len(document) == 2


def test_any_path_through_an_expression_or_grammar_matches_it(guided: ModuleType, tokenizer: Path) -> None:
    assert re.fullmatch("[ab]{2,4}-(x|yy)", walk(guided, tokenizer, "regex", "[ab]{2,4}-(x|yy)", 1) or "")
    assert walk(guided, tokenizer, "ebnf_grammar", 'root ::= "yes" | "no"', 1) in ("yes", "no")
    assert walk(guided, tokenizer, "ebnf_grammar", 'start: "yes" | "no"', 2) in ("yes", "no")
    assert isinstance(json.loads(walk(guided, tokenizer, "json", "", 3, limit=4000) or "{}"), dict)


def test_nothing_may_follow_the_end(guided: ModuleType, tokenizer: Path) -> None:
    guide = guided.Guides(tokenizer / "tokenizer.json", VOCAB_SIZE, [EOS]).compile("regex", "a")
    first, second = guide.fresh(), guide.fresh()
    a = int(np.flatnonzero(first([]))[0])
    assert first([a]).nonzero()[0].tolist() == [EOS]
    assert not first([a, EOS]).any()
    assert second([])[a]  # each sequence follows a copy of its own


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("regex", "((", "no usable regex"),
        ("json_schema", "{", "no usable json_schema"),
        ("json_schema", '{"type": "nope"}', "no usable json_schema"),
        ("ebnf_grammar", "%%%", "no usable ebnf_grammar"),
        ("regex", "", "is empty"),
        ("structural_tag", "{}", "expected one of json, json_schema"),
        ("regex", "a" * (2**20 + 1), "at most 1048576"),
    ],
)
def test_a_guide_that_is_none_is_refused_by_name(
    guided: ModuleType, tokenizer: Path, kind: str, text: str, words: str
) -> None:
    with pytest.raises(guided.GuideError, match=words):
        guided.Guides(tokenizer / "tokenizer.json", VOCAB_SIZE, [EOS]).compile(kind, text)


def test_every_sequence_of_a_request_has_a_guide_of_its_own(
    guided: ModuleType, llm_request: ModuleType, tokenizer: Path
) -> None:
    tensors: dict[str, Any] = {
        "input_ids": np.array([[5, 6]], np.int32),
        "input_lengths": np.array([[2]], np.int32),
        "request_output_len": np.array([[5]], np.int32),
        "num_return_sequences": np.array([[2]], np.int32),
        "guided_decoding_guide_type": np.array([[b"regex"]], np.object_),
        "guided_decoding_guide": np.array([[b"[ab]{2}"]], np.object_),
    }
    limits = llm_request.Limits(vocab_size=VOCAB_SIZE, max_seq_len=16, exclude_input=True)
    guides = guided.Guides(tokenizer / "tokenizer.json", VOCAB_SIZE, [EOS])
    (call,) = llm_request.parse_calls(tensors, limits, 1, guides)
    first, second = call.engine_requests("r")
    assert first.allowed is not None and second.allowed is not None and first.allowed is not second.allowed
    with pytest.raises(llm_request.RequestError, match="guided decoding is not supported"):
        llm_request.parse_calls(tensors, limits, 1)
    del tensors["guided_decoding_guide_type"]
    with pytest.raises(llm_request.RequestError, match="needs guided_decoding_guide_type"):
        llm_request.parse_calls(tensors, limits, 1, guides)


def test_the_repository_offers_guided_decoding_where_the_tokenizer_is_understood(repository: Path) -> None:
    parameters = parameters_of(read_config(repository / "tensorrt_llm" / "config.pbtxt"))
    assert parameters["guided_decoding_backend"] == "llguidance"
    assert parameters["end_ids"] == f"{EOS},{IM_END}"
    assert (repository / "tensorrt_llm" / "1" / "tokenizer.json").is_file()
    # Measured: llguidance reads byte-level and byte-fallback decoders, not WordPiece's.
    assert has_guided_decoding(TOKENIZERS / "metaspace_bpe" / "tokenizer.json")
    assert not has_guided_decoding(TOKENIZERS / "word_piece" / "tokenizer.json")
