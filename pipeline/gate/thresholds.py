"""How much worse than the baseline an artefact may be, and how sure the gate must be.

Part of every plan, so it imports nothing but the standard library.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import NormalDist
from types import MappingProxyType
from typing import Any

from pipeline.errors import PreflightError

# Tokens averaged into one sample: neighbouring tokens err together, blocks this long hardly do.
BLOCK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Limits of the gate. None switches a limit off: the measure is shown and not judged.

    A measure passes when its whole confidence interval keeps the limit, fails when none of it does, and is
    inconclusive between.

    Attributes:
        perplexity_ratio_max: Candidate over baseline.
        kl_max: Mean divergence of the next-token distribution from the baseline's, nats per token.
        top1_agreement_min: Share of positions where both predict the same token.
        new_degenerate_max: Share of prompts on which the candidate, not the baseline, gives broken text. A count over
            a few prompts, judged as it is.
        task_drop_max: Length-normalized accuracy lost on a multiple-choice task, as a share.
        confidence: Of the two-sided intervals.
    """

    perplexity_ratio_max: float | None = 1.05
    kl_max: float | None = None
    top1_agreement_min: float | None = 0.8
    new_degenerate_max: float | None = 0.25
    task_drop_max: float | None = None
    confidence: float = 0.95

    def __post_init__(self) -> None:
        if not 0.5 <= self.confidence < 1:
            raise PreflightError(f"gate.confidence={self.confidence}, expected at least 0.5 and below 1")
        if self.perplexity_ratio_max is not None and not self.perplexity_ratio_max > 0:
            raise PreflightError(f"gate.perplexity_ratio_max={self.perplexity_ratio_max}, expected above 0")
        if self.top1_agreement_min is not None and not 0 <= self.top1_agreement_min <= 1:
            raise PreflightError(f"gate.top1_agreement_min={self.top1_agreement_min}, expected between 0 and 1")

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)


# Source: perplexity of SmolLM2-135M (37.39) by scheme, measured from exported checkpoints: int8 weight-only 37.43,
# fp8 38.31, fp8 + fp8 kv 38.67, fp8 row-wise 38.46, smoothquant 38.66-40.24, int4_awq 45.99, w4a8_awq 47.0, nvfp4 54.1.
# So small a model loses more than others; `_LARGE` is for 1e9 parameters and more.
_EXACT = Thresholds(perplexity_ratio_max=1.01, kl_max=0.01, top1_agreement_min=0.97)
_SMALL: Mapping[str, Thresholds] = MappingProxyType(
    {
        "fp16": _EXACT,
        "bf16": _EXACT,
        "int8": Thresholds(perplexity_ratio_max=1.02, kl_max=0.02, top1_agreement_min=0.93),
        "fp8": Thresholds(perplexity_ratio_max=1.06, top1_agreement_min=0.8),
        "fp8_rowwise": Thresholds(perplexity_ratio_max=1.06, top1_agreement_min=0.8),
        "smoothquant": Thresholds(perplexity_ratio_max=1.12, top1_agreement_min=0.7),
        "int8_sq": Thresholds(perplexity_ratio_max=1.12, top1_agreement_min=0.7),
        "int4": Thresholds(perplexity_ratio_max=1.6, top1_agreement_min=0.5),
        "int4_awq": Thresholds(perplexity_ratio_max=1.4, top1_agreement_min=0.55),
        "w4a8_awq": Thresholds(perplexity_ratio_max=1.45, top1_agreement_min=0.55),
        "nvfp4": Thresholds(perplexity_ratio_max=1.6, top1_agreement_min=0.5),
    }
)
_LARGE: Mapping[str, Thresholds] = MappingProxyType(
    {
        "fp16": _EXACT,
        "bf16": _EXACT,
        "int8": Thresholds(perplexity_ratio_max=1.015, kl_max=0.02, top1_agreement_min=0.95),
        "fp8": Thresholds(perplexity_ratio_max=1.03, top1_agreement_min=0.88),
        "fp8_rowwise": Thresholds(perplexity_ratio_max=1.03, top1_agreement_min=0.88),
        "smoothquant": Thresholds(perplexity_ratio_max=1.05, top1_agreement_min=0.85),
        "int8_sq": Thresholds(perplexity_ratio_max=1.05, top1_agreement_min=0.85),
        "int4": Thresholds(perplexity_ratio_max=1.15, top1_agreement_min=0.75),
        "int4_awq": Thresholds(perplexity_ratio_max=1.08, top1_agreement_min=0.8),
        "w4a8_awq": Thresholds(perplexity_ratio_max=1.1, top1_agreement_min=0.8),
        "nvfp4": Thresholds(perplexity_ratio_max=1.1, top1_agreement_min=0.8),
    }
)
_LARGE_PARAMETERS = 1_000_000_000

# Standard deviation of the mean log-probability difference of one block, nats. Source: measured with this gate on
# SmolLM2-135M against its recorded baseline, see docs/gate.md; int8 0.010, fp8 0.026; larger models scatter less.
_BLOCK_DEVIATION: Mapping[str, float] = MappingProxyType(
    {"fp16": 0.001, "bf16": 0.001, "int8": 0.01, "fp8": 0.03, "fp8_rowwise": 0.03, "smoothquant": 0.05, "int8_sq": 0.05}
)
_COARSE_DEVIATION = 0.1


def samples_needed(distance: float, deviation: float, confidence: float) -> int | None:
    """Return how many independent samples make the interval's half-width smaller than ``distance``.

    Args:
        distance: From the expected mean to the limit; not positive means no number suffices (None).
        deviation: Standard deviation of one sample.
        confidence: Of the two-sided interval.
    """
    if not distance > 0 or not math.isfinite(deviation):
        return None
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    return max(2, math.ceil((z * deviation / distance) ** 2))


def default_thresholds(precision: str, parameters: int | None = None) -> Thresholds:
    """Return the limits for a precision.

    Args:
        precision: Option name of the group ``precision``; names not in the table (``from_checkpoint``) get the limits
            of the coarsest scheme such a checkpoint may hold.
        parameters: Of the model; None counts as large.
    """
    table = _LARGE if parameters is None or parameters >= _LARGE_PARAMETERS else _SMALL
    return table.get(precision, table["int4_awq"])


def required_tokens(thresholds: Thresholds, *, precision: str, expected_ratio: float = 1.0) -> int | None:
    """Return how many tokens of text the perplexity margin needs, for the plan.

    Args:
        thresholds: Margin and confidence.
        precision: Decides how much single blocks scatter.
        expected_ratio: Perplexity ratio one expects of a sound artefact.

    Returns:
        A multiple of the block; None when the limit is off or the expectation already breaks it.
    """
    if thresholds.perplexity_ratio_max is None:
        return None
    distance = math.log(thresholds.perplexity_ratio_max / expected_ratio)
    deviation = _BLOCK_DEVIATION.get(precision, _COARSE_DEVIATION)
    blocks = samples_needed(distance, deviation, thresholds.confidence)
    return None if blocks is None else blocks * BLOCK_TOKENS


# Share of items that two sound engines of one model decide differently. Source: 1 of 100 HellaSwag items between
# bfloat16 and float32 arithmetic; quantized models are given ten times that.
_DISCORDANCE = 0.1


def required_items(thresholds: Thresholds) -> int | None:
    """Return how many multiple-choice items the accuracy margin needs, for the plan; None when it has no limit."""
    if thresholds.task_drop_max is None:
        return None
    return samples_needed(thresholds.task_drop_max, math.sqrt(_DISCORDANCE), thresholds.confidence)
