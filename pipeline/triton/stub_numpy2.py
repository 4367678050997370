"""Let Triton's python stub work with numpy 2. Copied into the backend folder and run inside the stub, never here.

The stub in the wheel is compiled against numpy 1 (through an old pybind11). With numpy 2 two things break, both because
the record that describes a datatype (``PyArray_Descr``) has another layout: where the stub reads the size of an item,
a 32-bit integer behind ``type_num``, numpy 2 keeps the low half of its flags, which is 0 for plain numbers. So

* inputs are read with strides of 0: every element looks like the first one;
* outputs are sent with a length of 0 bytes: shape without content.

Inputs: the stub takes functions from the table ``numpy.core.multiarray._ARRAY_API``, which numpy 2 keeps for old
pybind11 alone. It gets a copy of the table in which the function that makes arrays leaves strides to numpy; the stub
makes contiguous arrays only.

Outputs: the stub gets a view of the array with a datatype record of its own (shared with no other array) whose flags
hold the item size. Nothing computes with that view and it does not own its memory, so numpy never acts on the flags.

Source: measured with tritonserver 2.51 and numpy 2.0 to 2.4, see tests/triton; numpy 2 migration guide, "The
PyArray_Descr struct has been changed".
"""

from __future__ import annotations

import ctypes
import struct
import sys
from types import ModuleType
from typing import Any

import numpy as np

# Bytes from the start of a PyArray_Descr on 64-bit CPython: object header 16, type object pointer 8, four chars,
# type_num 4. There numpy 1 has `int elsize`, numpy 2 `uint64 flags` and behind it `intp elsize`.
_OLD_ITEM_SIZE = 32
_NEW_ITEM_SIZE = 40

# Slots of the function table; pybind11 uses none above 282.
_TABLE_SLOTS = 300
_NEW_FROM_DESCR = 94

_MARK = {"owner": "triton stub"}
_pointer = ctypes.c_void_p
_NewFromDescr = ctypes.PYFUNCTYPE(
    _pointer, _pointer, _pointer, ctypes.c_int, _pointer, _pointer, _pointer, ctypes.c_int, _pointer
)
_keep_alive: list[Any] = []

Array = Any


def adapt(utils: ModuleType) -> None:
    """Adapt the stub that has just imported ``triton_python_backend_utils``; does nothing with numpy 1.

    The stub puts its classes into the module later, so the module watches for that.

    Raises:
        ImportError: This numpy is unknown to the adaptation.
    """
    if int(np.__version__.split(".")[0]) < 2:
        return
    _check_layout()
    _replace_table()
    utils.__class__ = type("StubUtilities", (ModuleType,), {"__setattr__": _set_attribute})
    vars(utils)["serialize_byte_tensor"] = serialize_bytes


def with_item_size(array: Array) -> Array:
    """Return a view whose datatype record says the item size where numpy 1 had it; a copy if not contiguous."""
    array = np.ascontiguousarray(array).reshape(array.shape)
    own = np.dtype(array.dtype, metadata=_MARK)  # a fresh record, not the shared one
    view = array.view(own)
    if view.base is None or view.dtype is not own:
        raise RuntimeError(f"numpy {np.__version__} gave no view with a datatype record of its own")
    ctypes.c_uint64.from_address(id(own) + _OLD_ITEM_SIZE).value = array.dtype.itemsize
    return view


def serialize_bytes(array: Array) -> Array:
    """Return [n] uint8: each element of ``array`` in C order, four bytes of length in front."""
    parts = []
    for value in array.reshape(-1).tolist():
        data = value if isinstance(value, bytes) else str(value).encode("utf-8")
        parts += [struct.pack("<I", len(data)), data]
    return with_item_size(np.frombuffer(b"".join(parts), np.uint8))


def _set_attribute(module: ModuleType, name: str, value: Any) -> None:
    if name == "Tensor":
        _adapt_tensor(value)
    vars(module)[name] = value


def _adapt_tensor(tensor: Any) -> None:
    make, read = tensor.__init__, tensor.as_numpy

    def __init__(self: Any, name: str, array: Array) -> None:
        make(self, name, array if array.dtype == np.object_ else with_item_size(array))

    def as_numpy(self: Any) -> Array:
        array = read(self)
        return array.view(np.dtype(array.dtype.str)) if array.dtype.metadata == _MARK else array

    tensor.__init__ = __init__
    tensor.as_numpy = as_numpy


def _replace_table() -> None:
    import numpy.core.multiarray as old_name

    capsules = ctypes.pythonapi
    capsules.PyCapsule_GetPointer.restype = _pointer
    capsules.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    capsules.PyCapsule_New.restype = ctypes.py_object
    capsules.PyCapsule_New.argtypes = [_pointer, ctypes.c_char_p, _pointer]
    address = capsules.PyCapsule_GetPointer(old_name._ARRAY_API, None)
    table = (_pointer * _TABLE_SLOTS).from_buffer_copy((_pointer * _TABLE_SLOTS).from_address(address))
    original = _NewFromDescr(table[_NEW_FROM_DESCR] or 0)

    @_NewFromDescr
    def new_from_descr(subtype, descr, ndim, dims, strides, data, flags, base):  # type: ignore[no-untyped-def]
        return original(subtype, descr, ndim, dims, None, data, flags, base)

    table[_NEW_FROM_DESCR] = ctypes.cast(new_from_descr, _pointer).value
    _keep_alive.extend([table, new_from_descr])
    old_name._ARRAY_API = capsules.PyCapsule_New(ctypes.addressof(table), None, None)


def _check_layout() -> None:
    for name in ("int32", "float32", "uint8", "object"):
        record = np.dtype(name)
        size = ctypes.c_ssize_t.from_address(id(record) + _NEW_ITEM_SIZE).value
        flags = ctypes.c_uint64.from_address(id(record) + _OLD_ITEM_SIZE).value
        if size != record.itemsize or flags & 0xFF != record.flags & 0xFF:
            raise ImportError(
                f"numpy {np.__version__} on Python {sys.version.split()[0]} keeps datatype records in an unknown way; "
                "the tritonserver wheel cannot exchange arrays with it"
            )
