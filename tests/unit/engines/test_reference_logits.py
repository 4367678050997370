"""The engine against transformers, on tiny models of every kind it knows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from pipeline.engines.reference import ReferenceEngine

DATA = Path(__file__).parents[2] / "data" / "engine"
CASES = sorted(path.parent.name for path in DATA.glob("*/reference.safetensors"))

# Largest difference seen over all cases: 3e-6, on logits of up to 5 (float32 on both sides).
TOLERANCE = 2e-5


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str) -> None:
    # Expected values: tests/oracle/make_engine_reference.py, transformers in float32.
    expected = load_file(DATA / case / "reference.safetensors")
    engine = ReferenceEngine.load(DATA / case, threads=1)
    logits = engine.logits(expected["token_ids"].tolist())[-len(expected["logits"]) :]
    difference = np.abs(logits - expected["logits"]).max()
    assert difference <= TOLERANCE, f"largest difference {difference:.2e}"


@pytest.mark.parametrize("case", CASES)
def test_logits_do_not_depend_on_chunking(case: str) -> None:
    expected = load_file(DATA / case / "reference.safetensors")
    engine = ReferenceEngine.load(DATA / case, threads=1, max_num_tokens=7)
    logits = engine.logits(expected["token_ids"].tolist())[-len(expected["logits"]) :]
    assert np.abs(logits - expected["logits"]).max() <= TOLERANCE
