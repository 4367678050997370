"""A Hugging Face model folder: config.json and weights, safetensors or torch pickles, whole or in shards."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.checkpoint.dtypes import Array
from pipeline.checkpoint.hfconfig import load_config
from pipeline.checkpoint.readers.base import OpenFiles, TensorInfo, WeightFile, read_matrix, refuse_placeholder
from pipeline.checkpoint.readers.safetensors_file import read_safetensors_header
from pipeline.errors import SourceError

_KNOWN_PREFIXES = ("model.", "transformer.", "lm_head.", "h.", "wte.", "language_model.")
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pth", ".pt", ".gguf", ".msgpack", ".h5", ".onnx")


@dataclass(frozen=True, slots=True)
class _Format:
    """A format of weight files: its usual names, and how to read a header."""

    kind: str
    whole: str
    shards: str
    read_header: Callable[[Path], WeightFile]

    @property
    def index(self) -> str:
        return f"{self.whole}.index.json"


def _read_torch(path: Path) -> WeightFile:
    from pipeline.checkpoint.readers.torch_file import read_torch_header

    return read_torch_header(path)


# The first format found wins: the same weights in the second one are left alone.
_FORMATS = (
    _Format("safetensors", "model.safetensors", "*.safetensors", read_safetensors_header),
    _Format("torch", "pytorch_model.bin", "pytorch_model*.bin", _read_torch),
)


class ModelFolder:
    """A folder with config.json and weights. See :class:`TensorSource`."""

    def __init__(self, path: Path) -> None:
        """Open the folder and verify every header.

        Raises:
            SourceError: A file is missing, truncated, a placeholder, or lacks a tensor the index promises.
        """
        self.path = path
        self.config: Mapping[str, Any] = load_config(path / "config.json")
        self.warnings: tuple[str, ...] = ()
        form, names = choose_files(path)
        self.kind = form.kind
        index = path / form.index
        self._promised = read_index(index) if index.is_file() else None
        self._shards = tuple(path / name for name in names)
        self.ignored_files: Mapping[str, str] = ignored_files(path, used=names, indexed=self._promised is not None)
        self._files = OpenFiles()
        self._offsets: dict[str, int] = {}
        tensors: dict[str, TensorInfo] = {}
        for shard in self._shards:
            if not shard.is_file():
                raise SourceError(f"{shard}: is missing; {index.name} names it", hint="fetch the model again")
            header = form.read_header(shard)
            for name, info in header.tensors.items():
                if name in tensors and self._promised is None:
                    raise SourceError(f"{shard}: {name} is also in {tensors[name].file.name}; expected it once")
                if self._promised is None or self._promised.get(name) == shard.name:
                    tensors[name] = info
                    self._offsets[name] = header.offsets[name]
        self._refuse_broken_promises(tensors)
        self.tensors: Mapping[str, TensorInfo] = tensors
        for shard in self._shards:
            self._files.add(shard)

    def _refuse_broken_promises(self, tensors: Mapping[str, TensorInfo]) -> None:
        missing = [name for name in self._promised or {} if name not in tensors]
        if missing and self._promised is not None:
            name = missing[0]
            raise SourceError(
                f"{self.path / self._promised[name]}: lacks {name}, which the index says it holds"
                + (f" ({len(missing)} tensors missing in all)" if len(missing) > 1 else ""),
                hint="shards of different downloads were mixed; fetch the model again",
            )

    def read(self, name: str, start: int, stop: int, first: int = 0, last: int | None = None) -> Array:
        """Return a block of a tensor; see :meth:`TensorSource.read`."""
        info = self.tensors[name]
        columns = (first, info.cols if last is None else last)
        return read_matrix(self._files, info, self._offsets[name], (start, stop), columns)

    def weight_files(self) -> tuple[Path, ...]:
        """Return the shards."""
        return self._shards

    def close(self) -> None:
        """Close the shards."""
        self._files.close()


def read_index(path: Path) -> dict[str, str]:
    """Read a weight index: tensor name to file name.

    Raises:
        SourceError: The index is a placeholder, no JSON, or names a file outside the folder.
    """
    refuse_placeholder(path)
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise SourceError(f"{path}: is no weight index ({type(error).__name__}: {error})") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError(f"{path}: weight_map is empty; expected tensor names and files")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise SourceError(f"{path}: {name} is said to be in {file!r}; expected a file name in the same folder")
    return weight_map


def choose_files(path: Path) -> tuple[_Format, list[str]]:
    """Choose the weight files of a folder.

    For each format: what the index names; else the usual single file; else every file whose tensors have Hugging Face
    names.

    Raises:
        SourceError: There is none.
    """
    for form in _FORMATS:
        if (path / form.index).is_file():
            return form, sorted(set(read_index(path / form.index).values()))
        if (path / form.whole).is_file():
            return form, [form.whole]
        names = [file.name for file in sorted(path.glob(form.shards))]
        chosen = [name for name in names if recognised(form.read_header(path / name).tensors)]
        if chosen:
            return form, chosen
    present = ", ".join(sorted(file.name for file in path.iterdir() if file.suffix in WEIGHT_SUFFIXES)) or "none"
    raise SourceError(
        f"{path}: no recognised weights; expected model.safetensors, pytorch_model.bin, shards with an index, or .gguf",
        hint=f"weight files there: {present}",
    )


def recognised(names: Iterable[str]) -> bool:
    """Say whether tensor names are those of a Hugging Face decoder (vendor layouts name them otherwise)."""
    return any(name.startswith(_KNOWN_PREFIXES) for name in names)


def ignored_files(path: Path, *, used: Iterable[str], indexed: bool) -> dict[str, str]:
    """Return the weight files of a folder that are not read, with the reason."""
    reason = "not named by the index" if indexed else "not needed beside the chosen weights"
    taken = set(used)
    return {
        file.name: reason
        for file in sorted(path.iterdir())
        if file.suffix in WEIGHT_SUFFIXES and file.name not in taken
    }
