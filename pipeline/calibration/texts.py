"""The text a model is measured on: a local ``.txt`` or ``.jsonl`` file, or a folder of them. Nothing is downloaded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from pipeline.errors import SourceError

SHIPPED = "calib_en_jargon_file_4.4.7.txt"
# Source: the file as shipped; see data/NOTICE.
SHIPPED_SHA256 = "59ac9810fde9fbe7e04481a0ee3a50917f2f02ab87c5c2d1327fc346957ea103"
_SUFFIXES = (".txt", ".jsonl")


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Which text, and how much of it.

    Attributes:
        path: File or folder; None for the shipped excerpt.
        column: Field of a ``.jsonl`` line that holds the text, or a list of token ids.
        samples: Sequences at most.
        seq_len: Tokens of a sequence at most.
        batch_size: Sequences in one forward pass.
    """

    path: Path | None = None
    column: str = "text"
    samples: int = 512
    seq_len: int = 512
    batch_size: int = 1

    def __post_init__(self) -> None:
        """Refuse numbers that measure nothing.

        Raises:
            SourceError: Names the number.
        """
        for name in ("samples", "seq_len", "batch_size"):
            if getattr(self, name) < 1:
                raise SourceError(f"calibration {name} is {getattr(self, name)}; expected a whole number from 1")


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """Sequences ready to run.

    Attributes:
        name: Of the file or folder; no path.
        digest: sha256 of the content.
        sequences: Token ids, none empty.
        blank: Texts that were left out because nothing is in them.
    """

    name: str
    digest: str
    sequences: tuple[tuple[int, ...], ...]
    blank: int

    @property
    def tokens(self) -> int:
        """Tokens in all."""
        return sum(map(len, self.sequences))

    def facts(self) -> dict[str, Any]:
        """Return what a report tells of it. Sequences are packed one by one, so no padding token is involved."""
        return {
            "text": self.name,
            "digest": self.digest,
            "samples": len(self.sequences),
            "tokens": self.tokens,
            "blank_texts": self.blank,
            "padding": "none: sequences run side by side without filling up",
        }


def read_calibration(options: TextOptions, encode: Callable[[str], Sequence[int]]) -> CalibrationText:
    """Read and encode.

    A ``.txt`` file is one long text, cut into sequences of ``seq_len``; of ``.jsonl`` each line is one text, of which
    the beginning is kept.

    Args:
        options: What to read.
        encode: Text to ids, without special tokens.

    Raises:
        SourceError: The file is missing, not readable, lacks the field, or holds no text.
    """
    if options.path is None:
        data = resources.files("pipeline.calibration").joinpath("data").joinpath(SHIPPED).read_bytes()
        parts = [(SHIPPED, data)]
        name = SHIPPED
    else:
        parts = [(path.name, _read(path)) for path in _files(options.path)]
        name = options.path.name
    digest = hashlib.sha256()
    sequences: list[tuple[int, ...]] = []
    blank = 0
    for file, data in parts:
        digest.update(hashlib.sha256(data).digest() if len(parts) > 1 else data)
        for text in _texts(file, data, options.column):
            if not text or (isinstance(text, str) and not text.strip()):
                blank += 1
            elif len(sequences) < options.samples:
                ids = encode(text) if isinstance(text, str) else text
                sequences += _cut(ids, options, whole=file.endswith(".txt"))
    sequences = [sequence for sequence in sequences if sequence][: options.samples]
    if not sequences:
        raise SourceError(
            f"{name}: holds no text to calibrate on ({blank} blank texts); expected at least one that is not empty",
            hint="scales measured on nothing would all be alike and the model would answer garbage",
        )
    return CalibrationText(name, digest.hexdigest(), tuple(sequences), blank)


def _cut(ids: Sequence[int], options: TextOptions, *, whole: bool) -> Iterator[tuple[int, ...]]:
    """Yield pieces of ``seq_len``; a shorter rest only when it is all there is."""
    length = options.seq_len
    if not whole:
        yield tuple(ids[:length])
        return
    for start in range(0, max(1, len(ids) - length + 1), length):
        yield tuple(ids[start : start + length])


def _texts(file: str, data: bytes, column: str) -> Iterator[str | list[int]]:
    try:
        content = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SourceError(f"{file}: is no UTF-8 text (byte {error.start})") from error
    if file.endswith(".txt"):
        yield content
        return
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise SourceError(f"{file}: line {number} is no JSON ({error})") from error
        if not isinstance(row, dict) or column not in row:
            fields = ", ".join(row) if isinstance(row, dict) else f"none, it is a {type(row).__name__}"
            raise SourceError(
                f"{file}: line {number} has no field {column!r}; available fields: {fields}",
                hint="name the field that holds the text: calibration.column=FIELD",
            )
        value = row[column]
        if not (isinstance(value, str) or _is_ids(value)):
            kind = type(value).__name__
            raise SourceError(f"{file}: line {number}: {column} is a {kind}; expected text or a list of token ids")
        yield value


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in value)


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        found = sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES)
        if not found:
            raise SourceError(f"{path}: holds no .txt or .jsonl file to calibrate on")
        return found
    if not path.is_file():
        raise SourceError(f"{path}: does not exist; expected a text to calibrate on")
    if path.suffix not in _SUFFIXES:
        raise SourceError(f"{path}: expected a name that ends in {' or '.join(_SUFFIXES)}")
    return [path]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SourceError(f"{path}: cannot be read ({error.strerror or error})") from error


def text_digest(path: Path | None) -> str:
    """Return the digest that :func:`read_calibration` would record, for the identity of what is made from it.

    Raises:
        SourceError: The file is missing or not readable.
    """
    if path is None:
        return SHIPPED_SHA256
    files = _files(path)
    if len(files) == 1:
        return hashlib.sha256(_read(files[0])).hexdigest()
    return hashlib.sha256(b"".join(hashlib.sha256(_read(file)).digest() for file in files)).hexdigest()
