"""From the gate's configuration to the gate's own values."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from pipeline.config.spec import Gate, Spec
from pipeline.facts.memory import parameter_count
from pipeline.gate.protocol import EVALUATION_TEXT, EVALUATION_TEXT_SHA256, Protocol
from pipeline.gate.thresholds import Thresholds, default_thresholds


def protocol_of(gate: Gate) -> Protocol:
    """Return the measuring protocol that a configuration names.

    Raises:
        SourceError: The numbers do not fit together.
    """
    return Protocol(
        name=gate.name,
        text=EVALUATION_TEXT,
        text_digest=EVALUATION_TEXT_SHA256,
        tokens=gate.tokens,
        window=gate.window,
        stride=gate.stride,
    )


def thresholds_of(spec: Spec) -> Thresholds:
    """Return the limits: those of the precision and model size, except where the configuration gives one."""
    architecture = spec.model.architecture
    limits = default_thresholds(spec.precision.name, parameter_count(architecture) if architecture else None)
    given = {
        name: value
        for name in ("perplexity_ratio_max", "top1_agreement_min")
        if (value := getattr(spec.gate, name)) is not None
    }
    return dataclasses.replace(limits, **given)


def recorded_names() -> list[str]:
    """Name the shipped baselines, so that a new one is noticed."""
    import pipeline.gate

    return sorted(path.name for path in (Path(pipeline.gate.__file__).parent / "baselines").glob("*.json"))
