"""Limits by precision."""

from __future__ import annotations

import pytest

from pipeline.errors import PreflightError
from pipeline.gate.thresholds import Thresholds, default_thresholds, required_items, required_tokens

# Perplexity of SmolLM2-135M measured from exported checkpoints; 37.39 unquantized.
MEASURED = {"int8": 37.43, "fp8": 38.31, "fp8_rowwise": 38.46, "smoothquant": 40.24, "int4_awq": 45.99, "nvfp4": 54.1}


@pytest.mark.parametrize("precision", sorted(MEASURED))
def test_default_thresholds_leave_room_for_what_sound_quantization_loses(precision):
    limit = default_thresholds(precision, 134_515_008).perplexity_ratio_max
    assert limit is not None
    assert MEASURED[precision] / 37.39 < limit < 1.7


def test_default_thresholds_are_tighter_for_large_models_and_finer_precisions():
    def limit(precision, parameters):
        found = default_thresholds(precision, parameters).perplexity_ratio_max
        assert found is not None
        return found

    for precision in MEASURED:
        assert limit(precision, 7_000_000_000) < limit(precision, 135_000_000)
        assert limit("bf16", None) <= limit(precision, None)


@pytest.mark.parametrize(
    "field,value", [("confidence", 1.0), ("confidence", 0.2), ("perplexity_ratio_max", 0.0), ("top1_agreement_min", 2)]
)
def test_thresholds_refuse_nonsense(field, value):
    with pytest.raises(PreflightError, match=field):
        Thresholds(**{field: value})


def test_required_tokens_grows_as_the_margin_shrinks():
    few = required_tokens(Thresholds(perplexity_ratio_max=1.1), precision="fp8")
    many = required_tokens(Thresholds(perplexity_ratio_max=1.02), precision="fp8")
    assert few is not None and many is not None and few < many
    assert many % 64 == 0
    assert required_tokens(Thresholds(perplexity_ratio_max=None), precision="fp8") is None
    assert required_tokens(Thresholds(perplexity_ratio_max=1.01), precision="fp8", expected_ratio=1.02) is None


def test_required_items_follows_the_margin():
    # (1.96 * sqrt(0.1) / 0.05)^2 = 153.7
    assert required_items(Thresholds(task_drop_max=0.05)) == 154
    assert required_items(Thresholds()) is None
