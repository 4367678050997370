"""``frontend-check`` against a server that keeps the contract and one that does not."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

import pipeline.frontend.conformance as conformance
from pipeline.cli.main import main
from pipeline.frontend.conformance import Check


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace the checks; their arguments are kept, ``checks`` is what they find."""
    seen: dict[str, Any] = {"checks": [Check("one", "passed"), Check("two", "skipped", "no logprobs")]}

    def check(url: str, **options: Any) -> list[Check]:
        seen.update(url=url, **options)
        return list(seen["checks"])

    monkeypatch.setattr(conformance, "check_frontend", check)
    return seen


def test_a_table_for_people_and_the_key_from_the_environment(
    asked: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "sk-1")
    assert main(["frontend-check", "http://h:1", "--model", "m", "--api-key-env", "MY_KEY"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines() == ["  passed   one", "  skipped  two", "           no logprobs", "1 passed, 1 skipped"]
    assert (asked["url"], asked["model"], asked["api_key"]) == ("http://h:1", "m", "sk-1")


def test_a_failed_check_is_exit_code_3_and_in_the_document(
    asked: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    asked["checks"].append(Check("three", "failed", "texts differ"))
    assert main(["frontend-check", "http://h:1", "--json"]) == 3
    document = json.load(io.StringIO(capsys.readouterr().out))
    assert document["counts"] == {"passed": 1, "failed": 1, "skipped": 1}
    assert document["checks"][2] == {"name": "three", "verdict": "failed", "detail": "texts differ"}


@pytest.mark.parametrize("arguments", [["localhost:8000"], ["http://h", "--max-tokens", "0"]])
def test_what_cannot_be_asked_is_said_in_a_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["frontend-check", *arguments]) == 3
    assert capsys.readouterr().err.startswith("error: ")
