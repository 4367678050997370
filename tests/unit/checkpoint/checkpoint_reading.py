"""Read checkpoints back with the safetensors library, as an independent reader."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from ml_dtypes import bfloat16, float8_e4m3fn
from safetensors import safe_open

DTYPES = {"BF16": bfloat16, "F16": np.float16, "F32": np.float32, "F8_E4M3": float8_e4m3fn, "I8": np.int8}


def rank_tensors(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Load a rank file. The library checks the file; its numpy side has no float8, so the bytes are read here."""
    with safe_open(path, framework="numpy"):
        data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    tensors = {}
    for name, entry in json.loads(data[8:start]).items():
        begin, end = entry["data_offsets"]
        raw = np.frombuffer(data[start + begin : start + end], np.uint8)
        tensors[name] = raw.view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def load_checkpoint(path: Path) -> list[dict[str, npt.NDArray[Any]]]:
    """Load all rank files in order."""
    ranks = json.loads((path / "config.json").read_text())["mapping"]["world_size"]
    return [rank_tensors(path / f"rank{rank}.safetensors") for rank in range(ranks)]


def digests(path: Path) -> dict[str, str]:
    """Return the sha256 of every file of a folder."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(path.iterdir())}


def bits(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the raw bytes of an array, for exact comparison of any type."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def same(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> bool:
    """Say whether two arrays have equal shape, type and bytes."""
    return a.shape == b.shape and a.dtype == b.dtype and bool((bits(a) == bits(b)).all())
