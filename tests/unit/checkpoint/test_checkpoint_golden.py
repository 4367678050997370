"""Conversions that NVIDIA's converter also made: tensors equal as bytes, config equal as data."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from checkpoint_reading import bits, rank_tensors

from pipeline.checkpoint import ConvertOptions, convert_checkpoint, expected_tensors, verify_checkpoint

GOLDEN = Path(__file__).parents[2] / "data" / "golden"
CASES = {case.name: json.loads((case / "case.json").read_text()) for case in sorted((GOLDEN / "cases").iterdir())}
# Left-overs of NVIDIA's command line in calibrated cases.
QUANT_FLAGS = {"--smoothquant": "smoothquant", "--use_fp8_rowwise": "fp8_rowwise", "--use_fp8": "fp8"}
KV_FLAGS = {"--int8_kv_cache": "int8", "--fp8_kv_cache": "fp8"}
FOREIGN_KEYS = {"quant_ckpt_path", "load_model_on_cpu"}


def options(name: str) -> ConvertOptions:
    """Return our options for NVIDIA's flags."""
    case = CASES[name]
    flags = case["flags"]
    sharding = "none"
    if "--use_parallel_embedding" in flags:
        sharding = "hidden" if flags[-2:] == ["--embedding_sharding_dim", "1"] else "vocab"
    quant = next((q for flag, q in QUANT_FLAGS.items() if flag in flags), None)
    ranges = None
    if case["kind"] == "int8 calibration":
        own = GOLDEN / "cases" / name / "calibration.safetensors"
        ranges = own if own.exists() else GOLDEN / "sources" / case["source_model"] / "calibration.safetensors"
    return ConvertOptions(
        dtype=case["dtype"],
        tp=case["tp_size"],
        pp=case["pp_size"],
        embedding_sharding=sharding,
        quant=quant,
        alpha=float(flags[flags.index("--smoothquant") + 1]) if quant == "smoothquant" else 0.5,
        per_channel="--per_channel" in flags,
        per_token="--per_token" in flags,
        kv_cache=next((kind for flag, kind in KV_FLAGS.items() if flag in flags), None),
        ranges=ranges,
    )


def check_equal(case_name: str, out: Path) -> None:
    """Compare a conversion with the golden case."""
    expected = json.loads((GOLDEN / "cases" / case_name / "tensors.json").read_text())
    assert {file.name for file in out.iterdir()} == {"config.json", *expected}
    for file, tensors in expected.items():
        produced = rank_tensors(out / file)
        assert set(produced) == set(tensors)
        for name, want in tensors.items():
            found = produced[name]
            assert (list(found.shape), found.dtype.name) == (want["shape"], want["dtype"]), name
            assert hashlib.sha256(bits(found).tobytes()).hexdigest() == want["sha256"], name
    made = json.loads((out / "config.json").read_text())
    golden = json.loads((GOLDEN / "cases" / case_name / "config.json").read_text())
    keys = made["mapping"].keys()
    golden["mapping"] = {key: golden["mapping"][key] for key in keys}
    assert made == {key: value for key, value in golden.items() if key not in FOREIGN_KEYS}


@pytest.mark.parametrize("name", [name for name in CASES if "smollm2" not in name])
def test_conversion_equals_nvidias_bit_for_bit(name: str, tmp_path: Path) -> None:
    convert_checkpoint(GOLDEN / "sources" / CASES[name]["source_model"], tmp_path / "out", options=options(name))
    check_equal(name, tmp_path / "out")
    assert verify_checkpoint(tmp_path / "out") == []


@pytest.mark.parametrize("name", CASES)
def test_contract_lists_exactly_nvidias_tensors(name: str) -> None:
    golden = GOLDEN / "cases" / name
    files = json.loads((golden / "tensors.json").read_text())
    stored = [
        {tensor: (tuple(spec["shape"]), spec["dtype"]) for tensor, spec in files[f"rank{rank}.safetensors"].items()}
        for rank in range(len(files))
    ]
    assert expected_tensors(json.loads((golden / "config.json").read_text())) == stored


@pytest.mark.parametrize("name", [name for name in CASES if "smollm2" in name])
def test_gguf_gives_nvidias_result_of_the_dequantized_model(name: str, smollm2_gguf: Path, tmp_path: Path) -> None:
    convert_checkpoint(smollm2_gguf, tmp_path / "out", options=options(name))
    check_equal(name, tmp_path / "out")
