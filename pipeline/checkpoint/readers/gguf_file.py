"""Read a GGUF file as if it were the Hugging Face model it was made from.

Quantized weights are dequantized to float32 and rounded once to bfloat16: those rounded values are the model's weights.
A file whose matrices are all float16 or all float32 keeps that type.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.checkpoint.dtypes import Array, numpy_dtype
from pipeline.checkpoint.readers.base import OpenFiles, TensorInfo
from pipeline.checkpoint.readers.gguf_header import GgufHeader, GgufTensor, read_gguf_header
from pipeline.checkpoint.readers.gguf_model import gguf_config, hf_name, rotary_heads
from pipeline.errors import SourceError

_F32, _F16 = 0, 1


class GgufSource:
    """A GGUF file. See :class:`TensorSource`; ``metadata`` also serves the tokenizer."""

    kind = "gguf"

    def __init__(self, path: Path) -> None:
        """Open the file and verify its table against its length.

        Raises:
            SourceError: Truncated, an unknown architecture or tensor, or a quantization that cannot be read.
        """
        self.path = path
        header = read_gguf_header(path)
        self.metadata = header.metadata
        self.ignored_files: Mapping[str, str] = {}
        self.warnings: tuple[str, ...] = ()
        dtype = _model_dtype(header)
        self.config: Mapping[str, Any] = gguf_config(header, dtype, str(path))
        self._files = OpenFiles()
        self._stored: dict[str, GgufTensor] = {}
        self._heads: dict[str, int] = {}
        tensors: dict[str, TensorInfo] = {}
        size = path.stat().st_size
        for stored in header.tensors.values():
            name = hf_name(stored.name, self.config, str(path))
            nbytes = _row_bytes(stored, path) * _rows(stored)
            if stored.offset + nbytes > size:
                raise SourceError(
                    f"{path}: {stored.name}: needs {stored.offset + nbytes} bytes, the file has {size}: truncated",
                    hint="fetch the file again",
                )
            self._stored[name] = stored
            self._heads[name] = rotary_heads(name, self.config)
            kept = len(stored.shape) < 2 and stored.type == _F32 and dtype != "bfloat16"
            tensors[name] = TensorInfo(name, stored.shape, "float32" if kept else dtype, path, nbytes)
        self.tensors: Mapping[str, TensorInfo] = tensors
        self._files.add(path)

    def read(self, name: str, start: int, stop: int, first: int = 0, last: int | None = None) -> Array:
        """Return a block of a tensor; see :meth:`TensorSource.read`.

        Rows of q and k come back in Hugging Face order: the file interleaves the two halves of each head.
        """
        heads = self._heads[name]
        if heads:
            half = self.tensors[name].rows // heads // 2
            rows = np.arange(start, stop)
            head, inside = rows // (2 * half), rows % (2 * half)
            wanted = head * 2 * half + (inside % half) * 2 + inside // half
            begin, end = start // (2 * half) * 2 * half, -(-stop // (2 * half)) * 2 * half
            block = self._dequantized(name, begin, end)[wanted - begin]
        else:
            block = self._dequantized(name, start, stop)
        chosen: Array = block[:, first : self.tensors[name].cols if last is None else last]
        return chosen

    def _dequantized(self, name: str, start: int, stop: int) -> Array:
        """Return whole rows in the order of the file, in the type of the tensor."""
        stored = self._stored[name]
        info = self.tensors[name]
        row_bytes = _row_bytes(stored, self.path)
        raw = np.empty((stop - start, row_bytes), np.uint8)
        self._files.fill(self.path, raw, stored.offset + start * row_bytes, stored.name)
        if stored.type == _F32:
            values = raw.view(np.float32)
        elif stored.type == _F16:
            values = raw.view(np.float16)
        else:
            from gguf import GGMLQuantizationType, dequantize

            values = dequantize(raw, GGMLQuantizationType(stored.type))
        rounded: Array = values.astype(numpy_dtype(info.dtype), copy=False)
        return rounded

    def weight_files(self) -> tuple[Path, ...]:
        """Return the file."""
        return (self.path,)

    def close(self) -> None:
        """Close the file."""
        self._files.close()


def _rows(stored: GgufTensor) -> int:
    count = 1
    for n in stored.shape[:-1] if len(stored.shape) > 1 else stored.shape:
        count *= n
    return count


def _row_bytes(stored: GgufTensor, path: Path) -> int:
    """Return the bytes of one row of the tensor seen as a matrix.

    Raises:
        SourceError: The type is unknown, cannot be dequantized, or does not divide the row.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    cols = stored.shape[-1] if len(stored.shape) > 1 else 1
    try:
        kind = GGMLQuantizationType(stored.type)
        block, size = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise SourceError(f"{path}: {stored.name}: has the unknown quantization type {stored.type}") from None
    if stored.type not in (_F32, _F16) and not _can_dequantize(stored.type):
        raise SourceError(f"{path}: {stored.name}: is {kind.name}, which cannot be dequantized here")
    if cols % block:
        raise SourceError(
            f"{path}: {stored.name}: rows of {cols} values; expected a multiple of the {kind.name} block {block}"
        )
    return cols // block * size


@cache
def _can_dequantize(kind: int) -> bool:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    probe = np.zeros((1, GGML_QUANT_SIZES[GGMLQuantizationType(kind)][1]), np.uint8)
    try:
        dequantize(probe, GGMLQuantizationType(kind))
    except NotImplementedError:
        return False
    return True


def _model_dtype(header: GgufHeader) -> str:
    kinds = {stored.type for stored in header.tensors.values() if len(stored.shape) > 1}
    if kinds == {_F16}:
        return "float16"
    if kinds == {_F32}:
        return "float32"
    return "bfloat16"
