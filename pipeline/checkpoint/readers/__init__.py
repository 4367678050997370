"""Open a model on disk, whatever its format."""

from __future__ import annotations

from pathlib import Path

from pipeline.checkpoint.readers.base import TensorInfo, TensorSource
from pipeline.errors import SourceError

__all__ = ["TensorInfo", "TensorSource", "open_source"]


def open_source(path: Path, *, dequantize: bool = False) -> TensorSource:
    """Open a source and verify all headers, without reading a weight.

    Packed integers (GPTQ, AutoAWQ, compressed-tensors) are shown as int8 codes with scales beside them; see
    :mod:`pipeline.checkpoint.readers.packed`.

    Args:
        path: A folder with config.json and weights, a ``.gguf`` file, or a folder with exactly one ``.gguf`` file.
        dequantize: Show quantized weights as plain ones.

    Raises:
        SourceError: Nothing usable is there, or a file is damaged; names the file and the likely reason.
    """
    from pipeline.checkpoint.readers.folder import ModelFolder

    gguf = find_gguf(path)
    if gguf is not None:
        from pipeline.checkpoint.readers.gguf_file import GgufSource

        return GgufSource(gguf)
    folder = ModelFolder(path)
    if not isinstance(folder.config.get("quantization_config"), dict):
        return folder
    from pipeline.checkpoint.readers.dequantized import DequantizedSource
    from pipeline.checkpoint.readers.packed import unpacked

    try:
        source = unpacked(folder)
    except BaseException:
        folder.close()
        raise
    return DequantizedSource(source) if dequantize else source


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF file that ``path`` is or holds, None if it is a Hugging Face folder.

    Raises:
        SourceError: ``path`` does not exist, or the folder holds several and no config.json.
    """
    if path.is_file():
        if path.suffix == ".gguf":
            return path
        raise SourceError(f"{path}: is a file; expected a model folder or a .gguf file")
    if not path.is_dir():
        raise SourceError(f"{path}: does not exist; expected a model folder or a .gguf file")
    if (path / "config.json").exists():
        return None
    found = sorted(path.glob("*.gguf"))
    if len(found) == 1:
        return found[0]
    if found:
        raise SourceError(
            f"{path}: holds {len(found)} .gguf files; expected one", hint=f"name the file: {found[0]} or another"
        )
    return None
