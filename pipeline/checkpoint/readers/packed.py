"""Published checkpoints whose weights are packed integers: GPTQ, AutoAWQ, compressed-tensors.

They are shown in one form, whatever the packing: ``X.weight`` int8 [out, in] holds signed codes, ``X.group_scale`` and,
where zero points are not in the middle, ``X.group_zero``, both float32 [out, in / group]. A weight is
code * group_scale + group_zero.

Source: rules checked against the packers of auto_gptq 0.7.1 and autoawq 0.2.9, and compressed-tensors 0.20.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.checkpoint.dtypes import Array
from pipeline.checkpoint.readers.base import TensorInfo, TensorSource
from pipeline.errors import SourceError

# Where autoawq puts the eight outputs of a word: output column j is in nibble _AWQ_ORDER[j].
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_PLAIN_ORDER = tuple(range(8))
_RAW: tuple[str, ...] = (".qweight", ".qzeros", ".scales", ".g_idx", ".weight_packed", ".weight_scale", ".weight_shape")
_RAW += (".weight_zero_point", ".weight_g_idx")


@dataclass(frozen=True, slots=True)
class _Packing:
    """How one method stores its linears.

    Attributes:
        bits: 4 or 8.
        codes: (base, first output, after the last) -> unsigned codes [rows, in].
        scales: The same for the scales, [rows, groups] float32.
        zeros: The same for the zero points in codes; None where all are in the middle.
        weight: Name of the packed tensor below the linear.
        shape: (base) -> (out, in, groups).
    """

    bits: int
    codes: Callable[[str, int, int], Array]
    scales: Callable[[str, int, int], Array]
    zeros: Callable[[str, int, int], Array] | None
    weight: str
    shape: Callable[[str], tuple[int, int, int]]


class PackedSource:
    """A source with packed linears in the common form. See :class:`TensorSource`."""

    def __init__(self, source: TensorSource, packing: _Packing) -> None:
        """Show the linears of ``source`` unpacked."""
        self._source, self._packing = source, packing
        self.path, self.kind, self.config = source.path, source.kind, source.config
        self.ignored_files, self.warnings = source.ignored_files, source.warnings
        self.bits = packing.bits
        tensors: dict[str, TensorInfo] = {}
        bases = [name.removesuffix(packing.weight) for name in source.tensors if name.endswith(packing.weight)]
        hidden = {base + raw for base in bases for raw in _RAW}
        for name, info in source.tensors.items():
            if name not in hidden:
                tensors[name] = info
        for base in bases:
            raw = source.tensors[base + packing.weight]
            rows, cols, groups = packing.shape(base)
            tensors[f"{base}.weight"] = TensorInfo(f"{base}.weight", (rows, cols), "int8", raw.file, raw.nbytes)
            grouped = (rows, groups)
            tensors[f"{base}.group_scale"] = _float(base, "group_scale", grouped, raw)
            if packing.zeros is not None:
                tensors[f"{base}.group_zero"] = _float(base, "group_zero", grouped, raw)
        self._bases = frozenset(bases)
        self.tensors: Mapping[str, TensorInfo] = tensors

    @property
    def has_zeros(self) -> bool:
        """Whether zero points are stored that are not in the middle."""
        return self._packing.zeros is not None

    def read(self, name: str, start: int, stop: int, first: int = 0, last: int | None = None) -> Array:
        """Return a block of a tensor; see :meth:`TensorSource.read`."""
        base, _, kind = name.rpartition(".")
        if base not in self._bases or kind not in ("weight", "group_scale", "group_zero"):
            return self._source.read(name, start, stop, first, last)
        middle = 1 << (self._packing.bits - 1)
        if kind == "weight":
            codes = self._packing.codes(base, start, stop).astype(np.int16) - middle
            return np.ascontiguousarray(codes.astype(np.int8)[:, first:last])
        values = self._packing.scales(base, start, stop).astype(np.float32)
        if kind == "group_zero" and self._packing.zeros is not None:
            values = (middle - self._packing.zeros(base, start, stop).astype(np.float32)) * values
        return np.ascontiguousarray(values[:, first:last])

    def weight_files(self) -> tuple[Path, ...]:
        """Return the files of the source."""
        return self._source.weight_files()

    def close(self) -> None:
        """Close the source."""
        self._source.close()


def _float(base: str, kind: str, shape: tuple[int, int], raw: TensorInfo) -> TensorInfo:
    return TensorInfo(f"{base}.{kind}", shape, "float32", raw.file, 4 * shape[0] * shape[1])


def unpacked(source: TensorSource) -> TensorSource:
    """Return a source in the common form if its weights are packed integers, else the source itself.

    Raises:
        SourceError: The packing is one that cannot be taken over.
    """
    stated = source.config.get("quantization_config")
    names = source.tensors
    if not isinstance(stated, Mapping):
        return source
    method = str(stated.get("quant_method", "")).lower()
    if method == "gptq" and any(name.endswith(".qweight") for name in names):
        return PackedSource(source, _gptq(source, stated))
    if method == "awq" and any(name.endswith(".qweight") for name in names):
        return PackedSource(source, _awq(source, stated))
    if method == "compressed-tensors" and any(name.endswith(".weight_packed") for name in names):
        return PackedSource(source, _compressed(source, stated))
    return source


def _nibbles(words: Array, bits: int, order: tuple[int, ...]) -> Array:
    """Unpack words [rows, n] along the columns: [rows, n * per word] uint8, column j of a word from field order[j]."""
    fields = 32 // bits
    shifts = np.array([bits * place for place in order[:fields]], np.uint32)
    values: Array = (words.view(np.uint32)[:, :, None] >> shifts) & np.uint32((1 << bits) - 1)
    return values.astype(np.uint8).reshape(len(words), -1)


def _columns(source: TensorSource, name: str, start: int, stop: int, bits: int, order: tuple[int, ...]) -> Array:
    """Return outputs [start, stop) of a tensor packed along its outputs: [rows of the tensor, stop - start]."""
    fields = 32 // bits
    first, last = start // fields, -(-stop // fields)
    words = source.read(name, 0, source.tensors[name].rows, first, last)
    return _nibbles(words, bits, order)[:, start - first * fields : stop - first * fields]


def _gptq(source: TensorSource, stated: Mapping[str, Any]) -> _Packing:
    bits = _bits(source, stated.get("bits"))
    flag = 0 if stated.get("checkpoint_format") == "gptq_v2" else 1
    tensors = source.tensors
    for name in (name for name in tensors if name.endswith(".g_idx")):
        index = source.read(name, 0, tensors[name].rows)[:, 0]
        groups = tensors[name.removesuffix("g_idx") + "scales"].rows
        if not np.array_equal(index, np.arange(len(index)) // -(-len(index) // groups)):
            raise SourceError(
                f"{tensors[name].file}: {name} orders the inputs by activation (desc_act); expected groups in a row",
                hint="a checkpoint has no place for the order; take a variant without desc_act, or the full model",
            )

    def codes(base: str, start: int, stop: int) -> Array:
        words = source.read(f"{base}.qweight", 0, tensors[f"{base}.qweight"].rows, start, stop)
        return _nibbles(np.ascontiguousarray(words.T), bits, _PLAIN_ORDER)

    def scales(base: str, start: int, stop: int) -> Array:
        found: Array = source.read(f"{base}.scales", 0, tensors[f"{base}.scales"].rows, start, stop).T
        return found.astype(np.float32)

    def zeros(base: str, start: int, stop: int) -> Array:
        found: Array = _columns(source, f"{base}.qzeros", start, stop, bits, _PLAIN_ORDER).T
        points: Array = found.astype(np.float32) + np.float32(flag)
        return points

    def shape(base: str) -> tuple[int, int, int]:
        packed = tensors[f"{base}.qweight"]
        return packed.cols, packed.rows * (32 // bits), tensors[f"{base}.scales"].rows

    middle = 1 << (bits - 1)
    bases = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    symmetric = all((zeros(base, 0, shape(base)[0]) == middle).all() for base in bases)
    return _Packing(bits, codes, scales, None if symmetric else zeros, ".qweight", shape)


def _awq(source: TensorSource, stated: Mapping[str, Any]) -> _Packing:
    bits = _bits(source, stated.get("bits", stated.get("w_bit")), (4,))
    version = str(stated.get("version", "gemm")).lower()
    if version != "gemm":
        raise SourceError(f"{source.path}: AWQ version is {version!r}; expected gemm")
    tensors = source.tensors

    def codes(base: str, start: int, stop: int) -> Array:
        return np.ascontiguousarray(_columns(source, f"{base}.qweight", start, stop, bits, _AWQ_ORDER).T)

    def scales(base: str, start: int, stop: int) -> Array:
        found: Array = source.read(f"{base}.scales", 0, tensors[f"{base}.scales"].rows, start, stop).T
        return found.astype(np.float32)

    def zeros(base: str, start: int, stop: int) -> Array:
        found: Array = _columns(source, f"{base}.qzeros", start, stop, bits, _AWQ_ORDER).T
        return found.astype(np.float32)

    def shape(base: str) -> tuple[int, int, int]:
        packed = tensors[f"{base}.qweight"]
        return packed.cols * 8, packed.rows, tensors[f"{base}.scales"].rows

    return _Packing(bits, codes, scales, zeros if stated.get("zero_point", True) else None, ".qweight", shape)


def _compressed(source: TensorSource, stated: Mapping[str, Any]) -> _Packing:
    tensors = source.tensors
    groups = [group for group in (stated.get("config_groups") or {}).values() if isinstance(group, Mapping)]
    weights = groups[0].get("weights") if len(groups) == 1 else None
    if not isinstance(weights, Mapping) or groups[0].get("input_activations"):
        raise SourceError(f"{source.path}: expected one group of weight-only layers in quantization_config")
    bits = _bits(source, weights.get("num_bits"))
    if any(name.endswith(".weight_g_idx") for name in tensors) or weights.get("actorder") in ("group", True):
        raise SourceError(f"{source.path}: inputs are ordered by activation (actorder); expected groups in a row")
    per_word = 32 // bits

    def codes(base: str, start: int, stop: int) -> Array:
        return _nibbles(source.read(f"{base}.weight_packed", start, stop), bits, _PLAIN_ORDER)[:, : shape(base)[1]]

    def scales(base: str, start: int, stop: int) -> Array:
        found: Array = source.read(f"{base}.weight_scale", start, stop)
        return found.astype(np.float32)

    def zeros(base: str, start: int, stop: int) -> Array:
        name = f"{base}.weight_zero_point"
        first, last = start // per_word, -(-stop // per_word)
        words = np.ascontiguousarray(source.read(name, first, last).T)
        found: Array = _nibbles(words, bits, _PLAIN_ORDER).T
        return found[start - first * per_word : stop - first * per_word].astype(np.float32)

    def shape(base: str) -> tuple[int, int, int]:
        stored = source.read(f"{base}.weight_shape", 0, 2)[:, 0]
        return int(stored[0]), int(stored[1]), tensors[f"{base}.weight_scale"].cols

    return _Packing(bits, codes, scales, None if weights.get("symmetric", True) else zeros, ".weight_packed", shape)


def _bits(source: TensorSource, value: Any, possible: tuple[int, ...] = (4, 8)) -> int:
    if value not in possible:
        raise SourceError(
            f"{source.path}: weights have {value} bits; expected {' or '.join(map(str, possible))}",
            hint="start from the unquantized model",
        )
    return int(value)
