from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pipeline.graph.console import PlainConsole, console
from pipeline.graph.events import Event, RunFinished, StageFailed, StageFinished, StageProgress, StageStarted

STORY: list[Event] = [
    StageFinished("fetch", True, "same inputs", 0.0, "a" * 64, 100 << 20),
    StageStarted("convert", "k" * 64, "tp: 1 → 2", Path("/logs/convert.log")),
    *(StageProgress("convert", done * 1e6, 100e6, "bytes") for done in range(101)),
    StageFinished("convert", False, "tp: 1 → 2", 12.34, "b" * 64, 100 << 20),
    StageStarted("validate", "k" * 64, "never built", Path("/logs/validate.log")),
    StageFailed("validate", "perplexity 99\nmore", 3.0, Path("/logs/validate.log")),
    RunFinished(False, 1, 1, 16.0),
]


def test_plain_console_writes_one_line_per_transition() -> None:
    out = io.StringIO()
    with console(out) as emit:
        for event in STORY:
            emit(event)
    assert out.getvalue().splitlines() == [
        "fetch     hit    same inputs, 100.0 MiB, aaaaaaaaaaaa",
        "convert   start  tp: 1 → 2",
        "convert   done   12.3 s, 100.0 MiB, bbbbbbbbbbbb",
        "validate  start  never built",
        "validate  FAILED after 3.0 s: perplexity 99",
        "          log: /logs/validate.log",
    ]


def test_plain_console_shows_progress_now_and_then() -> None:
    out = io.StringIO()
    emit = PlainConsole(out, interval_s=0)
    emit(StageProgress("convert", 50e6, 100e6, "bytes"))
    emit(StageProgress("convert", 3, None, "files"))
    assert out.getvalue().splitlines() == ["convert     …    50 %  47.7 MiB of 95.4 MiB", "convert     …    3 files"]


def test_console_is_silent_when_quiet() -> None:
    out = io.StringIO()
    with console(out, quiet=True) as emit:
        for event in STORY:
            emit(event)
    assert out.getvalue() == ""


def test_console_redacts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "sesame-open-now")
    out = io.StringIO()
    PlainConsole(out)(StageFailed("fetch", "401 for sesame-open-now", 1.0, Path("/l")))
    assert "sesame" not in out.getvalue()


def test_live_console_draws_bars_on_a_terminal_and_keeps_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    leader, follower = pty.openpty()
    seen = bytearray()

    def read() -> None:
        try:
            while data := os.read(leader, 4096):
                seen.extend(data)
        except OSError:  # the other end was closed
            return

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(follower, "w") as terminal, console(terminal) as emit:
        for event in STORY:
            emit(event)
    reader.join(10)
    os.close(leader)
    text = seen.decode()
    for line in ("fetch     hit    same inputs", "convert   done   12.3 s", "FAILED after 3.0 s: perplexity 99"):
        assert line in text
    assert "\x1b[?25h" in text, "the cursor is visible again"


def test_console_of_hits_does_not_load_rich() -> None:
    code = """
import sys, types
from pathlib import Path
import pipeline.graph.run, pipeline.graph.plan, pipeline.graph.export
from pipeline.graph.console import console
from pipeline.graph.events import StageFinished
class Terminal:
    isatty = staticmethod(lambda: True)
    write = flush = staticmethod(lambda *a: None)
with console(Terminal()) as emit:
    emit(StageFinished("fetch", True, "same inputs", 0.0, "a" * 64, 1))
heavy = {"rich", "numpy", "importlib.metadata", "concurrent.futures", "huggingface_hub"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "TERM": "xterm"})
