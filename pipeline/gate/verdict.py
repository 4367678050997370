"""Judges an evaluation. Pure: the same evaluation and thresholds give the same verdict."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pipeline.gate.evaluation import Evaluation, Measure
from pipeline.gate.thresholds import BLOCK_TOKENS, Thresholds

Status = Literal["passed", "failed", "inconclusive", "invalid"]

# Below this many independent samples an interval means nothing.
MINIMUM_SAMPLES = 5


@dataclass(frozen=True, slots=True)
class Judgement:
    """What one limit says.

    Attributes:
        measure: Name of the measure.
        status: Of this measure alone.
        limit: The value it is held against.
        at_most: Whether the limit is an upper one.
        reason: One line with value, interval and limit.
        samples_needed: For an inconclusive one, how many samples would decide if nothing else changed; None: unknown.
    """

    measure: str
    status: Status
    limit: float
    at_most: bool
    reason: str
    samples_needed: int | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The gate's answer.

    Attributes:
        status: Invalid beats failed beats inconclusive beats passed.
        reasons: Why, most important first; for a pass, what was kept.
        judgements: Per limit.
    """

    status: Status
    reasons: tuple[str, ...]
    judgements: tuple[Judgement, ...]


def judge(evaluation: Evaluation, thresholds: Thresholds) -> Verdict:
    """Hold every measure against its limit."""
    if evaluation.problems:
        return Verdict("invalid", evaluation.problems, ())
    judgements = tuple(
        _judge_one(measure, limit, at_most=at_most) for measure, limit, at_most in _limits(evaluation, thresholds)
    )
    if not judgements:
        return Verdict("invalid", ("no measure has a limit: nothing was judged",), ())
    order: tuple[Status, ...] = ("failed", "inconclusive", "passed")
    status = next(status for status in order if any(entry.status == status for entry in judgements))
    return Verdict(status, tuple(entry.reason for entry in judgements if entry.status == status), judgements)


def _limits(evaluation: Evaluation, thresholds: Thresholds) -> list[tuple[Measure, float, bool]]:
    """Pair measures with limits: (measure, limit, whether it is an upper limit)."""
    named = (
        ("perplexity_ratio", thresholds.perplexity_ratio_max, True),
        ("kl", thresholds.kl_max, True),
        ("top1_agreement", thresholds.top1_agreement_min, False),
        ("new_degenerate", thresholds.new_degenerate_max, True),
    )
    pairs = []
    for name, limit, at_most in named:
        measure = evaluation.measure(name)
        if measure is not None and limit is not None:
            pairs.append((measure, limit, at_most))
    if thresholds.task_drop_max is not None:
        pairs += [(m, thresholds.task_drop_max, True) for m in evaluation.measures if m.name.startswith("task:")]
    return pairs


def _judge_one(measure: Measure, limit: float, *, at_most: bool) -> Judgement:
    low = high = measure.value
    if measure.interval is not None:
        low, high = measure.interval.low, measure.interval.high
    kept, broken = (high <= limit, low > limit) if at_most else (low >= limit, high < limit)
    if measure.interval is not None and measure.samples < MINIMUM_SAMPLES:
        kept = broken = False
    status: Status = "passed" if kept else "failed" if broken else "inconclusive"
    reason = f"{measure.name} {measure.value:.4g}"
    if measure.interval is not None:
        reason += f" [{low:.4g}, {high:.4g}] at {measure.interval.confidence:.0%}"
    reason += f"; limit {'at most' if at_most else 'at least'} {limit:g}"
    if measure.detail and measure.interval is None:
        reason += f" ({measure.detail})"
    needed = _needed(measure, limit) if status == "inconclusive" else None
    if needed is not None:
        unit = f"tokens of text ({needed} blocks)" if _in_blocks(measure) else "samples"
        reason += f"; about {needed * BLOCK_TOKENS if _in_blocks(measure) else needed} {unit} would decide"
    return Judgement(measure.name, status, limit, at_most, reason, needed)


def _in_blocks(measure: Measure) -> bool:
    return measure.name in ("perplexity_ratio", "kl")


def _needed(measure: Measure, limit: float) -> int | None:
    """Estimate the samples that shrink the interval until it lies on one side of the limit."""
    interval = measure.interval
    if interval is None or measure.samples < 2 or not math.isfinite(interval.half_width):
        return None
    distance = abs(limit - measure.value)
    if distance == 0:
        return None
    return max(MINIMUM_SAMPLES, math.ceil(measure.samples * (interval.half_width / distance) ** 2))
