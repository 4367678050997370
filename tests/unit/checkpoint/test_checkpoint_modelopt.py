"""Checkpoints that nvidia-modelopt 0.47 exported: the contract knows them, and native FP8 equals them to the bit."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from checkpoint_reading import bits, load_checkpoint
from safetensors.numpy import save_file

from pipeline.checkpoint import ConvertOptions, convert_checkpoint, expected_tensors, verify_checkpoint

GOLDEN = Path(__file__).parents[2] / "data" / "golden"
CASES = json.loads((GOLDEN / "modelopt.json").read_text())
# Folded into kv_cache_scaling_factor when the checkpoint is loaded.
FOLDED = (".k_cache_scaling_factor", ".v_cache_scaling_factor")
LINEARS = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.dense": ("self_attn.o_proj",),
    "mlp.fc": ("mlp.gate_proj",),
    "mlp.gate": ("mlp.up_proj",),
    "mlp.proj": ("mlp.down_proj",),
}


@pytest.mark.parametrize("name", CASES)
def test_contract_lists_what_modelopt_exports(name: str) -> None:
    stored = [
        {tensor: (tuple(spec[0]), spec[1]) for tensor, spec in rank.items() if not tensor.endswith(FOLDED)}
        for rank in CASES[name]["ranks"]
    ]
    assert expected_tensors(CASES[name]["config"]) == stored


def ranges_of(name: str, path: Path) -> Path:
    """Return ranges that give the activation scales of an export: amax = scale * 448."""
    tensors = CASES[name]["ranks"][0]
    values = {}
    for i in range(2):
        for target, linears in LINEARS.items():
            scale = np.float32(tensors[f"transformer.layers.{i}.{target}.activation_scaling_factor"][3])
            amax = scale * np.float32(448)
            near = (amax, np.nextafter(amax, np.float32(0)), np.nextafter(amax, np.float32(np.inf)))
            exact = next(value for value in near if value / np.float32(448) == scale)
            for linear in linears:
                values[f"model.layers.{i}.{linear}.x"] = np.full(8, exact, np.float32)
    save_file(values, path)
    return path


@pytest.mark.parametrize(("name", "tp"), [("fp8_tp1", 1), ("fp8_tp2", 2)])
def test_static_fp8_equals_modelopts_export_bit_for_bit(tmp_path: Path, name: str, tp: int) -> None:
    options = ConvertOptions(
        quant="fp8", tp=tp, embedding_sharding="vocab", ranges=ranges_of(name, tmp_path / "r.safetensors")
    )
    convert_checkpoint(GOLDEN / "sources" / "modelopt_llama", tmp_path / "out", options=options)
    assert verify_checkpoint(tmp_path / "out") == []
    for made, expected in zip(load_checkpoint(tmp_path / "out"), CASES[name]["ranks"], strict=True):
        assert {t: hashlib.sha256(bits(v).tobytes()).hexdigest() for t, v in made.items()} == {
            tensor: spec[2] for tensor, spec in expected.items()
        }


@pytest.mark.parametrize("lost", ["attention.dense.weights_scaling_factor", "mlp.fc.activation_scaling_factor"])
def test_verify_names_a_scale_that_is_missing(tmp_path: Path, lost: str) -> None:
    name = f"transformer.layers.1.{lost}"
    options = ConvertOptions(quant="fp8", tp=2, ranges=ranges_of("fp8_tp2", tmp_path / "r.safetensors"))
    out = tmp_path / "out"
    convert_checkpoint(GOLDEN / "sources" / "modelopt_llama", out, options=options)
    kept = {tensor: value for tensor, value in load_checkpoint(out)[1].items() if tensor != name}
    save_file(kept, out / "rank1.safetensors")
    (finding,) = verify_checkpoint(out)
    assert (finding.rule, finding.path) == ("missing-tensor", "rank1.safetensors")
    assert name in finding.message
