"""Per-token scores against values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from gate_fakes import PROTOCOL, VOCAB, TableEngine

from pipeline.gate.protocol import Protocol
from pipeline.gate.scoring import NothingMeasured, score_continuation, score_text


class TwoTokens(TableEngine):
    """p(same) = 3/4, p(other) = 1/4 over a vocabulary of two."""

    def __init__(self):
        super().__init__(np.log(np.array([[0.75, 0.25], [0.25, 0.75]])))

    @property
    def info(self):
        return type(super().info)("reference", "two", 2, 64)


def test_score_text_gives_the_perplexity_worked_by_hand():
    # a a b b: 3/4, 1/4, 3/4 -> perplexity (64/9)^(1/3)
    protocol = Protocol("hand", "t", "0" * 64, tokens=4, window=3, stride=1)
    scores = score_text(TwoTokens(), np.array([0, 0, 1, 1], np.int32), protocol, top_k=2)
    assert np.exp(scores.logprobs) == pytest.approx([0.75, 0.25, 0.75], abs=1e-6)
    assert float(np.exp(-scores.logprobs.mean())) == pytest.approx((64 / 9) ** (1 / 3), abs=1e-6)
    assert scores.top1.tolist() == [0, 0, 1]
    assert scores.alternatives.tolist() == [[0, 1], [0, 1], [1, 0]]
    assert np.exp(scores.alternative_logprobs[0]) == pytest.approx([0.75, 0.25], abs=1e-6)


def test_score_text_scores_each_token_once_and_keeps_to_the_window(table, text):
    engine = TableEngine(table)
    scores = score_text(engine, text, PROTOCOL)
    assert len(scores.logprobs) == PROTOCOL.tokens - 1
    assert max(len(call) for call in engine.calls) == PROTOCOL.window
    rows = table[text[:-1]].astype(np.float64)
    expected = rows[np.arange(len(rows)), text[1:]] - np.log(np.exp(rows).sum(axis=1))
    assert scores.logprobs == pytest.approx(expected, abs=1e-5)


def test_score_text_of_a_shorter_protocol_is_a_prefix(table, text):
    short = Protocol("short", "t", "0" * 64, tokens=700, window=PROTOCOL.window, stride=PROTOCOL.stride)
    whole = score_text(TableEngine(table), text, PROTOCOL)
    part = score_text(TableEngine(table), text, short)
    assert np.array_equal(part.logprobs, whole.logprobs[:699])


def test_score_text_puts_the_first_token_before_every_window(table, text):
    protocol = Protocol("bos", "t", "0" * 64, tokens=600, window=256, stride=128, add_bos=True)
    engine = TableEngine(table)
    with_bos = score_text(engine, text, protocol, bos_id=3)
    assert all(call[0] == 3 for call in engine.calls)
    assert np.array_equal(with_bos.logprobs, score_text(TableEngine(table), text[:600], PROTOCOL).logprobs)
    with pytest.raises(NothingMeasured, match="add_bos"):
        score_text(engine, text, protocol)


def broken(name):
    nan = np.zeros((VOCAB, VOCAB), np.float32)
    nan[:, 3] = np.nan
    infinite = np.random.default_rng(0).standard_normal((VOCAB, VOCAB)).astype(np.float32)
    infinite[5, 7] = np.inf
    same_row = np.tile(np.random.default_rng(0).standard_normal(VOCAB), (VOCAB, 1))
    return {
        "nan": (nan, "NaN or inf"),
        "inf": (infinite, "NaN or inf"),
        "all tokens tied": (np.zeros((VOCAB, VOCAB)), "tied"),
        "same row everywhere": (same_row, "identical scores for all positions"),
    }[name]


@pytest.mark.parametrize("name", ["nan", "inf", "all tokens tied", "same row everywhere"])
def test_score_text_refuses_logits_that_say_nothing(name, text):
    logits, reason = broken(name)
    with pytest.raises(NothingMeasured, match=reason):
        score_text(TableEngine(logits), text, PROTOCOL)


@pytest.mark.parametrize("shape", [(0, VOCAB), (255, VOCAB), (256, VOCAB - 1)])
def test_score_text_refuses_logits_of_the_wrong_shape(shape, table, text):
    class Short(TableEngine):
        def logits(self, token_ids):
            return np.zeros(shape, np.float32)

    with pytest.raises(NothingMeasured, match=r"no logits|shape"):
        score_text(Short(table), text, PROTOCOL)


def test_score_text_refuses_a_text_without_tokens_to_score(table):
    with pytest.raises(NothingMeasured, match="no scored tokens"):
        score_text(TableEngine(table), np.array([1], np.int32), PROTOCOL)


def test_score_text_ignores_vocabulary_padding(table, text):
    padded = np.concatenate([table, np.full((VOCAB, 16), 50.0, np.float32)], axis=1)
    plain = score_text(TableEngine(table), text, PROTOCOL)
    assert np.array_equal(score_text(TableEngine(padded), text, PROTOCOL).logprobs, plain.logprobs)


def test_score_text_reports_progress_to_the_end(table, text):
    seen = []
    score_text(TableEngine(table), text, PROTOCOL, progress=lambda *event: seen.append(event))
    assert seen[-1] == (2047.0, 2047.0, "tokens")
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)


def test_score_continuation_sums_the_right_positions():
    # after [0]: 1 then 1 -> log(1/4) + log(3/4)
    total, greedy = score_continuation(TwoTokens(), [1, 0], [1, 1])
    assert total == pytest.approx(np.log(0.25 * 0.75), abs=1e-6)
    assert not greedy
    assert score_continuation(TwoTokens(), [0], [0, 0])[1]
