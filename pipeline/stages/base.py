"""What a stage is. A stage turns input artefacts into one output folder and knows nothing of caching."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from pipeline.config.spec import Spec
from pipeline.store.record import Record

# progress(done, total, unit): total None when unknown. Cheap; the graph limits how often it is shown.
Progress = Callable[[float, "float | None", str], None]


class Unresolved(Exception):
    """What decides a stage's output is not known yet (a branch that was not looked up); the text says what and why."""


@dataclass(slots=True)
class StageContext:
    """Everything a running stage may touch.

    Attributes:
        spec: The frozen job.
        inputs: Read-only artefact folders of the upstream stages, by stage name.
        records: What is known of the same stages: digests, files, facts. A stage sees what it declares, because its key
            covers just that.
        out: Empty folder to write into; published by the store when ``run`` returns and ``check`` agrees.
        scratch: Folder for intermediate results. It outlives a failed or killed try, and the next one of the same key
            gets it back; it is removed when the output is published.
        log: Goes to the stage's log file.
        log_path: That file, for the output of started programs.
        progress: Reports how far the stage is.
        facts: What the stage wants to have in its manifest (sources used, versions, counts). JSON values.
    """

    spec: Spec
    inputs: Mapping[str, Path]
    records: Mapping[str, Record]
    out: Path
    scratch: Path
    log: logging.Logger
    log_path: Path
    progress: Progress
    facts: dict[str, Any] = field(default_factory=dict)


class Stage(Protocol):
    """One node of the graph.

    Attributes:
        name: ``fetch``, ``convert`` …; part of the key.
        version: Raised when the meaning of the output changes; part of the key.
        inputs: Names of the stages it reads.
    """

    name: str
    version: int
    inputs: tuple[str, ...]

    def identity(self, spec: Spec) -> Mapping[str, Any]:
        """Return what, besides the inputs, decides the output: JSON values, no host paths.

        Raises:
            Unresolved: It cannot be told without work that planning must not do.
        """

    def run(self, context: StageContext) -> None:
        """Write the output into ``context.out``.

        Raises:
            PipelineError: Anything the user can act on.
        """

    def check(self, path: Path) -> None:
        """Verify the contract of a finished output before it is published.

        Raises:
            PipelineError: The output is not what downstream stages rely on.
        """


@dataclass(frozen=True, slots=True)
class Planned:
    """A command as it runs inside the container, and the line of the runner that starts it."""

    command: tuple[str, ...]
    runner: tuple[str, ...]


@runtime_checkable
class CommandStage(Protocol):
    """A stage that starts tools; it can say beforehand what it would start."""

    def commands(self, spec: Spec) -> tuple[Planned, ...]:
        """Return every command, without doing anything; empty while findings stand in the way."""
