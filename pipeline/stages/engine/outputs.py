"""Whether a tool wrote what it should have: every rank, nothing empty, of the right release."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipeline.errors import SourceError, ToolError

# The builder has been seen to log an error, go on to write files, and end with exit code 0.
_ERROR_LINE = re.compile(
    r"^\s*(\[[^\]]*\]\s*)*(\[E\]|\[ERROR\]|\[F\])|engine building failed|checkpoint conversion failed", re.IGNORECASE
)
# While it measures kernels it reports the ones that do not fit; it takes others.
_HARMLESS = re.compile(r"tactic|requested amount of gpu memory|skipp", re.IGNORECASE)


def error_lines(lines: Iterable[str]) -> list[str]:
    """Return the lines in which a tool reports an error, whatever its exit code."""
    return [line.strip() for line in lines if _ERROR_LINE.search(line) and not _HARMLESS.search(line)]


def check_checkpoint(folder: Path, *, tp: int, pp: int, cp: int) -> dict[str, Any]:
    """Check a checkpoint that NVIDIA's tools wrote.

    Returns:
        Its configuration.

    Raises:
        ToolError: A file is missing, empty or cut short, or the split is another.
    """
    from pipeline.checkpoint.readers.safetensors_file import read_safetensors_header

    config = _config(folder)
    mapping = _object(config, "mapping", folder)
    for name, wanted in (("tp_size", tp), ("pp_size", pp)):
        if mapping.get(name, 1) != wanted:
            raise ToolError(f"{folder / 'config.json'} says {name}={mapping.get(name, 1)}, expected {wanted}")
    ranks = mapping.get("world_size", tp * pp)
    # Context parallel ranks share weights; older converters write no files for them.
    if ranks not in (tp * pp, tp * pp * cp):
        raise ToolError(f"{folder / 'config.json'} says world_size={ranks}, expected {tp * pp * cp}")
    for path in _rank_files(folder, "safetensors", ranks):
        try:
            read_safetensors_header(path)
        except SourceError as error:
            raise ToolError(f"the tool ended well, but {error.message}", hint=error.hint) from error
    return config


def check_engine(folder: Path, *, ranks: int, release: str) -> dict[str, Any]:
    """Check what the builder wrote.

    Returns:
        The engines' configuration.

    Raises:
        ToolError: A rank is missing or empty, or another release built it.
    """
    config = _config(folder)
    version = str(config.get("version", ""))
    if version.partition("+")[0] != release:
        raise ToolError(
            f"{folder / 'config.json'} says that TensorRT-LLM {version or '(none)'} built it, expected {release}",
            hint="use the image of the toolchain's release",
        )
    mapping = _object(_object(config, "pretrained_config", folder), "mapping", folder)
    if mapping.get("world_size", 1) != ranks:
        raise ToolError(f"{folder / 'config.json'} is for {mapping.get('world_size', 1)} rank(s), expected {ranks}")
    _rank_files(folder, "engine", ranks)
    return config


def _rank_files(folder: Path, suffix: str, ranks: int) -> list[Path]:
    expected = [folder / f"rank{rank}.{suffix}" for rank in range(ranks)]
    missing = [path.name for path in expected if not path.is_file()]
    empty = [path.name for path in expected if path.is_file() and path.stat().st_size == 0]
    extra = sorted(path.name for path in folder.glob(f"rank*.{suffix}") if path not in expected)
    problems = [(missing, "missing"), (empty, "empty"), (extra, "of a rank that should not exist")]
    said = [f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} {what}" for names, what in problems if names]
    if said:
        raise ToolError(f"the tool ended well, but {'; '.join(said)} ({ranks} rank(s) expected)")
    return expected


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ToolError(f"the tool ended well, but {path.name} is missing or no JSON: {error}") from error
    if not isinstance(document, dict):
        raise ToolError(f"{path} holds no JSON object")
    return document


def _object(document: dict[str, Any], key: str, folder: Path) -> dict[str, Any]:
    value = document.get(key)
    if not isinstance(value, dict):
        raise ToolError(f"{folder / 'config.json'} has no object {key!r}")
    return value
