"""Describe a model or a checkpoint, and compare two checkpoints, for people and scripts."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.checkpoint.blocks import row_blocks
from pipeline.checkpoint.dtypes import Array
from pipeline.checkpoint.hfconfig import load_config
from pipeline.checkpoint.readers.base import OpenFiles, TensorInfo, read_matrix
from pipeline.checkpoint.readers.safetensors_file import read_safetensors_header
from pipeline.errors import SourceError


class _Checkpoint:
    """A finished checkpoint, opened for reading: all rank files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = load_config(path / "config.json")
        self._files = OpenFiles()
        self._offsets: dict[tuple[str, str], int] = {}
        self.tensors: dict[tuple[str, str], TensorInfo] = {}
        ranks = sorted(path.glob("rank*.safetensors"), key=lambda file: (len(file.name), file.name))
        if not ranks:
            raise SourceError(f"{path}: holds no rank*.safetensors; expected a TensorRT-LLM checkpoint")
        for file in ranks:
            header = read_safetensors_header(file)
            self._files.add(file)
            for name in sorted(header.tensors):
                self.tensors[file.name, name] = header.tensors[name]
                self._offsets[file.name, name] = header.offsets[name]

    def blocks(self, key: tuple[str, str]) -> Iterator[Array]:
        """Yield the tensor in blocks of rows."""
        info = self.tensors[key]
        for rows in row_blocks(info):
            yield read_matrix(self._files, info, self._offsets[key], rows, (0, info.cols))

    def close(self) -> None:
        self._files.close()


def describe(path: Path, *, digests: bool) -> dict[str, Any]:
    """Describe a checkpoint (a folder with rank files) or a model source.

    Raises:
        SourceError: It is neither, or damaged.
    """
    if path.is_dir() and any(path.glob("rank*.safetensors")):
        return _describe_checkpoint(path, digests)
    from pipeline.checkpoint.inspection import inspect_source
    from pipeline.checkpoint.readers import open_source

    summary = asdict(inspect_source(path))
    summary["path"] = str(path)
    source = open_source(path)
    try:
        summary["tensor_list"] = [
            {
                "name": name,
                "dtype": info.dtype,
                "shape": list(info.shape),
                "file": info.file.name,
                **({"sha256": _digest(_source_blocks(source, info))} if digests else {}),
            }
            for name, info in sorted(source.tensors.items())
        ]
    finally:
        source.close()
    return summary


def _describe_checkpoint(path: Path, digests: bool) -> dict[str, Any]:
    from pipeline.checkpoint.verification import verify_checkpoint

    opened = _Checkpoint(path)
    try:
        infos = opened.tensors
        return {
            "path": str(path),
            "kind": "checkpoint",
            "architecture": opened.config.get("architecture"),
            "dtype": opened.config.get("dtype"),
            "mapping": opened.config.get("mapping"),
            "quantization": opened.config.get("quantization"),
            "stored_values": sum(math.prod(info.shape) for info in infos.values()),
            "bytes": sum(info.nbytes for info in infos.values()),
            "dtypes": dict(Counter(info.dtype for info in infos.values())),
            "ledger": [f"{finding.path}: {finding.message}" for finding in verify_checkpoint(path)] or "balanced",
            "tensor_list": [
                {
                    "file": file,
                    "name": name,
                    "dtype": info.dtype,
                    "shape": list(info.shape),
                    **({"sha256": _digest(opened.blocks((file, name)))} if digests else {}),
                }
                for (file, name), info in infos.items()
            ],
        }
    finally:
        opened.close()


def differences(a: Path, b: Path) -> dict[str, Any]:
    """Compare two checkpoints: config fields, tensors, and for equal shapes the largest difference of values.

    Raises:
        SourceError: One of them is no checkpoint, or damaged.
    """
    left, right = _Checkpoint(a), _Checkpoint(b)
    try:
        found = [*_config_differences(left.config, right.config), *_tensor_differences(left, right)]
    finally:
        left.close()
        right.close()
    return {"a": str(a), "b": str(b), "equal": not found, "differences": found}


def _config_differences(
    a: Mapping[str, Any], b: Mapping[str, Any], at: str = "config.json"
) -> Iterator[dict[str, Any]]:
    for key in sorted({*a, *b}):
        left, right = a.get(key, "absent"), b.get(key, "absent")
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            yield from _config_differences(left, right, f"{at}: {key}")
        elif left != right:
            yield {"where": at, "what": key, "a": left, "b": right}


def _tensor_differences(a: _Checkpoint, b: _Checkpoint) -> Iterator[dict[str, Any]]:
    for key in sorted({*a.tensors, *b.tensors}):
        left, right = a.tensors.get(key), b.tensors.get(key)
        if left is None or right is None or (left.shape, left.dtype) != (right.shape, right.dtype):
            yield {"where": key[0], "what": key[1], "a": _kind(left), "b": _kind(right)}
        else:
            unequal, largest = _compare(a.blocks(key), b.blocks(key))
            if unequal:
                text = f"{unequal} of {math.prod(left.shape)} values differ, by {largest:g} at most"
                yield {"where": key[0], "what": key[1], "a": _kind(left), "b": text}


def _compare(a: Iterator[Array], b: Iterator[Array]) -> tuple[int, float]:
    unequal, largest = 0, 0.0
    for left, right in zip(a, b, strict=True):
        unsigned = f"u{left.dtype.itemsize}"
        changed = left.view(unsigned) != right.view(unsigned)
        count = int(np.count_nonzero(changed))
        if count:
            unequal += count
            gap = np.abs(left[changed].astype(np.float64) - right[changed].astype(np.float64))
            largest = max(largest, float(gap.max()))
    return unequal, largest


def _kind(info: TensorInfo | None) -> str:
    return "absent" if info is None else f"{info.dtype} {list(info.shape)}"


def _digest(blocks: Iterator[Array]) -> str:
    digest = hashlib.sha256()
    for block in blocks:
        digest.update(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _source_blocks(source: Any, info: TensorInfo) -> Iterator[Array]:
    for start, stop in row_blocks(info):
        yield source.read(info.name, start, stop)
