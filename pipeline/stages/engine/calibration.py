"""Calibration text as NVIDIA's tools take it: a folder with ``train.jsonl``, one ``{"text": …}`` object a line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from pipeline.config.engine_parts import Calibration
from pipeline.errors import SourceError
from pipeline.stages.engine.host_inputs import content_digest

SHIPPED_TEXT = "calib_en_jargon_file_4.4.7.txt"

# English has 4.4 characters a token (the shipped excerpt, SmolLM2's tokenizer); a little more fills every sample.
_CHARACTERS_PER_TOKEN = 5


def calibration_digest(calibration: Calibration, *, resolve: bool) -> str:
    """Return what identifies the text.

    Raises:
        Unresolved: It is large and ``resolve`` is False.
        SourceError: It is missing.
    """
    if not calibration.path:
        return hashlib.sha256(_shipped()).hexdigest()
    return content_digest(Path(calibration.path), resolve=resolve)


def prepare_calibration(calibration: Calibration, folder: Path) -> tuple[Path, int | None]:
    """Make the folder that the tool gets.

    Args:
        calibration: What was asked for.
        folder: Where to write; does not exist yet.

    Returns:
        The folder, and how many texts it holds; None for a folder of the user's, which is passed on as it is.

    Raises:
        SourceError: The data is missing, or has no such column.
    """
    path = Path(calibration.path) if calibration.path else None
    if path is not None and path.is_dir():
        return path, None
    if path is not None and path.suffix == ".jsonl":
        texts = list(_column(path, calibration.column))
    else:
        texts = list(_pieces(_read(path), calibration.seq_len * _CHARACTERS_PER_TOKEN))
    if not texts:
        raise SourceError(f"{path or SHIPPED_TEXT} holds no text to calibrate on")
    folder.mkdir(parents=True)
    chosen = texts[: calibration.samples]
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in chosen)
    (folder / "train.jsonl").write_text(lines, encoding="utf-8")
    return folder, len(chosen)


def _shipped() -> bytes:
    return resources.files("pipeline.calibration").joinpath("data").joinpath(SHIPPED_TEXT).read_bytes()


def _read(path: Path | None) -> str:
    try:
        return (path.read_bytes() if path is not None else _shipped()).decode("utf-8")
    except OSError as error:
        raise SourceError(f"calibration.path={path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SourceError(f"{path} is not UTF-8 text", hint="give a .txt or .jsonl file, or a folder") from error


def _pieces(text: str, characters: int) -> Iterator[str]:
    """Yield runs of whole paragraphs, each at least ``characters`` long but for the last."""
    piece: list[str] = []
    length = 0
    for paragraph in text.split("\n"):
        if not paragraph.strip():
            continue
        piece.append(paragraph)
        length += len(paragraph)
        if length >= characters:
            yield "\n".join(piece)
            piece, length = [], 0
    if piece:
        yield "\n".join(piece)


def _column(path: Path, column: str) -> Iterator[str]:
    for number, line in enumerate(_read(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise SourceError(f"{path}:{number} is no JSON: {error}") from error
        text = row.get(column) if isinstance(row, dict) else None
        if not isinstance(text, str):
            found = ", ".join(sorted(row)) if isinstance(row, dict) else type(row).__name__
            raise SourceError(
                f"{path}:{number} has no text in column {column!r}; it has: {found}", hint="set calibration.column"
            )
        if text.strip():
            yield text
