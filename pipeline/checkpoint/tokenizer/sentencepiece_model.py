"""Parse a SentencePiece ``tokenizer.model`` (a protobuf message), without the sentencepiece package.

Source: field numbers of ``sentencepiece_model.proto`` of google/sentencepiece.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from pipeline.checkpoint.readers.base import refuse_placeholder
from pipeline.errors import SourceError


class PieceKind(IntEnum):
    """``SentencePiece.Type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Piece:
    """An entry of the vocabulary; its id is its place in the list."""

    text: str
    score: float
    kind: PieceKind


@dataclass(frozen=True, slots=True)
class SentencePieceModel:
    """What a model file says that changes how text is encoded.

    Attributes:
        model_type: 1 unigram, 2 BPE, 3 word, 4 char.
        normalizer: Name of the normalization rule; ``identity`` changes nothing.
        has_charsmap: Whether the file carries a compiled normalization table.
    """

    pieces: tuple[Piece, ...]
    model_type: int
    byte_fallback: bool
    unk_id: int
    bos_id: int
    eos_id: int
    pad_id: int
    normalizer: str
    has_charsmap: bool
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    escape_whitespaces: bool
    whitespace_as_suffix: bool


_Fields = dict[int, list[bytes | int]]


def parse_sentencepiece(path: Path) -> SentencePieceModel:
    """Parse a model file.

    Raises:
        SourceError: The file is a placeholder or no SentencePiece model.
    """
    refuse_placeholder(path)
    try:
        return _model(path.read_bytes())
    except (IndexError, ValueError, struct.error, KeyError) as error:
        raise SourceError(f"{path}: is no SentencePiece model ({type(error).__name__}: {error})") from error


def _model(data: bytes) -> SentencePieceModel:
    fields = _fields(data)
    pieces = tuple(_piece(item) for item in fields.get(1, []) if isinstance(item, bytes))
    if not pieces:
        raise ValueError("no pieces")
    trainer, normalizer = _message(fields, 2), _message(fields, 3)
    name = normalizer.get(1, [b""])[-1]
    return SentencePieceModel(
        pieces=pieces,
        model_type=_number(trainer, 3, 1),
        byte_fallback=bool(_number(trainer, 35, 0)),
        unk_id=_number(trainer, 40, 0),
        bos_id=_number(trainer, 41, 1),
        eos_id=_number(trainer, 42, 2),
        pad_id=_number(trainer, 43, -1),
        normalizer=name.decode("utf-8") if isinstance(name, bytes) else str(name),
        has_charsmap=bool(normalizer.get(2, [b""])[-1]),
        add_dummy_prefix=bool(_number(normalizer, 3, 1)),
        remove_extra_whitespaces=bool(_number(normalizer, 4, 1)),
        escape_whitespaces=bool(_number(normalizer, 5, 1)),
        whitespace_as_suffix=bool(_number(trainer, 24, 0)),
    )


def _piece(data: bytes) -> Piece:
    fields = _fields(data)
    text, score = fields[1][-1], fields.get(2, [b"\0\0\0\0"])[-1]
    if not isinstance(text, bytes) or not isinstance(score, bytes):
        raise ValueError("a piece without text or score")
    return Piece(text.decode("utf-8"), struct.unpack("<f", score)[0], PieceKind(_number(fields, 3, 1)))


def _message(fields: _Fields, number: int) -> _Fields:
    merged: _Fields = {}
    for item in fields.get(number, []):
        if isinstance(item, bytes):
            for key, values in _fields(item).items():
                merged.setdefault(key, []).extend(values)
    return merged


def _number(fields: _Fields, number: int, default: int) -> int:
    value = fields.get(number, [default])[-1]
    if isinstance(value, bytes):
        raise ValueError(f"field {number} is no number")
    # int32 fields hold negative numbers as 64-bit two's complement.
    return value - (1 << 64) if value >= 1 << 63 else value


def _fields(data: bytes) -> _Fields:
    found: _Fields = {}
    for number, value in _walk(data):
        found.setdefault(number, []).append(value)
    return found


def _walk(data: bytes) -> Iterator[tuple[int, bytes | int]]:
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, position = _varint(data, position)
            yield number, value
            continue
        if wire == 2:
            length, position = _varint(data, position)
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire}")
        if position + length > len(data):
            raise ValueError("the file ends inside a field")
        yield number, data[position : position + length]
        position += length


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")
