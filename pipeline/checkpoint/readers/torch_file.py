"""Read the table of a torch ``.bin`` file without torch and without running anything that the file says.

A ``.bin`` file is a pickle: a program. This reader knows the few instructions by which torch names tensors and storages
and refuses every other name before it is even looked up, so nothing of the file is executed.

Source: the two layouts of ``torch.save``, the zip archive (since 1.6) and the older stream of pickles.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pipeline.checkpoint.dtypes import itemsize
from pipeline.checkpoint.readers.base import TensorInfo, WeightFile, refuse_placeholder
from pipeline.errors import SourceError

_PICKLE_LIMIT = 256 << 20
_OLD_MAGIC = 0x1950A86A20F9469CFC6C

_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}


@dataclass(frozen=True, slots=True)
class _StorageType:
    dtype: str


@dataclass(frozen=True, slots=True)
class _Storage:
    key: str
    dtype: str
    count: int


@dataclass(frozen=True, slots=True)
class _Tensor:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _rebuild_tensor(
    storage: _Storage, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], *_: Any
) -> _Tensor:
    return _Tensor(storage, int(offset), tuple(shape), tuple(stride))


def _rebuild_parameter(tensor: _Tensor, *_: Any) -> _Tensor:
    return tensor


_ALLOWED: Mapping[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    **{("torch", name): _StorageType(dtype) for name, dtype in _STORAGES.items()},
}


class _TableUnpickler(pickle.Unpickler):
    """An unpickler for which only the names above exist."""

    def __init__(self, stream: BinaryIO, path: Path) -> None:
        super().__init__(stream)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        """Return a stand-in for an allowed name.

        Raises:
            SourceError: Any other name; nothing is imported.
        """
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise SourceError(
                f"{self._path}: its pickle wants to use {module}.{name}; refused, and nothing of it was run",
                hint="weights need no code: take the safetensors form of this model from a source you trust",
            ) from None

    def persistent_load(self, pid: Any) -> _Storage:
        """Return the storage that an id names."""
        kind, storage, key, _, count = pid[:5]
        if kind != "storage" or not isinstance(storage, _StorageType):
            raise pickle.UnpicklingError(f"unknown persistent id {kind!r}")
        return _Storage(str(key), storage.dtype, int(count))


def read_torch_header(path: Path) -> WeightFile:
    """Read names, shapes and places of the tensors of a ``.bin`` file.

    Raises:
        SourceError: The file is truncated, no torch file, names code, or holds something besides plain tensors.
    """
    refuse_placeholder(path)
    with path.open("rb") as stream:
        reader = _read_zip if stream.read(4) == b"PK\x03\x04" else _read_stream
        stream.seek(0)
        try:
            table, places = reader(stream, path)
        except SourceError:
            raise
        except (zipfile.BadZipFile, EOFError) as error:
            raise SourceError(
                f"{path}: is truncated or no torch file ({error})", hint="fetch the file again"
            ) from error
        except Exception as error:  # a pickle can fail in any way; all of them mean the file is not usable
            raise SourceError(f"{path}: is no plain torch file ({type(error).__name__}: {error})") from error
    return _weights(table, places, path)


def _read_zip(stream: BinaryIO, path: Path) -> tuple[Any, Callable[[_Storage], int]]:
    archive = zipfile.ZipFile(stream)
    entries = {info.filename: info for info in archive.infolist()}
    table = next((info for name, info in entries.items() if name.endswith("data.pkl")), None)
    if table is None or table.file_size > _PICKLE_LIMIT:
        raise SourceError(f"{path}: is no torch file (a zip archive without a data.pkl of reasonable size)")
    root = table.filename.removesuffix("data.pkl")
    loaded = _TableUnpickler(io.BytesIO(archive.read(table)), path).load()

    def place(storage: _Storage) -> int:
        info = entries.get(f"{root}data/{storage.key}")
        needed = storage.count * itemsize(storage.dtype)
        if info is None or info.compress_type != zipfile.ZIP_STORED or info.file_size < needed:
            raise SourceError(f"{path}: storage {storage.key} is missing, compressed or smaller than {needed} bytes")
        stream.seek(info.header_offset)
        header = stream.read(30)
        # Lengths of name and extra field stand at the end of the local header; the data follows them.
        return (
            info.header_offset + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        )

    return loaded, _all_places(loaded, place)


def _read_stream(stream: BinaryIO, path: Path) -> tuple[Any, Callable[[_Storage], int]]:
    if _TableUnpickler(stream, path).load() != _OLD_MAGIC:
        raise SourceError(f"{path}: is no torch file")
    for _ in ("protocol version", "system"):
        _TableUnpickler(stream, path).load()
    loaded = _TableUnpickler(stream, path).load()
    keys = _TableUnpickler(stream, path).load()
    sizes = {tensor.storage.key: itemsize(tensor.storage.dtype) for tensor in _tensors(loaded)}
    places: dict[str, int] = {}
    position = stream.tell()
    for key in map(str, keys):
        stream.seek(position)
        count = int.from_bytes(stream.read(8), "little")
        places[key] = position + 8
        position += 8 + count * sizes.get(key, 1)
    return loaded, lambda storage: places[storage.key]


def _all_places(loaded: Any, place: Callable[[_Storage], int]) -> Callable[[_Storage], int]:
    """Look up all storages while the file is open."""
    found = {tensor.storage.key: place(tensor.storage) for tensor in _tensors(loaded)}
    return lambda storage: found[storage.key]


def _tensors(loaded: Any) -> list[_Tensor]:
    return [value for value in loaded.values() if isinstance(value, _Tensor)] if isinstance(loaded, dict) else []


def _weights(loaded: Any, place: Callable[[_Storage], int], path: Path) -> WeightFile:
    if not isinstance(loaded, dict):
        raise SourceError(f"{path}: holds {type(loaded).__name__}; expected names and tensors")
    size = path.stat().st_size
    tensors: dict[str, TensorInfo] = {}
    offsets: dict[str, int] = {}
    for name, tensor in loaded.items():
        if not isinstance(name, str) or not isinstance(tensor, _Tensor):
            raise SourceError(f"{path}: {name!r} is {type(tensor).__name__}; expected a tensor")
        nbytes = math.prod(tensor.shape) * itemsize(tensor.storage.dtype)
        if not _row_major(tensor):
            raise SourceError(
                f"{path}: {name} has strides {tensor.stride} for shape {tensor.shape}; expected rows in order",
                hint="save the model again with contiguous tensors, or take its safetensors form",
            )
        begin = place(tensor.storage) + tensor.offset * itemsize(tensor.storage.dtype)
        if tensor.offset + math.prod(tensor.shape) > tensor.storage.count or begin + nbytes > size:
            raise SourceError(f"{path}: {name} ends behind its storage: the file is truncated or damaged")
        tensors[name] = TensorInfo(name, tensor.shape, tensor.storage.dtype, path, nbytes)
        offsets[name] = begin
    return WeightFile(tensors, offsets)


def _row_major(tensor: _Tensor) -> bool:
    expected = 1
    for length, stride in zip(reversed(tensor.shape), reversed(tensor.stride), strict=True):
        if length > 1 and stride != expected:
            return False
        expected *= length
    return True
