"""AWQ, W4A8, NVFP4 and modelopt's SmoothQuant, written from the scales that modelopt itself chose, against its export.

Source: tests/data/engine/quantized, exports of nvidia-modelopt 0.47.0. Codes differ by one where modelopt rounded the
factors after it had quantized, which the export does not undo.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

from pipeline.checkpoint import ConvertOptions, convert_checkpoint, verify_checkpoint
from pipeline.checkpoint.packing import pack_weight_only, stored_bytes
from pipeline.checkpoint.storage import storage_table
from pipeline.engines.reference import ReferenceEngine
from pipeline.engines.reference.safetensors_file import SafetensorsFile, to_float32
from pipeline.errors import ConfigError, SourceError

DATA = Path(__file__).parents[2] / "data"
SOURCE = DATA / "golden" / "sources" / "modelopt_llama"
LINEARS = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.dense": ("self_attn.o_proj",),
    "mlp.fc": ("mlp.gate_proj",),
    "mlp.gate": ("mlp.up_proj",),
    "mlp.proj": ("mlp.down_proj",),
}
ROWS = {"self_attn.q_proj": slice(0, 64), "self_attn.k_proj": slice(64, 96), "self_attn.v_proj": slice(96, 128)}
Array = npt.NDArray[Any]


def tensors_of(path: Path) -> dict[str, Array]:
    file = SafetensorsFile(path)
    return {name: np.array(file.tensor(name)) for name in file.names()}


def modelopt(case: str) -> dict[str, Array]:
    return tensors_of(DATA / "engine" / "quantized" / case / "layers.safetensors")


def write_ranges(path: Path, expected: dict[str, Array], case: str) -> Path:
    """Return what calibration would have to find so that the export comes out."""
    values: dict[str, Array] = {}
    for layer in range(2):
        for target, linears in LINEARS.items():
            at = f"transformer.layers.{layer}.{target}."
            # Factors of the multiplied branch: the other's, since ours are shared.
            shared = at.replace("mlp.gate.", "mlp.fc.")
            for linear in linears:
                name = f"model.layers.{layer}.{linear}"
                if case.startswith(("int4", "w4a8")):
                    prequant = to_float32(expected[f"{shared}prequant_scaling_factor"])
                    clip = expected[f"{at}weights_scaling_factor"] * np.float32(7)
                    values[f"{name}.prequant"] = prequant
                    values[f"{name}.clip"] = np.ascontiguousarray(clip[ROWS.get(linear, slice(None))])
                    if f"{at}activation_scaling_factor" in expected:
                        amax = expected[f"{at}activation_scaling_factor"][0] * 448
                        values[f"{name}.x"] = (amax / prequant).astype(np.float32)
                elif case == "int8_sq":
                    values[f"{name}.x"] = 1 / to_float32(expected[f"{shared}prequant_scaling_factor"])
                else:
                    amax = to_float32(expected[f"{at}activation_scaling_factor"].reshape(1)) * 2688
                    values[f"{name}.x"] = np.repeat(amax, 8)
    save_file(values, path)
    return path


@pytest.mark.parametrize(
    ("case", "options", "exact", "close"),
    [
        ("int4_awq_g64", {"quant": "int4_awq", "group_size": 64}, ("weights_scaling_factor",), 0.99),
        ("w4a8_awq_g64", {"quant": "w4a8_awq", "group_size": 64}, ("weights_scaling_factor",), 0.99),
        ("nvfp4", {"quant": "nvfp4"}, ("weights_scaling_factor_2",), 0.99),
        ("int8_sq", {"quant": "int8_sq", "alpha": 1.0}, ("prequant_scaling_factor",), 0.9),
    ],
)
def test_scheme_equals_modelopts_export_but_for_ties(
    case: str, options: dict[str, Any], exact: tuple[str, ...], close: float, tmp_path: Path
) -> None:
    expected = modelopt(case)
    ranges = write_ranges(tmp_path / "r.safetensors", expected, case)
    wanted = ConvertOptions(dtype="bfloat16", ranges=ranges, **options)
    convert_checkpoint(SOURCE, tmp_path / "out", options=wanted)
    assert verify_checkpoint(tmp_path / "out") == []
    made = tensors_of(tmp_path / "out" / "rank0.safetensors")
    for name, theirs in expected.items():
        ours = made[name]
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), name
        if ".mlp.gate." in name and "awq" in case:
            continue
        if name.endswith(exact):
            assert np.array_equal(ours, theirs), name
        elif "scal" in name:
            assert np.allclose(to_float32(ours), to_float32(theirs), rtol=0.1 if case == "nvfp4" else 4e-3), name
        else:
            assert (ours == theirs).mean() > close, name


@pytest.mark.parametrize("quant", ["int8_sq", "int4_awq", "w4a8_awq", "nvfp4"])
def test_scheme_without_ranges_says_what_to_give(quant: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"quant is '{quant}'; expected .*") as caught:
        convert_checkpoint(SOURCE, tmp_path / "out", options=ConvertOptions(quant=quant))
    assert "--calibration TEXT" in caught.value.hint


def test_group_size_beside_the_kernels_width_names_layer_and_way_out(tmp_path: Path) -> None:
    ranges = write_ranges(tmp_path / "r.safetensors", modelopt("int4_awq_g64"), "int4_awq_g64")
    with pytest.raises(ConfigError, match=r"group_size is 128: attention.qkv has 64 inputs on a rank at tp 1"):
        convert_checkpoint(SOURCE, tmp_path / "out", options=ConvertOptions(quant="int4_awq", ranges=ranges))


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize(("quant", "bits"), [("int8", 8), ("int4", 4)])
def test_packing_shrinks_the_file_and_changes_no_logit(quant: Any, bits: int, tp: int, pp: int, tmp_path: Path) -> None:
    convert_checkpoint(SOURCE, tmp_path / "plain", options=ConvertOptions(quant=quant, tp=tp, pp=pp))
    (tmp_path / "packed").mkdir()
    pack_weight_only(tmp_path / "plain", tmp_path / "packed")
    before, after = (ReferenceEngine.load(tmp_path / name, threads=1).logits([5, 6, 7]) for name in ("plain", "packed"))
    assert np.array_equal(before, after)
    row = storage_table(tmp_path / "packed")[0]
    assert (row.name, row.requested, row.actual) == ("linear layers", quant, quant)
    assert row.after_bytes * 16 == row.before_bytes * bits
    assert stored_bytes(tmp_path / "packed") < stored_bytes(tmp_path / "plain")


def test_storage_that_is_not_what_was_asked_for_is_an_error(tmp_path: Path) -> None:
    convert_checkpoint(SOURCE, tmp_path / "out", options=ConvertOptions(quant="int8"))
    with pytest.raises(SourceError, match="linear layers were asked to be int8 and are bfloat16"):
        storage_table(tmp_path / "out")


def test_storage_lists_every_class_with_bytes_before_and_now(tmp_path: Path) -> None:
    convert_checkpoint(SOURCE, tmp_path / "out", options=ConvertOptions(dtype="bfloat16", quant="fp8_rowwise"))
    rows = {row.name: row for row in storage_table(tmp_path / "out")}
    assert list(rows) == ["linear layers", "embedding", "head", "norms", "scales", "KV cache"]
    assert rows["linear layers"].actual == "float8_e4m3fn"
    assert rows["linear layers"].before_bytes == 2 * rows["linear layers"].after_bytes
    # One float32 per output row: (128 + 64 + 128 + 128 + 64) rows, 2 layers.
    assert (rows["scales"].before_bytes, rows["scales"].after_bytes) == (0, 4 * 512 * 2)
    # 2 layers, keys and values, 2 heads of 16 values, 2 bytes.
    assert rows["KV cache"].after_bytes == 2 * 2 * 2 * 16 * 2


def test_float4_codes_round_to_the_nearest() -> None:
    """The package's cast is what NVFP4 relies on: 0, 0.5, 1, 1.5, 2, 3, 4, 6, ties to even."""
    values = np.array([0.24, 0.26, 1.74, 2.4, 2.6, 4.9, 5.1, -6.0], np.float32)
    rounded = values.astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert rounded.tolist() == [0.0, 0.5, 1.5, 2.0, 3.0, 4.0, 6.0, -6.0]
