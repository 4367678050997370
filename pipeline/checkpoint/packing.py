"""Pack the weights of a weight-only checkpoint, as the engine builder would for its GPU.

A W8A16 or W4A16 checkpoint holds 16-bit weights and says what they are to become. Here they become int8 codes (two
int4 rows in a byte) beside ``weights_scaling_factor`` [out] float32, in a form that depends on no GPU and that the
reference engine executes.

Source: weight-only quantization of TensorRT-LLM: amax / 128 or / 8 per output, ties away from zero, and the scale in
the model's type.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.checkpoint.blocks import row_blocks
from pipeline.checkpoint.dtypes import Array, itemsize, numpy_dtype
from pipeline.checkpoint.hfconfig import load_config
from pipeline.checkpoint.quantization.grouped_int4 import pack_rows
from pipeline.checkpoint.quantization.scheme import LINEARS
from pipeline.checkpoint.readers.base import OpenFiles, TensorInfo, WeightFile, read_matrix
from pipeline.checkpoint.readers.safetensors_file import read_safetensors_header
from pipeline.checkpoint.writer import SafetensorsWriter, write_json

_LEVELS = {"W8A16": 128, "W4A16": 8}
# Linears whose inputs are divided over ranks: their scales are those of the whole rows.
_DIVIDED_INPUTS = ("attention.dense", "mlp.proj")


def is_packable(config: Mapping[str, Any]) -> bool:
    """Say whether a checkpoint's weights wait to be packed."""
    return (config.get("quantization") or {}).get("quant_algo") in _LEVELS and not (config.get("moe") or {}).get(
        "num_experts"
    )


def pack_weight_only(checkpoint: Path, out: Path) -> None:
    """Write a packed copy of a weight-only checkpoint.

    Args:
        checkpoint: Finished checkpoint with 16-bit weights.
        out: Existing empty folder.

    Raises:
        SourceError: A file is damaged.
        StoreError: ``out`` cannot be written.
    """
    config = load_config(checkpoint / "config.json")
    algorithm = config["quantization"]["quant_algo"]
    tp = int(config["mapping"].get("tp_size", 1))
    world = int(config["mapping"].get("world_size", tp))
    for first in range(0, world, tp):
        stage = [_Rank(checkpoint / f"rank{rank}.safetensors") for rank in range(first, first + tp)]
        try:
            for rank, file in enumerate(stage):
                _pack_rank(file, stage, out / f"rank{first + rank}.safetensors", algorithm, str(config["dtype"]))
        finally:
            for file in stage:
                file.close()
    write_json(out / "config.json", config)


class _Rank:
    """A rank file, open."""

    def __init__(self, path: Path) -> None:
        self._header: WeightFile = read_safetensors_header(path)
        self._files = OpenFiles()
        self._files.add(path)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._header.tensors

    def blocks(self, name: str) -> Iterator[tuple[int, Array]]:
        """Yield (first row, rows) of a tensor; an even number of rows but for the end."""
        info = self.tensors[name]
        for start, stop in _even(info):
            yield start, read_matrix(self._files, info, self._header.offsets[name], (start, stop), (0, info.cols))

    def close(self) -> None:
        self._files.close()


def _even(info: TensorInfo) -> Iterator[tuple[int, int]]:
    ends = [stop for _, stop in row_blocks(info)]
    cuts = [0, *sorted({stop - stop % 2 for stop in ends[:-1]} - {0}), info.rows]
    return itertools.pairwise(cuts)


def _is_linear(name: str, info: TensorInfo) -> bool:
    module = name.removesuffix(".weight")
    return name.endswith(".weight") and module.endswith(LINEARS) and len(info.shape) == 2


def _pack_rank(file: _Rank, stage: list[_Rank], path: Path, algorithm: str, dtype: str) -> None:
    # An odd number of int4 rows cannot be paired; such a layer keeps its 16 bits, which the engine rounds alike.
    packed = [
        name
        for name, info in file.tensors.items()
        if _is_linear(name, info) and (algorithm == "W8A16" or info.shape[0] % 2 == 0)
    ]
    specs = {name: (info.shape, info.dtype) for name, info in file.tensors.items()}
    for name in packed:
        rows, cols = file.tensors[name].shape
        specs[name] = ((rows // 2 if algorithm == "W4A16" else rows, cols), "int8")
        specs[_scale_name(name)] = ((rows,), "float32")
    writer = SafetensorsWriter(path, specs)
    try:
        for name, info in file.tensors.items():
            if name in packed:
                _pack(name, file, stage, writer, algorithm, dtype)
                continue
            for start, block in file.blocks(name):
                writer.write(name, start * info.cols * itemsize(info.dtype), block)
        writer.finish()
    except BaseException:
        writer.abandon()
        raise


def _pack(name: str, file: _Rank, stage: list[_Rank], writer: SafetensorsWriter, algorithm: str, dtype: str) -> None:
    levels = _LEVELS[algorithm]
    sources = stage if name.removesuffix(".weight").endswith(_DIVIDED_INPUTS) else [file]
    amax = np.max([_row_amax(source, name) for source in sources], axis=0)
    exact = np.where(amax > 0, amax, np.float32(levels)) / np.float32(levels)
    writer.write(_scale_name(name), 0, exact.astype(numpy_dtype(dtype)).astype(np.float32))
    for first, block in file.blocks(name):
        scaled = block.astype(np.float32) / exact[first : first + len(block), None]
        rounded = np.trunc(scaled + np.copysign(np.float32(0.5), scaled))
        codes: Array = np.clip(rounded, -levels, levels - 1).astype(np.int8)
        stored = pack_rows(codes) if algorithm == "W4A16" else codes
        row = first // 2 if algorithm == "W4A16" else first
        writer.write(name, row * block.shape[1], stored)


def _row_amax(file: _Rank, name: str) -> Array:
    """Return the largest magnitude of each row: [rows], float32."""
    return np.concatenate([np.abs(rows.astype(np.float32)).max(axis=1) for _, rows in file.blocks(name)])


def _scale_name(weight: str) -> str:
    return weight.removesuffix("weight") + "weights_scaling_factor"


def stored_bytes(checkpoint: Path) -> int:
    """Return the size of all tensors of a checkpoint."""
    headers = [read_safetensors_header(path) for path in sorted(checkpoint.glob("rank*.safetensors"))]
    return sum(math.prod(i.shape) * itemsize(i.dtype) for header in headers for i in header.tensors.values())
