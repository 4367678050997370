"""Holds a candidate's answers against the baseline's: text, continuations, tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from pipeline.engines.protocol import Engine
from pipeline.gate.baseline import Baseline, TaskScores
from pipeline.gate.degeneracy import degeneracy
from pipeline.gate.evaluation import ComparedContinuation, ComparedTask, Measure, Passage
from pipeline.gate.prompts import generate_greedily
from pipeline.gate.scoring import NothingMeasured, Progress, TextScores
from pipeline.gate.statistics import Floats, Interval, block_means, mean_interval, proportion_interval
from pipeline.gate.tasks import Task, hits, score_task
from pipeline.gate.thresholds import BLOCK_TOKENS

Decode = Callable[[Sequence[int]], str]
_WORST = 5


def divergences(baseline: Baseline, scores: TextScores) -> Floats:
    """Return KL(baseline, candidate) per token, [n] nats, over the baseline's k best tokens and all others as one.

    Joining outcomes never raises a divergence, so this is a lower bound of the full one.
    """
    if not scores.alternatives.shape[1]:
        return np.empty(0)
    reference = baseline.top_logprobs.astype(np.float64)
    found = scores.alternative_logprobs.astype(np.float64)
    p, q = np.exp(reference), np.exp(found)
    tiny = 1e-7  # float16 storage of the baseline can push its k best just above one
    p_rest = np.maximum(1 - p.sum(axis=1), tiny)
    q_rest = np.maximum(1 - q.sum(axis=1), tiny)
    total: Floats = (p * (reference - found)).sum(axis=1) + p_rest * np.log(p_rest / q_rest)
    return total


def text_measures(
    baseline: Baseline, scores: TextScores, differences: Floats, divergences: Floats, confidence: float
) -> list[Measure]:
    """Compare token by token; intervals come from blocks of neighbouring tokens."""
    blocks = block_means(differences, BLOCK_TOKENS)
    drop = mean_interval(blocks, confidence)
    agree = scores.top1 == baseline.top_ids[:, 0] if baseline.top_ids.shape[1] else None
    perplexity = float(np.exp(-scores.logprobs.mean(dtype=np.float64)))
    tokens = len(differences)
    measures = [
        Measure("perplexity", perplexity, "perplexity", samples=tokens, detail=f"candidate, {tokens} tokens"),
        Measure("baseline_perplexity", baseline.perplexity, "perplexity", samples=tokens, detail=baseline.kind),
        Measure(
            "perplexity_ratio",
            float(np.exp(differences.mean())),
            "ratio",
            Interval(_exp(drop.low), _exp(drop.high), confidence),
            len(blocks),
            f"candidate over baseline, {len(blocks)} blocks of {BLOCK_TOKENS} tokens",
        ),
    ]
    if divergences.size:
        kl_blocks = block_means(divergences, BLOCK_TOKENS)
        width = baseline.top_ids.shape[1]
        detail = f"over the baseline's {width} best tokens and the rest as one: a lower bound"
        interval = mean_interval(kl_blocks, confidence)
        measures.append(Measure("kl", float(divergences.mean()), "nats/token", interval, len(kl_blocks), detail))
    if agree is not None:
        interval = proportion_interval(int(agree.sum()), tokens, confidence)
        detail = "positions where both predict the same next token"
        measures.append(Measure("top1_agreement", float(agree.mean()), "share", interval, tokens, detail))
    spread = np.abs(differences)
    measures += [
        Measure("logprob_difference_mean", float(differences.mean()), "nats", drop, len(blocks)),
        Measure("logprob_difference_deviation", float(differences.std()), "nats", samples=tokens),
        Measure("logprob_difference_p99", float(np.quantile(spread, 0.99)), "nats", samples=tokens),
        Measure("logprob_difference_max", float(spread.max()), "nats", samples=tokens),
    ]
    return measures


def worst_passages(differences: Floats, token_ids: npt.NDArray[np.int32], decode: Decode) -> tuple[Passage, ...]:
    blocks = block_means(differences, BLOCK_TOKENS)
    found = []
    for index in np.argsort(-blocks, kind="stable")[:_WORST]:
        first = int(index) * BLOCK_TOKENS + 1  # token 0 has no score
        found.append(Passage(first, float(blocks[index]), decode(token_ids[first : first + BLOCK_TOKENS].tolist())))
    return tuple(found)


def _exp(value: float) -> float:
    """exp that answers inf instead of overflowing."""
    return float(np.exp(min(value, 700.0))) if value < 700 else float("inf")


def compare_continuations(
    candidate: Engine, baseline: Baseline, decode: Decode, progress: Progress | None
) -> tuple[ComparedContinuation, ...]:
    prompts = [entry.prompt for entry in baseline.continuations]
    if progress is not None:
        progress(0.0, float(len(prompts)), "prompts")
    generations = generate_greedily(
        candidate, prompts, end_ids=baseline.end_ids, max_new_tokens=baseline.max_new_tokens
    )
    compared = []
    for entry, generation in zip(baseline.continuations, generations, strict=True):
        text = decode([token for token in generation.token_ids if token not in baseline.end_ids])
        pairs = zip(entry.token_ids, generation.token_ids, strict=False)
        same = next(
            (n for n, (a, b) in enumerate(pairs) if a != b), min(len(entry.token_ids), len(generation.token_ids))
        )
        compared.append(
            ComparedContinuation(
                entry.prompt.name,
                entry.prompt.kind,
                entry.prompt.text,
                entry.text,
                text,
                degeneracy(entry.token_ids, baseline.end_ids, entry.text),
                degeneracy(generation.token_ids, baseline.end_ids, text),
                same,
            )
        )
    if progress is not None:
        progress(float(len(prompts)), float(len(prompts)), "prompts")
    return tuple(compared)


def generation_measures(continuations: Sequence[ComparedContinuation]) -> list[Measure]:
    sound = [entry for entry in continuations if not entry.baseline_fault]
    broken = [entry for entry in sound if entry.candidate_fault]
    if not sound:
        raise NothingMeasured("generations: the baseline's own answers are all degenerate, nothing to compare with")
    names = ", ".join(f"{entry.name}: {entry.candidate_fault}" for entry in broken) or "none"
    same = float(np.mean([entry.candidate_text == entry.baseline_text for entry in continuations]))
    return [
        Measure("new_degenerate", len(broken) / len(sound), "share", samples=len(sound), detail=names),
        Measure(
            "greedy_identical", same, "share", samples=len(continuations), detail="answers equal to the baseline's"
        ),
    ]


def compare_task(candidate: Engine, task: Task, baseline: Baseline, progress: Progress | None) -> ComparedTask:
    recorded = next((entry for entry in baseline.tasks if entry.digest == task.digest), None)
    if recorded is None:
        raise NothingMeasured(f"task {task.name}: the baseline has no scores for this file")
    reference = hits(task, TaskScores(task.name, task.digest, recorded.loglikelihoods[: len(task.items)]))
    chance_interval = proportion_interval(int(reference.acc_norm.sum()), len(task.items), 0.9)
    if chance_interval.low <= task.chance:
        raise NothingMeasured(
            f"task {task.name}: the baseline is at chance ({reference.acc_norm.mean():.0%} of {len(task.items)} items, "
            f"guessing gives {task.chance:.0%}): the task cannot tell anything about this model"
        )
    scores = score_task(candidate, task, progress)
    found = hits(task, scores)
    drops = reference.acc_norm.astype(int) - found.acc_norm.astype(int)
    return ComparedTask(
        task.name,
        len(task.items),
        task.chance,
        float(reference.acc.mean()),
        float(reference.acc_norm.mean()),
        float(found.acc.mean()),
        float(found.acc_norm.mean()),
        tuple(int(value) for value in drops),
        _worst_items(task, recorded, scores),
    )


def _worst_items(task: Task, recorded: TaskScores, scores: TaskScores) -> tuple[Mapping[str, str | float], ...]:
    """Return the items whose right choice lost most log-likelihood per character."""
    lost = []
    for item, old, new in zip(task.items, recorded.loglikelihoods, scores.loglikelihoods, strict=False):
        lost.append((old[item.answer] - new[item.answer]) / len(item.choices[item.answer]))
    order = np.argsort(-np.asarray(lost), kind="stable")[:_WORST]
    rows: list[Mapping[str, str | float]] = []
    for index in order:
        item, row = task.items[index], np.asarray(scores.loglikelihoods[index])
        before = np.asarray(recorded.loglikelihoods[index])
        lengths = np.asarray([len(choice) for choice in item.choices])
        rows.append(
            {
                "context": item.context,
                "right": item.choices[item.answer],
                "baseline": item.choices[int((before / lengths).argmax())],
                "candidate": item.choices[int((row / lengths).argmax())],
                "lost_nats_per_character": round(float(lost[index]), 5),
            }
        )
    return tuple(rows)


def task_measure(task: ComparedTask, confidence: float) -> Measure:
    interval = mean_interval(np.asarray(task.drops, dtype=np.float64), confidence)
    detail = (
        f"acc_norm {task.candidate_acc_norm:.1%} (baseline {task.baseline_acc_norm:.1%}), "
        f"acc {task.candidate_acc:.1%} (baseline {task.baseline_acc:.1%}), {task.items} items"
    )
    value = task.baseline_acc_norm - task.candidate_acc_norm
    return Measure(f"task:{task.name}", value, "share", interval, task.items, detail)
