from __future__ import annotations

import logging
from pathlib import Path

import pytest

from pipeline import logs
from pipeline.logs import RedactingFilter, has_secret, redact, register_secret, stage_logger


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_registered", frozenset())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("token=hf_TESTSECRET123 ok", "token=*** ok"),
        ("Authorization: Bearer abc.def-ghi_123", "Authorization: Bearer ***"),
        ("authorization: Basic dXNlcjpwYXNz", "authorization: Basic ***"),
        ("https://user:pa55word@example.org/x", "https://user:***@example.org/x"),
        ("key nvapi-0123456789abcdefXYZ", "key ***"),
        ('{"a":"x://h:80","b":"me@example.org"}', '{"a":"x://h:80","b":"me@example.org"}'),
        ("pip install hf_transfer; hf_hub_download()", "pip install hf_transfer; hf_hub_download()"),
        ("http://localhost:8000/v1", "http://localhost:8000/v1"),
        ("sha256 " + "ab" * 32, "sha256 " + "ab" * 32),
    ],
)
def test_redact_masks_what_looks_secret_and_nothing_else(text: str, expected: str) -> None:
    assert redact(text, env={}) == expected


def test_redact_takes_secrets_from_telling_variables() -> None:
    env = {"MY_API_KEY": "correct horse", "OTHER_TOKEN": "short", "HOME": "/home/me/long", "X_PASSWORD": "a/b+c d=e"}
    assert redact("correct horse, short, /home/me/long", env) == "***, short, /home/me/long"
    assert redact("url a%2Fb%2Bc%20d%3De", env) == "url ***"


def test_redact_masks_registered_values_longest_first() -> None:
    register_secret("abcdefgh")
    register_secret("abcdefgh-and-more\n")
    register_secret("tiny")
    assert redact("abcdefgh-and-more abcdefgh tiny", env={}) == "*** *** tiny"
    assert has_secret("x abcdefgh")
    assert not has_secret("tiny")


def test_filter_redacts_message_arguments_and_traceback(caplog: pytest.LogCaptureFixture) -> None:
    register_secret("sesame-open-now")
    record = logging.LogRecord("n", logging.ERROR, __file__, 1, "got %s", ("sesame-open-now",), None)
    assert RedactingFilter().filter(record)
    assert record.getMessage() == "got ***"


def test_stage_logger_writes_own_and_package_records_without_secrets(tmp_path: Path) -> None:
    register_secret("sesame-open-now")
    path = tmp_path / "deep" / "stage.log"
    with stage_logger("convert", path) as log:
        log.debug("value %s", "sesame-open-now")
        logging.getLogger("pipeline.checkpoint").warning("from below")
        try:
            raise ValueError("sesame-open-now")
        except ValueError:
            log.exception("failed")
    logging.getLogger("pipeline.checkpoint").warning("after the end")
    text = path.read_text()
    assert "DEBUG convert: value ***" in text
    assert "WARNING pipeline.checkpoint: from below" in text
    assert "ValueError: ***" in text
    assert "sesame" not in text
    assert "after the end" not in text


def test_stage_logger_fails_in_the_caller_when_the_disk_is_full() -> None:
    with stage_logger("convert", Path("/dev/full")) as log, pytest.raises(OSError, match="No space left"):
        log.info("line")
