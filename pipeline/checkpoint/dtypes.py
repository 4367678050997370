"""Number types of weights: their names, sizes, numpy forms, and casts that notice when a value is lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from pipeline.errors import SourceError

Array = npt.NDArray[Any]

# Name used throughout -> (safetensors code, numpy type).
_TYPES: Mapping[str, tuple[str, npt.DTypeLike]] = {
    "float64": ("F64", np.float64),
    "float32": ("F32", np.float32),
    "float16": ("F16", np.float16),
    "bfloat16": ("BF16", ml_dtypes.bfloat16),
    "float8_e4m3fn": ("F8_E4M3", ml_dtypes.float8_e4m3fn),
    "float8_e5m2": ("F8_E5M2", ml_dtypes.float8_e5m2),
    "int64": ("I64", np.int64),
    "int32": ("I32", np.int32),
    "int16": ("I16", np.int16),
    "int8": ("I8", np.int8),
    "uint8": ("U8", np.uint8),
    "bool": ("BOOL", np.bool_),
}
_BY_CODE = {code: name for name, (code, _) in _TYPES.items()}

# Smallest magnitudes that round to infinity: halfway between the largest finite value and the next power of two.
_ROUNDS_TO_INF = {"float16": 65520.0, "bfloat16": 3.3961775292304957e38, "float32": 3.4028235677973366e38}

# Types whose bits, read as unsigned integers without the sign, are ordered like the magnitudes; with the pattern of
# infinity, or, for the type without one, the smallest pattern that is not a number.
_BITS: Mapping[str, tuple[npt.DTypeLike, int, int]] = {
    "float64": (np.uint64, 0x7FFF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000),
    "float32": (np.uint32, 0x7FFF_FFFF, 0x7F80_0000),
    "float16": (np.uint16, 0x7FFF, 0x7C00),
    "bfloat16": (np.uint16, 0x7FFF, 0x7F80),
    "float8_e4m3fn": (np.uint8, 0x7F, 0x7F),
    "float8_e5m2": (np.uint8, 0x7F, 0x7C),
}

FLOATS = frozenset(_BITS)

# Types a weight can have without scales beside it.
PLAIN_FLOATS = ("bfloat16", "float16", "float32", "float64")


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy type of a type name."""
    return np.dtype(_TYPES[name][1])


def name_of(dtype: np.dtype[Any]) -> str:
    """Return the type name of a numpy type."""
    return str(dtype.name)


def itemsize(name: str) -> int:
    """Return the bytes of one value."""
    return numpy_dtype(name).itemsize


def code_of(name: str) -> str:
    """Return the safetensors code of a type name."""
    return _TYPES[name][0]


def from_code(code: str) -> str | None:
    """Return the type name of a safetensors code, None if it is not known."""
    return _BY_CODE.get(code)


def largest_magnitude(values: Array) -> float:
    """Return the largest absolute value of a chunk of any float type; infinity if it holds an infinity or NaN.

    Works on the bits: one pass over the data in its own width, several times faster than comparing as floats.
    """
    unsigned, mask, not_finite = _BITS[values.dtype.name]
    if values.size == 0:
        return 0.0
    bits = values.reshape(-1).view(unsigned)
    largest = np.bitwise_and(bits, np.array(mask, unsigned)).max()
    if largest >= not_finite:
        return float("inf")
    return float(np.array([largest], unsigned).view(values.dtype)[0])


def cast_checked(values: Array, dtype: str, what: str) -> Array:
    """Round a chunk once to another type and refuse what would not survive.

    Args:
        values: Any shape, a float type (others are returned as they are if the type is already the wanted one).
        dtype: Name of the wanted type.
        what: How to name the tensor in an error.

    Raises:
        SourceError: The chunk holds NaN or an infinity, or a finite value that becomes one.
    """
    name = values.dtype.name
    if name not in FLOATS:
        if name != dtype:
            raise SourceError(f"{what}: is {name}, cannot become {dtype}; expected a float type")
        return values
    largest = largest_magnitude(values)
    if largest == float("inf"):
        raise SourceError(
            f"{what}: holds NaN or infinite values; expected finite weights",
            hint="the file is damaged or training diverged; fetch the model again",
        )
    if name == dtype:
        return values
    if largest >= _ROUNDS_TO_INF.get(dtype, float("inf")):
        raise SourceError(
            f"{what}: value of magnitude {largest:g} does not fit {dtype} and would become infinite",
            hint="convert with dtype bfloat16 or float32",
        )
    return values.astype(numpy_dtype(dtype))
