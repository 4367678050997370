"""Multiple choice by log-likelihood."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from gate_fakes import TableEngine

from pipeline.errors import SourceError
from pipeline.gate.baseline import TaskScores, find_recorded
from pipeline.gate.protocol import STANDARD
from pipeline.gate.scoring import NothingMeasured
from pipeline.gate.tasks import Item, Task, hits, load_task, score_task, task_path
from pipeline.gate.thresholds import Thresholds

SMOLLM2 = "5e526b38d850990aab8572850090f3707e1ddff2ae4b456af3ae78334115cc47"


def encode(text):
    """One token per character, folded into the small vocabulary."""
    return [ord(character) % 40 for character in text]


def item(answer, lengths=(4, 4)):
    choices = tuple("x" * length for length in lengths)
    return Item("c", choices, answer, (1,), tuple((2,) * length for length in lengths))


def test_hits_divides_by_characters_for_acc_norm():
    # -6 over 2 characters is -3, -8 over 8 characters is -1: raw takes the short one, normalized the long one.
    task = Task("t", "0", (item(1, (2, 8)),))
    found = hits(task, TaskScores("t", "0", ((-6.0, -8.0),)))
    assert (found.acc.tolist(), found.acc_norm.tolist()) == ([False], [True])


def test_load_task_joins_context_and_choice_with_one_space(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"question": "Who?", "choices": ["He.", "She."], "expected_index": 1}) + "\n\n")
    (only,) = load_task(path, encode).items
    assert only.context == "Q: Who?\nA:"
    assert only.choice_ids[1] == tuple(encode(" She."))
    assert (only.answer, load_task(path, encode).chance) == (1, 0.5)


@pytest.mark.parametrize(
    "line,message",
    [
        ("{", "not a multiple-choice item"),
        pytest.param("[" * 100_000, "not a multiple-choice item", id="nested"),
        ('{"question": "q"}', "not a multiple-choice item"),
        ('{"context": "c", "choices": ["one"], "answer": 0}', "two or more"),
        ('{"context": "c", "choices": ["a", "b"], "answer": 2}', "index below 2"),
        ('{"context": "", "choices": ["a", "b"], "answer": 1}', "no tokens"),
        ("", "no items"),
    ],
)
def test_load_task_refuses_bad_lines_by_name(line, message, tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(line)
    with pytest.raises(SourceError, match=rf"t\.jsonl.*{message}"):
        load_task(path, encode)


def test_score_task_gives_the_log_probability_of_each_choice(table):
    task = Task("t", "0", (Item("c", ("a", "b"), 0, (3,), ((5,), (6, 7))), item(0)))
    row = score_task(TableEngine(table), task).loglikelihoods[0]
    logp = table - np.log(np.exp(table).sum(axis=1, keepdims=True))
    assert row == pytest.approx((logp[3, 5], logp[3, 6] + logp[6, 7]), abs=1e-5)


@pytest.mark.parametrize("items,reason", [((item(0),), "tied"), ((item(0, (2, 3)),) * 3, "identical scores")])
def test_score_task_refuses_scores_that_say_nothing(items, reason, table):
    with pytest.raises(NothingMeasured, match=reason):
        score_task(TableEngine(table), Task("t", "0", items))


# Published: HellaSwag 32 raw, 39 normalized; TruthfulQA 27 raw, 34 normalized, with bf16 arithmetic. The baseline is
# float32: one normalized HellaSwag item is decided the other way.
@pytest.mark.parametrize("name,acc,acc_norm", [("hellaswag", 32, 40), ("truthfulqa_mc1", 27, 34)])
def test_recorded_task_scores_are_the_published_ones(name, acc, acc_norm):
    recorded = find_recorded(SMOLLM2)
    assert recorded is not None
    task = load_task(task_path(name), encode)
    scores = next(entry for entry in recorded.tasks if entry.name == name)
    assert scores.digest == task.digest
    found = hits(task, scores)
    assert (found.acc.sum(), found.acc_norm.sum()) == (acc, acc_norm)
    assert recorded.protocol == STANDARD


def answered(rights):
    """Return 100 scores that choose rightly where ``rights`` says so."""
    return tuple((-1.0, -2.0) if right else (-2.0, -1.0) for right in rights)


@pytest.fixture
def knowing():
    """A task of 100 items the table model answers: choice 0 is what follows token i, choice 1 is rare."""

    def make(table):
        items = []
        for index in range(46):
            best, worst = int(table[index].argmax()), int(table[index].argmin())
            items.append(Item("c", ("a", "b"), 0, (index,), ((best,), (worst,))))
        return Task("known", "4" * 64, tuple(items))

    return make


def test_evaluate_compares_tasks_item_by_item(table, baseline, knowing, measured, verdict_of):
    task = knowing(table)
    with_task = replace(baseline, tasks=(score_task(TableEngine(table), task),))
    evaluation = measured(TableEngine(table), baseline=with_task, tasks=[task])
    assert evaluation.measure("task:known").value == 0
    assert evaluation.tasks[0].candidate_acc_norm == 1
    limits = Thresholds(task_drop_max=0.1, perplexity_ratio_max=None, top1_agreement_min=None)
    assert verdict_of(TableEngine(-table), baseline=with_task, tasks=[task], thresholds=limits).status == "failed"


def test_evaluate_is_invalid_when_the_baseline_is_at_chance_on_a_task(table, baseline, knowing, verdict_of):
    task = knowing(table)
    half = replace(baseline, tasks=(TaskScores("known", task.digest, answered([True, False] * 23)),))
    verdict = verdict_of(TableEngine(table), baseline=half, tasks=[task])
    assert verdict.status == "invalid"
    assert "at chance" in verdict.reasons[0]


def test_evaluate_is_invalid_when_the_baseline_never_saw_the_task(table, knowing, verdict_of):
    verdict = verdict_of(TableEngine(table), tasks=[knowing(table)])
    assert verdict.status == "invalid"
    assert "no scores" in verdict.reasons[0]


def test_task_path_takes_shipped_names_and_files(tmp_path):
    own = tmp_path / "own.jsonl"
    own.write_text("{}")
    assert task_path(str(own)) == own
    assert task_path("hellaswag").is_file()
    with pytest.raises(SourceError, match="hellaswag, truthfulqa_mc1"):
        task_path("hellaswug")
