"""Show a run to people: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from pipeline.graph.events import (
    Emit,
    Event,
    RunFinished,
    StageFailed,
    StageFinished,
    StageProgress,
    StageStarted,
    StageWaiting,
    ignore,
)
from pipeline.logs import redact
from pipeline.store.faults import format_bytes

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

# Log files of CI jobs are read by people: a line that says nothing new every few seconds is enough to see life.
PLAIN_INTERVAL_S = 5.0


@contextmanager
def console(file: TextIO, *, quiet: bool = False) -> Iterator[Emit]:
    """Yield a sink for the events of one run.

    Args:
        file: Where to write; a terminal gets live bars, anything else one line per transition.
        quiet: Show nothing.
    """
    if quiet:
        yield ignore
    elif file.isatty() and os.environ.get("TERM", "") != "dumb":
        live = _Live(file)
        try:
            yield live
        finally:
            live.close()
    else:
        yield PlainConsole(file)


class PlainConsole:
    """One line per transition, and a line of progress every few seconds."""

    def __init__(self, file: TextIO, *, interval_s: float = PLAIN_INTERVAL_S) -> None:
        self._file = file
        self._interval_s = interval_s
        self._next = 0.0

    def __call__(self, event: Event) -> None:
        """Take an event."""
        if isinstance(event, StageProgress):
            now = time.monotonic()
            if now < self._next:
                return
            self._next = now + self._interval_s
        elif isinstance(event, StageStarted):
            # The first seconds of a stage need no progress line.
            self._next = time.monotonic() + self._interval_s
        if text := describe(event):
            print(redact(text), file=self._file, flush=True)


def describe(event: Event) -> str:
    """Say an event in one line of text (a failure: with its message); empty when there is nothing to say."""
    if isinstance(event, StageStarted):
        return f"{event.stage:<9} start  {event.reason}"
    if isinstance(event, StageWaiting):
        return f"{event.stage:<9} wait   another process is building this"
    if isinstance(event, StageProgress):
        return f"{event.stage:<9}   …    {_amount(event)}"
    if isinstance(event, StageFinished):
        what = f"hit    {event.reason}" if event.hit else f"done   {event.seconds:.1f} s"
        return f"{event.stage:<9} {what}, {format_bytes(event.size_bytes)}, {event.artefact[:12]}"
    if isinstance(event, StageFailed):
        kept = f"; what it wrote: {event.kept}" if event.kept else ""
        first = event.message.partition("\n")[0]
        return f"{event.stage:<9} FAILED after {event.seconds:.1f} s: {first}\n{'':<9} log: {event.log_path}{kept}"
    return _summary(event)


def _summary(event: RunFinished) -> str:
    if not event.ok:
        return ""
    return f"{event.built} built, {event.hits} reused, {event.seconds:.1f} s"


def _amount(event: StageProgress) -> str:
    if event.unit == "bytes":
        done, total = format_bytes(event.done), format_bytes(event.total or 0)
        unit = ""
    else:
        done, total, unit = f"{event.done:g}", f"{event.total or 0:g}", f" {event.unit}"
    if not event.total:
        return f"{done}{unit}"
    return f"{100 * event.done / event.total:.0f} %  {done} of {total}{unit}"


class _Live:
    """A bar per stage that works; finished stages are plain lines above it.

    rich is loaded when the first stage starts to work: a run of hits needs no bar and should end at once.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, event: Event) -> None:
        if isinstance(event, StageStarted):
            self._say(describe(event))
            bars = self._bars()
            self._tasks[event.stage] = bars.add_task(event.stage, total=None, amount="")
        elif isinstance(event, StageProgress):
            if event.stage in self._tasks:
                self._bars().update(
                    self._tasks[event.stage], completed=event.done, total=event.total, amount=_amount(event)
                )
        else:
            if isinstance(event, StageFinished | StageFailed) and event.stage in self._tasks:
                self._bars().remove_task(self._tasks.pop(event.stage))
            if isinstance(event, RunFinished):
                self.close()
            self._say(describe(event))

    def close(self) -> None:
        """Give the terminal back."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _say(self, text: str) -> None:
        if not text:
            return
        if self._progress is None:
            print(redact(text), file=self._file, flush=True)
        else:
            self._progress.console.print(redact(text), markup=False, highlight=False, soft_wrap=True)

    def _bars(self) -> Progress:
        if self._progress is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            self._progress = Progress(
                TextColumn("{task.description:<9}", markup=False),
                BarColumn(),
                TextColumn("{task.fields[amount]}", markup=False),
                TimeElapsedColumn(),
                console=Console(file=self._file),
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._progress.start()
        return self._progress
