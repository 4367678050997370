"""The gate cannot pass by accident. Fault numbers refer to the list of known faults of such pipelines."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gate_fakes import END, NEWLINE, PROMPTS, SOURCE, VOCAB, TableEngine, sampled_text, sound_table, table_baseline

from pipeline.gate.protocol import Protocol
from pipeline.gate.thresholds import Thresholds


def test_judge_passes_the_same_model_in_another_engine(table, verdict_of, measured):
    verdict = verdict_of(TableEngine(table))
    assert verdict.status == "passed"
    assert {entry.measure for entry in verdict.judgements} == {"perplexity_ratio", "top1_agreement", "new_degenerate"}
    ratio = measured(TableEngine(table)).measure("perplexity_ratio")
    assert ratio.value == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("noise,expected", [(1e-3, "passed"), (0.5, "failed")])
def test_judge_is_stable_under_noise_for_20_seeds(noise, expected, table, verdict_of):
    found = {verdict_of(TableEngine(table, noise=noise, seed=seed)).status for seed in range(20)}
    assert found == {expected}


def test_judge_gives_the_same_verdict_twice(table, verdict_of):
    assert verdict_of(TableEngine(table, noise=0.05)) == verdict_of(TableEngine(table, noise=0.05))


def test_judge_fails_a_model_whose_scores_were_multiplied_by_four(table, verdict_of):
    verdict = verdict_of(TableEngine(table * 4))
    assert verdict.status == "failed"
    assert "perplexity_ratio" in verdict.reasons[0]


def test_judge_fails_a_model_that_answers_with_newlines_although_perplexity_hardly_moves(verdict_of):
    # B11. A bias that puts the newline just above the best token everywhere makes greedy text all newlines.
    table = sound_table(sharpness=0.7)
    text = sampled_text(table)
    sick = table.copy()
    sick[:, NEWLINE] = sick.max(axis=1) + 0.005
    limits = Thresholds(perplexity_ratio_max=1.1, top1_agreement_min=None)
    verdict = verdict_of(TableEngine(sick), thresholds=limits, baseline=table_baseline(table, text), token_ids=text)
    status = {entry.measure: entry.status for entry in verdict.judgements}
    assert status == {"perplexity_ratio": "passed", "new_degenerate": "failed"}
    assert verdict.status == "failed"
    assert "blank text" in verdict.reasons[0]


def test_judge_fails_a_model_that_stops_at_once(table, verdict_of):
    mute = table.copy()
    mute[:, END] = mute.max(axis=1) + 0.01
    loose = Thresholds(perplexity_ratio_max=None, top1_agreement_min=None)
    verdict = verdict_of(TableEngine(mute), thresholds=loose)
    assert verdict.status == "failed"
    assert "immediate stop" in verdict.reasons[0]


class Mute(TableEngine):
    def logits(self, token_ids):
        return np.empty((0, VOCAB), np.float32)


@pytest.mark.parametrize(
    "engine,reason",
    [
        (lambda table: TableEngine(np.zeros_like(table)), "tied"),
        (lambda table: TableEngine(np.tile(table[0], (VOCAB, 1))), "identical scores"),
        (lambda table: TableEngine(table * np.nan), "NaN"),
        (lambda table: Mute(table), "no logits"),
        (lambda table: TableEngine(table, kind="transformers", digest=SOURCE), "candidate itself"),
    ],
    ids=["constant", "same row", "nan", "no logprobs", "own baseline"],
)
def test_judge_is_invalid_when_nothing_was_measured(engine, reason, table, verdict_of):
    # B9, and a baseline that is the candidate.
    verdict = verdict_of(engine(table))
    assert verdict.status == "invalid"
    assert any(reason in line for line in verdict.reasons)


@pytest.mark.parametrize(
    "changes,reason",
    [
        ({"source_digest": "1" * 64}, "other weights"),
        ({"tokenizer_digest": "1" * 64}, "another tokenizer"),
        ({"protocol": Protocol("x", "t", "1" * 64, tokens=100)}, "another protocol"),
        ({"token_ids": np.zeros(2048, np.int32)}, "tokenized differently"),
    ],
    ids=["weights", "tokenizer", "protocol", "tokens"],
)
def test_judge_is_invalid_when_the_baseline_is_of_something_else(changes, reason, table, verdict_of):
    verdict = verdict_of(TableEngine(table), **changes)
    assert verdict.status == "invalid"
    assert reason in verdict.reasons[0]


def test_judge_is_invalid_when_the_engine_is_too_short_for_the_window(table, verdict_of):
    class Short(TableEngine):
        @property
        def info(self):
            return replace(super().info, max_seq_len=100)

    verdict = verdict_of(Short(table))
    assert verdict.status == "invalid"
    assert "gate.window=100" in verdict.reasons[0]


def test_judge_is_invalid_when_the_baseline_is_at_chance(table, text, verdict_of):
    clueless = table_baseline(np.random.default_rng(1).standard_normal((VOCAB, VOCAB)) * 0.1, text)
    verdict = verdict_of(TableEngine(table), baseline=clueless)
    assert verdict.status == "invalid"
    assert "at chance" in verdict.reasons[0]


def test_judge_is_invalid_when_the_baselines_answers_are_all_degenerate(table, text, verdict_of):
    stuck = table.copy()
    stuck[:, NEWLINE] = stuck.max(axis=1) + 0.01
    baseline = replace(table_baseline(table, text), continuations=table_baseline(stuck, text).continuations)
    assert verdict_of(TableEngine(table), baseline=baseline).status == "invalid"


def test_judge_is_inconclusive_and_says_how_much_text_would_do_when_the_margin_is_too_fine(table, verdict_of):
    engine = TableEngine(table, noise=0.1, seed=1)
    verdict = verdict_of(engine, thresholds=Thresholds(perplexity_ratio_max=1.002, top1_agreement_min=None))
    assert verdict.status in ("inconclusive", "failed")
    short = Protocol("short", "made up", "0" * 64, tokens=200, window=256, stride=128)
    few = verdict_of(engine, protocol=short, thresholds=Thresholds(top1_agreement_min=None))
    assert few.status == "inconclusive"
    assert "would decide" in few.reasons[0]


def test_judge_is_invalid_when_no_measure_has_a_limit(table, verdict_of):
    off = Thresholds(perplexity_ratio_max=None, top1_agreement_min=None, new_degenerate_max=None)
    assert verdict_of(TableEngine(table), thresholds=off).status == "invalid"


def test_judge_rests_on_generations_when_the_engine_has_no_context_logits(table, verdict_of, measured):
    skipped = {"text": "built without context logits"}
    verdict = verdict_of(Mute(table), not_measured=skipped)
    assert verdict.status == "passed"
    assert [entry.measure for entry in verdict.judgements] == ["new_degenerate"]
    assert measured(Mute(table), not_measured=skipped).not_measured == skipped


def test_evaluate_measures_kl_close_to_the_true_one(table, text, measured):
    other = table + np.random.default_rng(3).standard_normal(table.shape).astype(np.float32) * 0.2
    p = np.exp(table - np.log(np.exp(table).sum(axis=1, keepdims=True)))
    q = np.exp(other - np.log(np.exp(other).sum(axis=1, keepdims=True)))
    full = (p * np.log(p / q)).sum(axis=1)[text[:-1]].mean()
    whole = measured(TableEngine(other), baseline=table_baseline(table, text, top_k=VOCAB)).measure("kl")
    assert whole.value == pytest.approx(full, rel=1e-3)
    best = measured(TableEngine(other)).measure("kl")
    assert 0 < best.value < full


def test_evaluate_says_that_an_unquantized_baseline_does_not_judge_the_conversion(table, text, measured):
    evaluation = measured(TableEngine(table), baseline=table_baseline(table, text, kind="unquantized"))
    assert "nothing about the conversion" in evaluation.caveats[0]


def test_evaluate_agrees_with_itself_on_greedy_text(table, measured):
    evaluation = measured(TableEngine(table))
    assert evaluation.measure("greedy_identical").value == 1
    assert [entry.agreeing_tokens for entry in evaluation.continuations] == [48] * len(PROMPTS)


def test_sampled_text_has_the_entropy_of_its_model(table, text):
    # guards the fixture: the fake model must not be at chance
    assert table_baseline(table, sampled_text(table)).perplexity < VOCAB / 2
