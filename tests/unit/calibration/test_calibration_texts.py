"""Calibration text: local files only, named fields, and nothing that measures nothing."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from pipeline.calibration.texts import SHIPPED_SHA256, TextOptions, read_calibration, text_digest
from pipeline.errors import SourceError


def words(text: str) -> list[int]:
    return [len(word) for word in text.split()]


def jsonl(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_shipped_text_is_the_one_the_notice_names() -> None:
    text = read_calibration(TextOptions(samples=3, seq_len=16), words)
    assert text.digest == SHIPPED_SHA256 == text_digest(None)
    assert [len(sequence) for sequence in text.sequences] == [16, 16, 16]


def test_any_file_with_a_named_field_is_read_and_recorded(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "whatever.jsonl", {"article": "a bb ccc dddd"}, {"article": " "}, {"article": "ee"})
    text = read_calibration(TextOptions(path, "article", seq_len=3), words)
    assert text.sequences == ((1, 2, 3), (2,))
    assert text.facts() == {
        "text": "whatever.jsonl",
        "digest": hashlib.sha256(path.read_bytes()).hexdigest(),
        "samples": 2,
        "tokens": 4,
        "blank_texts": 1,
        "padding": "none: sequences run side by side without filling up",
    }


def test_token_ids_need_no_tokenizer(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "ids.jsonl", {"ids": [5, 6, 7]})

    def refuse(text: str) -> list[int]:
        raise AssertionError("there is no text to encode")

    assert read_calibration(TextOptions(path, "ids"), refuse).sequences == ((5, 6, 7),)


def test_missing_field_names_those_there_are(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "t.jsonl", {"body": "x", "title": "y"})
    with pytest.raises(SourceError, match=r"line 1 has no field 'text'; available fields: body, title"):
        read_calibration(TextOptions(path), words)


@pytest.mark.parametrize("rows", [[], [{"text": ""}, {"text": "  "}]], ids=["empty", "blank"])
def test_text_that_holds_nothing_is_refused(tmp_path: Path, rows: list[object]) -> None:
    with pytest.raises(SourceError, match="holds no text to calibrate on"):
        read_calibration(TextOptions(jsonl(tmp_path / "t.jsonl", *rows)), words)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.jsonl", b"{oops\n", "line 1 is no JSON"),
        pytest.param("t.jsonl", b"[" * 100_000, "line 1 is no JSON", id="nested"),
        ("t.jsonl", b'{"text": 5}\n', "text is a int; expected text or a list of token ids"),
        ("t.txt", b"\xff\xfe", "is no UTF-8 text"),
        ("t.parquet", b"", "expected a name that ends in .txt or .jsonl"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError, match=message):
        read_calibration(TextOptions(tmp_path / name), words)


def test_long_text_is_cut_and_a_short_one_is_kept_whole(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("a " * 10)
    (tmp_path / "short.txt").write_text("a b")
    assert [len(s) for s in read_calibration(TextOptions(tmp_path / "long.txt", seq_len=4), words).sequences] == [4, 4]
    assert [len(s) for s in read_calibration(TextOptions(tmp_path / "short.txt", seq_len=4), words).sequences] == [2]


def test_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("bb")
    (tmp_path / "a.txt").write_text("a")
    text = read_calibration(TextOptions(tmp_path), words)
    assert text.sequences == ((1,), (2,))
    assert text.digest == text_digest(tmp_path)
