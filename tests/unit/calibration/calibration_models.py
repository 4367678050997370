"""The trained tiny model of the tests, and quick ways to quantize and corrupt it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.calibration.commands import Encoder
from pipeline.calibration.quantize import QuantizationReport, QuantizationRequest, quantize_checkpoint
from pipeline.calibration.texts import TextOptions
from pipeline.checkpoint import ConvertOptions
from pipeline.checkpoint.dtypes import code_of
from pipeline.engines.reference.safetensors_file import SafetensorsFile

TINY = Path(__file__).parents[2] / "data" / "models" / "tiny-llama"
QUICK = TextOptions(samples=8, seq_len=64, batch_size=2)

Array = npt.NDArray[Any]


def encoder(folder: Path) -> Callable[[str], Sequence[int]]:
    return Encoder(TINY, folder / "tokenizer")


def quantize(folder: Path, *, text: TextOptions = QUICK, alpha: float | None = None, **options: Any) -> Path:
    """Quantize the tiny model into ``folder / checkpoint`` and return it."""
    return quantized(folder, text=text, alpha=alpha, **options)[0]


def quantized(
    folder: Path,
    *,
    text: TextOptions = QUICK,
    alpha: float | None = None,
    group_size: int | None = None,
    **options: Any,
) -> tuple[Path, QuantizationReport]:
    out = folder / "checkpoint"
    wanted = ConvertOptions(dtype="bfloat16", **options)
    request = QuantizationRequest(TINY, out, wanted, text, alpha, group_size, folder / "work", threads=1)
    return out, quantize_checkpoint(request, encoder(folder))


def tensors_of(path: Path) -> dict[str, Array]:
    file = SafetensorsFile(path)
    return {name: np.array(file.tensor(name)) for name in file.names()}


def rewrite(path: Path, tensors: dict[str, Array]) -> None:
    """Write a safetensors file with the narrow types too."""
    header, data = {}, b""
    for name, value in tensors.items():
        raw = np.ascontiguousarray(value).tobytes()
        header[name] = {
            "dtype": code_of(value.dtype.name),
            "shape": value.shape,
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def multiply_scales(checkpoint: Path, kind: str, factor: float) -> None:
    """Multiply every scale of a kind."""
    path = checkpoint / "rank0.safetensors"
    tensors = tensors_of(path)
    for name, value in tensors.items():
        if name.endswith(f".{kind}"):
            tensors[name] = (value.astype(np.float32) * factor).astype(value.dtype)
    rewrite(path, tensors)
