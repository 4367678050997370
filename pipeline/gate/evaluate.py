"""Runs a candidate through the protocol and compares it with a baseline."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from pipeline.engines.protocol import Engine
from pipeline.gate.baseline import Baseline, TaskScores
from pipeline.gate.degeneracy import degeneracy
from pipeline.gate.evaluation import ComparedContinuation, ComparedTask, Evaluation, Measure, Passage
from pipeline.gate.prompts import generate_greedily
from pipeline.gate.protocol import Protocol
from pipeline.gate.scoring import NothingMeasured, Progress, TextScores, score_text
from pipeline.gate.statistics import Floats, Interval, block_means, mean_interval, proportion_interval
from pipeline.gate.tasks import Task, hits, score_task
from pipeline.gate.thresholds import BLOCK_TOKENS, Thresholds

_CAVEATS = {
    "unquantized": "The baseline is the reference engine on an unquantized conversion: this says nothing about the "
    "conversion itself.",
}
_WORST = 5


def evaluate(
    candidate: Engine,
    *,
    source_digest: str,
    tokenizer_digest: str,
    token_ids: npt.NDArray[np.int32],
    baseline: Baseline,
    protocol: Protocol,
    thresholds: Thresholds,
    decode: Callable[[Sequence[int]], str],
    tasks: Sequence[Task] = (),
    generations: int | None = None,
    generation_tokens: int | None = None,
    bos_id: int | None = None,
    not_measured: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Measure ``candidate`` against ``baseline``.

    A candidate that cannot be measured does not raise: the evaluation carries the reason in ``problems`` and is judged
    invalid. Work that cannot matter any more is skipped.

    Args:
        candidate: The engine on the emitted artefact.
        source_digest: Of the weights the artefact was made from.
        tokenizer_digest: Of the tokenizer that ships with it.
        token_ids: [protocol.tokens] int32 or more, the evaluation text.
        baseline: Whose answers count as right.
        protocol: What to run; the baseline must cover it.
        thresholds: Only ``confidence`` matters here.
        decode: Ids to text, for people and for blank output.
        tasks: Multiple-choice tasks; the baseline must have scored the same files.
        generations: Prompts to continue; None for all the baseline has, 0 for none.
        generation_tokens: New tokens per prompt at most; None for as many as the baseline made.
        bos_id: First token, where the protocol wants one.
        not_measured: Measures this candidate cannot give and why: ``text`` (no context logits), ``generation``.
        progress: Called with done, total, unit.

    Raises:
        PipelineError: The engine itself failed.
    """
    started = time.monotonic()
    skipped = dict(not_measured or {})
    problems = baseline.objections(
        candidate.info,
        source_digest=source_digest,
        tokenizer_digest=tokenizer_digest,
        protocol=protocol,
        token_ids=token_ids,
    )
    if "text" not in skipped and (obstacle := protocol.obstacle(candidate.info.max_seq_len)):
        problems.append(obstacle)
    caveats = tuple(_CAVEATS[kind] for kind in (baseline.kind,) if kind in _CAVEATS)
    if problems:
        skipped = {**skipped, "text": "not run: nothing could be proven"}
        return Evaluation(candidate.info, baseline, protocol, tuple(problems), skipped, caveats)
    baseline = _shortened(baseline.under(protocol), generations, generation_tokens, decode)
    scores: TextScores | None = None
    measures: list[Measure] = []
    differences, divergences = np.empty(0), np.empty(0)
    passages: tuple[Passage, ...] = ()
    continuations: tuple[ComparedContinuation, ...] = ()
    compared_tasks: list[ComparedTask] = []
    try:
        if "text" not in skipped:
            alternatives = baseline.top_ids if baseline.top_ids.shape[1] else None
            scores = score_text(
                candidate, token_ids, protocol, alternatives=alternatives, bos_id=bos_id, progress=progress
            )
            differences = baseline.logprobs.astype(np.float64) - scores.logprobs
            divergences = _divergences(baseline, scores)
            passages = _worst_passages(differences, token_ids, decode)
            measures += _text_measures(baseline, scores, differences, divergences, thresholds.confidence)
        for task in tasks:
            compared_tasks.append(_compare_task(candidate, task, baseline, progress))
            measures.append(_task_measure(compared_tasks[-1], thresholds.confidence))
        if "generation" not in skipped and baseline.continuations:
            continuations = _compare_continuations(candidate, baseline, decode, progress)
            measures += _generation_measures(continuations)
    except NothingMeasured as error:
        problems.append(str(error))
    if not measures and not problems:
        problems.append("nothing was measured: " + "; ".join(f"{key}: {why}" for key, why in skipped.items()))
    if not divergences.size and "text" not in skipped:
        skipped["kl"] = "the baseline holds no distributions"
    return Evaluation(
        candidate.info,
        baseline,
        protocol,
        tuple(problems),
        skipped,
        caveats,
        tuple(measures),
        differences,
        divergences,
        scores,
        passages,
        continuations,
        tuple(compared_tasks),
        time.monotonic() - started,
    )


def _shortened(
    baseline: Baseline, generations: int | None, generation_tokens: int | None, decode: Callable[[Sequence[int]], str]
) -> Baseline:
    """Keep the first continuations and cut them; a greedy answer's beginning is the answer to the smaller limit."""
    kept = baseline.continuations[:generations]
    if generation_tokens is not None and generation_tokens < baseline.max_new_tokens:
        cut = [entry.token_ids[:generation_tokens] for entry in kept]
        kept = tuple(
            replace(entry, token_ids=ids, text=decode([token for token in ids if token not in baseline.end_ids]))
            for entry, ids in zip(kept, cut, strict=True)
        )
        baseline = replace(baseline, max_new_tokens=generation_tokens)
    return replace(baseline, continuations=kept)


def _divergences(baseline: Baseline, scores: TextScores) -> Floats:
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


def _text_measures(
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


def _worst_passages(
    differences: Floats, token_ids: npt.NDArray[np.int32], decode: Callable[[Sequence[int]], str]
) -> tuple[Passage, ...]:
    blocks = block_means(differences, BLOCK_TOKENS)
    found = []
    for index in np.argsort(-blocks, kind="stable")[:_WORST]:
        first = int(index) * BLOCK_TOKENS + 1  # token 0 has no score
        found.append(Passage(first, float(blocks[index]), decode(token_ids[first : first + BLOCK_TOKENS].tolist())))
    return tuple(found)


def _exp(value: float) -> float:
    """exp that answers inf instead of overflowing."""
    return float(np.exp(min(value, 700.0))) if value < 700 else float("inf")


def _compare_continuations(
    candidate: Engine, baseline: Baseline, decode: Callable[[Sequence[int]], str], progress: Progress | None
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


def _generation_measures(continuations: Sequence[ComparedContinuation]) -> list[Measure]:
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


def _compare_task(candidate: Engine, task: Task, baseline: Baseline, progress: Progress | None) -> ComparedTask:
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


def _task_measure(task: ComparedTask, confidence: float) -> Measure:
    interval = mean_interval(np.asarray(task.drops, dtype=np.float64), confidence)
    detail = (
        f"acc_norm {task.candidate_acc_norm:.1%} (baseline {task.baseline_acc_norm:.1%}), "
        f"acc {task.candidate_acc:.1%} (baseline {task.baseline_acc:.1%}), {task.items} items"
    )
    value = task.baseline_acc_norm - task.candidate_acc_norm
    return Measure(f"task:{task.name}", value, "share", interval, task.items, detail)
