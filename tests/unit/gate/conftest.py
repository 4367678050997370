from __future__ import annotations

import numpy as np
import pytest
from gate_fakes import SOURCE, TOKENIZER, decode, sampled_text, sound_table, table_baseline

from pipeline.gate.evaluate import evaluate
from pipeline.gate.thresholds import Thresholds
from pipeline.gate.verdict import judge


@pytest.fixture(scope="session")
def table() -> np.ndarray:
    return sound_table()


@pytest.fixture(scope="session")
def text(table):
    return sampled_text(table)


@pytest.fixture(scope="session")
def baseline(table, text):
    return table_baseline(table, text)


@pytest.fixture
def measured(baseline, text):
    """Evaluate an engine under the test protocol."""

    def run(engine, **changes):
        arguments = {
            "source_digest": SOURCE,
            "tokenizer_digest": TOKENIZER,
            "token_ids": text,
            "baseline": baseline,
            "protocol": baseline.protocol,
            "thresholds": Thresholds(),
            "decode": decode,
        }
        return evaluate(engine, **{**arguments, **changes})

    return run


@pytest.fixture
def verdict_of(measured):
    """Evaluate and judge an engine with the default limits."""

    def run(engine, *, thresholds=None, **changes):
        limits = thresholds or Thresholds()
        return judge(measured(engine, thresholds=limits, **changes), limits)

    return run
