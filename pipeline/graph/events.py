"""What happens during a run, as values. The graph emits them; consoles, reports and tests take them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class StageStarted:
    """A stage begins to work, because nothing usable was found.

    Attributes:
        stage: Its name.
        key: Its action key.
        reason: Why it has to run.
        log_path: Where its log goes.
    """

    stage: str
    key: str
    reason: str
    log_path: Path


@dataclass(frozen=True, slots=True)
class StageWaiting:
    """Another process is building the same thing; this one waits for it."""

    stage: str


@dataclass(frozen=True, slots=True)
class StageProgress:
    """How far a stage is.

    Attributes:
        stage: Its name.
        done: Amount done.
        total: Amount in all; None when unknown.
        unit: Of both, in the plural: ``bytes``, ``tensors``.
    """

    stage: str
    done: float
    total: float | None
    unit: str


@dataclass(frozen=True, slots=True)
class StageFinished:
    """A stage has its result.

    Attributes:
        stage: Its name.
        hit: The result was there already.
        reason: Why it was a hit or a miss.
        seconds: Wall time of this run; for a hit, of the look-up.
        artefact: Digest of the result.
        size_bytes: Its size.
    """

    stage: str
    hit: bool
    reason: str
    seconds: float
    artefact: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class StageFailed:
    """A stage ended without a result.

    Attributes:
        stage: Its name.
        message: What happened.
        seconds: Wall time.
        log_path: Its log, with the output of started programs.
        kept: Copy of what it had written, if that was small; for looking into.
    """

    stage: str
    message: str
    seconds: float
    log_path: Path
    kept: Path | None = None


@dataclass(frozen=True, slots=True)
class RunFinished:
    """The run is over.

    Attributes:
        ok: Every stage has its result.
        hits: Stages that were there already.
        built: Stages that worked.
        seconds: Wall time.
    """

    ok: bool
    hits: int
    built: int
    seconds: float


Event = StageStarted | StageWaiting | StageProgress | StageFinished | StageFailed | RunFinished
Emit = Callable[[Event], None]


def ignore(event: Event) -> None:
    """Take an event and do nothing."""
