"""The parity report: zero for the same weights, and the layers that differ are the ones that show."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.checkpoint import ConvertOptions, convert_checkpoint
from pipeline.engines.reference import ReferenceEngine
from pipeline.engines.reference.linear import Linear
from pipeline.engines.reference.model import Model
from pipeline.engines.reference.threads import Workers
from pipeline.gate.parity import measure_parity, parity_spans

TINY = Path(__file__).parents[2] / "data" / "models" / "tiny-llama"
WORKERS = Workers(1)
IDS = [(7 * i) % 900 + 5 for i in range(700)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    out = tmp_path_factory.mktemp("parity") / "checkpoint"
    convert_checkpoint(TINY, out, options=ConvertOptions(dtype="bfloat16"))
    return ReferenceEngine.load(out, threads=1).model


def with_scaling(model: Model, original: int) -> Model:
    scaling = {"rope_type": "llama3", "original_max_position_embeddings": original}
    return replace(model, config=replace(model.config, rotary_scaling=scaling))


def test_same_model_has_no_difference_and_no_ranges(model: Model) -> None:
    section = measure_parity(model, model, IDS, WORKERS)
    assert [(row["span"], row["positions"], row["layers"]) for row in section["rows"]] == [
        ("short", [0, 64], "all layers"),
        ("long", [448, 512], "all layers"),
    ]
    assert all(row["max_logit_difference"] == 0 and row["top1_agreement"] == 1 for row in section["rows"])


def test_changed_layer_shows_in_its_range_only(model: Model) -> None:
    last = model.layers[-1]
    assert isinstance(last.dense, Linear)
    dense = replace(last.dense, weight=last.dense.weight * np.float32(1.2))
    changed = replace(model, layers=(*model.layers[:-1], replace(last, dense=dense)))
    rows = measure_parity(changed, model, IDS[:64], WORKERS)["rows"]
    gaps = {row["layers"]: row["max_logit_difference"] for row in rows}
    assert gaps["layers 0-0"] == 0
    assert gaps["layers 1-1"] == gaps["all layers"] > 0


def test_scaled_rotation_is_looked_at_beyond_the_original_context(model: Model) -> None:
    spans, skipped = parity_spans(with_scaling(model, 200), 700)
    assert [(span.name, span.tokens, span.compared) for span in spans] == [
        ("short", 64, 64),
        ("beyond the original context", 264, 64),
    ]
    assert skipped == {}


def test_what_a_text_is_too_short_for_is_said(model: Model) -> None:
    spans, skipped = parity_spans(with_scaling(model, 1000), 700)
    assert [span.name for span in spans] == ["short", "long"]
    assert skipped == {"beyond the original context": "needs 1064 tokens; text and limits give 700"}


def test_other_witness_is_compared_as_a_whole(model: Model) -> None:
    asked: list[int] = []

    def witness(token_ids: object, compared: int) -> np.ndarray:
        asked.append(compared)
        return np.zeros((compared, 1024), np.float32)

    rows = measure_parity(model, model, IDS[:64], WORKERS, source_logits=witness)["rows"]
    assert [row["against"] for row in rows] == ["16-bit conversion", "transformers"]
    assert asked == [64]
