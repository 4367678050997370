"""Published quantized checkpoints are taken over code by code: they answer exactly as their dequantized weights do.

The packers here are written from the formats' rules, the other way round than the readers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

from pipeline.checkpoint import ConvertOptions, convert_checkpoint, open_source, verify_checkpoint
from pipeline.engines.reference import ReferenceEngine
from pipeline.errors import ConfigError, SourceError

TINY = Path(__file__).parents[2] / "data" / "models" / "tiny-llama"
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
Array = npt.NDArray[Any]


def words(values: Array, bits: int, order: Sequence[int] | None = None) -> Array:
    """Pack the last axis of [rows, n] into int32: value j of a word goes to field order[j]."""
    fields = 32 // bits
    grouped = values.reshape(len(values), -1, fields).astype(np.uint32)
    packed = np.zeros(grouped.shape[:2], np.uint32)
    for place in range(fields):
        packed |= grouped[:, :, place] << np.uint32(bits * (order or range(fields))[place])
    return packed.view(np.int32)


def rounded(weight: Array, bits: int, group: int, *, symmetric: bool) -> tuple[Array, Array, Array]:
    """Return unsigned codes [out, in], scales and zero points [out, groups]."""
    grouped, middle = weight.reshape(len(weight), -1, group), 1 << (bits - 1)
    if symmetric:
        scales = np.abs(grouped).max(axis=2) / (middle - 1)
        zeros = np.full(scales.shape, middle)
    else:
        low = grouped.min(axis=2)
        scales = (grouped.max(axis=2) - low) / (2 * middle - 1)
        zeros = np.clip(np.rint(-low / scales), 1, 2 * middle - 1)
    scales = scales.astype(np.float16).astype(np.float32)
    codes = np.clip(np.rint(grouped / scales[..., None]) + zeros[..., None], 0, 2 * middle - 1)
    return codes.reshape(weight.shape).astype(np.uint8), scales, zeros.astype(np.uint8)


def gptq(base: str, weight: Array, bits: int, group: int, symmetric: bool) -> dict[str, Array]:
    codes, scales, zeros = rounded(weight, bits, group, symmetric=symmetric)
    return {
        f"{base}.qweight": np.ascontiguousarray(words(codes, bits).T),
        f"{base}.qzeros": words(np.ascontiguousarray((zeros - 1).T), bits),
        f"{base}.scales": np.ascontiguousarray(scales.T).astype(np.float16),
        f"{base}.g_idx": (np.arange(weight.shape[1]) // group).astype(np.int32),
    }


def awq(base: str, weight: Array, bits: int, group: int, symmetric: bool) -> dict[str, Array]:
    codes, scales, zeros = rounded(weight, bits, group, symmetric=symmetric)
    return {
        f"{base}.qweight": words(np.ascontiguousarray(codes.T), 4, AWQ_ORDER),
        f"{base}.qzeros": words(np.ascontiguousarray(zeros.T), 4, AWQ_ORDER),
        f"{base}.scales": np.ascontiguousarray(scales.T).astype(np.float16),
    }


def compressed(base: str, weight: Array, bits: int, group: int, symmetric: bool) -> dict[str, Array]:
    codes, scales, zeros = rounded(weight, bits, group, symmetric=symmetric)
    made = {
        f"{base}.weight_packed": words(codes, bits),
        f"{base}.weight_scale": scales.astype(np.float16),
        f"{base}.weight_shape": np.array(weight.shape, np.int64),
    }
    if not symmetric:
        made[f"{base}.weight_zero_point"] = np.ascontiguousarray(words(np.ascontiguousarray(zeros.T), bits).T)
    return made


def int8(base: str, weight: Array, bits: int, group: int, symmetric: bool) -> dict[str, Array]:
    scales = np.abs(weight).max(axis=1, keepdims=True) / 127
    made = {f"{base}.weight": np.rint(weight / scales).astype(np.int8), f"{base}.weight_scale": scales}
    return made if symmetric else {**made, f"{base}.input_scale": np.array([0.05], np.float32)}


PACKERS = {"gptq": gptq, "awq": awq, "compressed": compressed, "int8": int8}


def statement(kind: str, bits: int, group: int, symmetric: bool) -> dict[str, Any]:
    if kind in ("gptq", "awq"):
        return {"quant_method": kind, "bits": bits, "group_size": group, "desc_act": False, "zero_point": not symmetric}
    weights = {"num_bits": bits, "group_size": group, "symmetric": symmetric}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


def published(folder: Path, kind: str, bits: int = 4, group: int = 32, symmetric: bool = True) -> Path:
    """Write the tiny model as it would be published."""
    source = open_source(TINY)
    tensors: dict[str, Array] = {}
    for name, info in source.tensors.items():
        weight = source.read(name, 0, info.rows).astype(np.float32).reshape(info.shape)
        if "_proj" in name:
            tensors |= PACKERS[kind](name.removesuffix(".weight"), weight, bits, group, symmetric)
        else:
            tensors[name] = weight.astype(np.float16)
    source.close()
    folder.mkdir()
    stated = {**source.config, "quantization_config": statement(kind, bits, group, symmetric)}
    (folder / "config.json").write_text(json.dumps(stated))
    save_file(tensors, folder / "model.safetensors")
    return folder


def logits(folder: Path) -> Array:
    return ReferenceEngine.load(folder, threads=1).logits(range(5, 40))


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("kind", "bits", "symmetric", "algorithm"),
    [
        ("gptq", 4, True, "W4A16_AWQ"),
        ("gptq", 4, False, "W4A16_GPTQ"),
        ("gptq", 8, True, "W8A16_GPTQ"),
        ("awq", 4, False, "W4A16_GPTQ"),
        ("compressed", 4, True, "W4A16_AWQ"),
        ("compressed", 4, False, "W4A16_GPTQ"),
        ("compressed", 8, True, "W8A16_GPTQ"),
    ],
)
def test_packed_source_is_taken_over_without_rounding(
    kind: str, bits: int, symmetric: bool, algorithm: str, tp: int, tmp_path: Path
) -> None:
    source = published(tmp_path / "source", kind, bits, symmetric=symmetric)
    convert_checkpoint(source, tmp_path / "plain", options=ConvertOptions(dtype="float32", dequantize=True))
    convert_checkpoint(source, tmp_path / "out", options=ConvertOptions(dtype="float16", tp=tp))
    assert verify_checkpoint(tmp_path / "out") == []
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]["quant_algo"] == algorithm
    assert np.array_equal(logits(tmp_path / "out"), logits(tmp_path / "plain"))


@pytest.mark.parametrize(
    ("symmetric", "algorithm"), [(True, "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN"), (False, "W8A8_SQ_PER_CHANNEL")]
)
def test_int8_source_keeps_its_codes(symmetric: bool, algorithm: str, tmp_path: Path) -> None:
    source = published(tmp_path / "source", "int8", symmetric=symmetric)
    convert_checkpoint(source, tmp_path / "out", options=ConvertOptions(dtype="float16"))
    assert verify_checkpoint(tmp_path / "out") == []
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization"]["quant_algo"] == algorithm
    if symmetric:
        convert_checkpoint(source, tmp_path / "plain", options=ConvertOptions(dtype="float32", dequantize=True))
        # Activations are rounded to int8 per token, weights are the same.
        assert np.abs(logits(tmp_path / "out") - logits(tmp_path / "plain")).mean() < 0.1


def test_gptq_with_activation_order_is_refused(tmp_path: Path) -> None:
    source = published(tmp_path / "source", "gptq")
    from safetensors.numpy import load_file

    tensors = dict(load_file(source / "model.safetensors"))
    name = "model.layers.0.mlp.up_proj.g_idx"
    save_file({**tensors, name: tensors[name][::-1].copy()}, source / "model.safetensors")
    with pytest.raises(SourceError, match=rf"{name} orders the inputs by activation"):
        convert_checkpoint(source, tmp_path / "out")


def test_group_that_a_rank_would_cut_is_refused(tmp_path: Path) -> None:
    source = published(tmp_path / "source", "gptq", group=64)
    with pytest.raises(ConfigError, match=r"group_size is 64: attention.dense has 32 inputs on a rank at tp 2"):
        convert_checkpoint(source, tmp_path / "out", options=ConvertOptions(tp=2))


def test_quantizing_what_is_quantized_is_refused(tmp_path: Path) -> None:
    source = published(tmp_path / "source", "gptq")
    with pytest.raises(ConfigError, match="weights already are integers"):
        convert_checkpoint(source, tmp_path / "out", options=ConvertOptions(quant="fp8_rowwise"))
