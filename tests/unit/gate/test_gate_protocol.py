"""Windows, and the text that ships."""

from __future__ import annotations

import hashlib

import pytest

from pipeline.errors import SourceError
from pipeline.gate.protocol import QUICK, STANDARD, Protocol, shipped_text, verified_text


@pytest.mark.parametrize("tokens", [2, 5, 1023, 1024, 1025, 1537, 2048, 8192])
def test_windows_score_each_token_once_with_enough_context(tokens):
    protocol = Protocol("t", "text", "0" * 64, tokens=tokens)
    scored: list[int] = []
    for window in protocol.windows():
        assert window.stop - window.start <= 1024
        scored += range(window.first_scored, window.stop)
        assert window.start == 0 or window.first_scored - window.start >= 512
    assert scored == list(range(1, tokens))


def test_windows_of_quick_are_the_first_of_standard():
    quick = list(QUICK.windows())
    assert quick == list(STANDARD.windows())[: len(quick)]
    assert STANDARD.covers(QUICK)
    assert not QUICK.covers(STANDARD)


def test_standard_is_the_published_protocol():
    # 8192 tokens, window 1024, stride 512: 15 windows.
    assert len(list(STANDARD.windows())) == 15
    assert STANDARD.forward_tokens() == 15 * 1024
    assert QUICK.forward_tokens() == 3 * 1024


def test_covers_refuses_another_text_window_or_bos():
    base = Protocol("a", "t", "0" * 64, tokens=100)
    assert base.covers(Protocol("b", "same text, other label", "0" * 64, tokens=50))
    assert not base.covers(Protocol("b", "t", "1" * 64, tokens=50))
    assert not base.covers(Protocol("b", "t", "0" * 64, tokens=50, window=512, stride=256))
    assert not base.covers(Protocol("b", "t", "0" * 64, tokens=50, add_bos=True))


@pytest.mark.parametrize("window,stride,tokens", [(8, 8, 100), (8, 0, 100), (8, 4, 1)])
def test_protocol_refuses_windows_without_context(window, stride, tokens):
    with pytest.raises(SourceError, match="expected at least 2 tokens"):
        Protocol("bad", "t", "0" * 64, tokens=tokens, window=window, stride=stride)


def test_shipped_text_is_the_one_the_protocols_name():
    text = shipped_text()
    assert hashlib.sha256(text.encode()).hexdigest() == STANDARD.text_digest
    assert text.isascii()


def test_verified_text_refuses_a_changed_text():
    with pytest.raises(SourceError, match="sha256"):
        verified_text(b"Sir Walter Elliot", STANDARD)
