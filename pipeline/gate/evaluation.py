"""The values an evaluation consists of. Measures; does not judge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from pipeline.engines.protocol import EngineInfo
from pipeline.gate.baseline import Baseline
from pipeline.gate.protocol import Protocol
from pipeline.gate.scoring import TextScores
from pipeline.gate.statistics import Floats, Interval


def _no_floats() -> Floats:
    return np.empty(0)


@dataclass(frozen=True, slots=True)
class Measure:
    """One number of an evaluation.

    Attributes:
        name: ``perplexity_ratio``, ``kl``, ``top1_agreement``, ``new_degenerate``, ``task:<name>`` and informal ones.
        value: In ``unit``; never NaN.
        unit: ``ratio``, ``nats/token``, ``share``, ``nats``, ``perplexity``.
        interval: Confidence interval where one can be given.
        samples: Independent samples behind the interval (blocks, positions, items).
        detail: One line for people.
    """

    name: str
    value: float
    unit: str
    interval: Interval | None = None
    samples: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ComparedContinuation:
    """The two answers to one prompt, and what is wrong with either (empty: nothing)."""

    name: str
    kind: str
    prompt: str
    baseline_text: str
    candidate_text: str
    baseline_fault: str
    candidate_fault: str
    agreeing_tokens: int


@dataclass(frozen=True, slots=True)
class Passage:
    """A block of the text where the candidate lost most: mean difference per token in nats, and the words."""

    first_token: int
    difference: float
    text: str


@dataclass(frozen=True, slots=True)
class ComparedTask:
    """One multiple-choice task: accuracies as shares, drop of acc_norm per item in {-1, 0, 1}."""

    name: str
    items: int
    chance: float
    baseline_acc: float
    baseline_acc_norm: float
    candidate_acc: float
    candidate_acc_norm: float
    drops: tuple[int, ...]
    worst: tuple[Mapping[str, str | float], ...] = ()


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Everything that was measured.

    Attributes:
        candidate: Who was asked.
        baseline: Who it was compared with; its arrays cut to the protocol.
        protocol: How.
        problems: Why the evaluation proves nothing; not empty means invalid.
        not_measured: Measure to reason.
        caveats: What even a pass does not show.
        measures: By name.
        differences: [n] float64, baseline minus candidate log probability per token, nats; positive is worse.
        divergences: [n] float64, KL per token, nats; empty without alternatives.
        scores: The candidate's; None when the text was not scored.
        worst_passages: Where the text was predicted worst compared with the baseline.
        continuations: Greedy answers side by side.
        tasks: Multiple-choice results.
        seconds: Wall time; not part of what is compared.
    """

    candidate: EngineInfo
    baseline: Baseline
    protocol: Protocol
    problems: tuple[str, ...] = ()
    not_measured: Mapping[str, str] = field(default_factory=dict)
    caveats: tuple[str, ...] = ()
    measures: tuple[Measure, ...] = ()
    differences: Floats = field(default_factory=_no_floats)
    divergences: Floats = field(default_factory=_no_floats)
    scores: TextScores | None = None
    worst_passages: tuple[Passage, ...] = ()
    continuations: tuple[ComparedContinuation, ...] = ()
    tasks: tuple[ComparedTask, ...] = ()
    seconds: float = 0.0

    def measure(self, name: str) -> Measure | None:
        """Return the measure of that name."""
        return next((measure for measure in self.measures if measure.name == name), None)
