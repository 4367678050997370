"""Run the stages of a job, one after the other, each at most once in the life of a store."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from urllib.parse import quote

from pipeline.config.spec import Spec
from pipeline.errors import PipelineError, StoreError
from pipeline.graph.dag import key_document, topological
from pipeline.graph.events import (
    Emit,
    RunFinished,
    StageFailed,
    StageFinished,
    StageProgress,
    StageStarted,
    StageWaiting,
    ignore,
)
from pipeline.graph.interrupt import sigterm_raises
from pipeline.logs import redact, stage_logger
from pipeline.stages.base import Stage, StageContext
from pipeline.store.explain import explain
from pipeline.store.faults import is_disk_full, store_error, store_errors
from pipeline.store.keys import action_key, content_key
from pipeline.store.record import Record, contents
from pipeline.store.store import Hit, Store

# A progress callback may come for every tensor; eyes need ten a second.
_PROGRESS_INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True)
class StageResult:
    """The result of one stage.

    Attributes:
        name: Of the stage.
        key: Its action key.
        hit: It was there already.
        reason: Why it was a hit or a miss.
        record: What was made, from what, by what.
        path: The read-only folder.
    """

    name: str
    key: str
    hit: bool
    reason: str
    record: Record
    path: Path


@dataclass(frozen=True, slots=True)
class RunResult:
    """The results of all stages, by name, in the order they ran.

    Attributes:
        stages: By name.
        seconds: Wall time of the whole run.
    """

    stages: Mapping[str, StageResult]
    seconds: float

    def artefact(self, stage: str) -> Path:
        """Return the read-only folder a stage made."""
        return self.stages[stage].path

    @property
    def all_hits(self) -> bool:
        """Nothing had to be done."""
        return all(result.hit for result in self.stages.values())


def run(
    spec: Spec, stages: Sequence[Stage], store: Store, *, emit: Emit = ignore, work_log_dir: Path | None = None
) -> RunResult:
    """Make every stage's result exist, reusing what the store has.

    Args:
        spec: The job; ``spec.name`` groups its records and logs.
        stages: The graph, in any order.
        store: Where results are.
        emit: Gets events, from the thread that calls and from threads that a stage starts.
        work_log_dir: Folder for log files; default ``<store root>/logs/<job>``.

    Raises:
        ConfigError: The stages do not form a graph.
        StoreError: The store cannot be read or written, or the disk is full.
        PipelineError: What a stage raised. Its log stays; nothing of it is cached.
        KeyboardInterrupt: Ctrl-C; on SIGTERM its subclass ``Terminated``.
    """
    started = time.monotonic()
    order = topological(stages)
    log_dir = work_log_dir or store.logs / quote(spec.name, safe="")
    done: dict[str, StageResult] = {}
    try:
        with sigterm_raises(), store.session():
            for stage in order:
                done[stage.name] = _Step(spec, stage, store, emit, log_dir, done).result()
    finally:
        hits = sum(result.hit for result in done.values())
        emit(RunFinished(len(done) == len(order), hits, len(done) - hits, time.monotonic() - started))
    return RunResult(done, time.monotonic() - started)


class _Step:
    """One stage of one run."""

    def __init__(
        self, spec: Spec, stage: Stage, store: Store, emit: Emit, log_dir: Path, done: Mapping[str, StageResult]
    ) -> None:
        self._spec, self._stage, self._store, self._emit, self._log_dir = spec, stage, store, emit, log_dir
        self._inputs = {name: done[name] for name in stage.inputs}
        self._records = {name: result.record for name, result in self._inputs.items()}
        self._document = key_document(stage, spec, {name: result.key for name, result in self._inputs.items()})
        self._key = action_key(self._document)
        self._started = time.monotonic()

    def result(self) -> StageResult:
        """Find the result, or make it."""
        if found := self._find():
            return self._finish(*found, is_hit=True)
        reason = explain(self._store, self._spec.name, self._document)
        with self._store.building(self._key, on_wait=lambda: self._emit(StageWaiting(self._stage.name))):
            # Another process may have finished it while this one waited.
            if found := self._find():
                return self._finish(*found, is_hit=True)
            return self._finish(self._build(reason), reason, is_hit=False)

    def _find(self) -> tuple[Hit, str] | None:
        found = self._store.lookup(self._key)
        if isinstance(found, Hit):
            return found, "same inputs"
        found = self._store.lookup(content_key(self._document, contents(self._records)))
        if isinstance(found, Hit):
            adopted = self._store.adopt(found, self._document, self._records)
            return adopted, "inputs have the same content as before"
        return None

    def _finish(self, hit: Hit, reason: str, *, is_hit: bool) -> StageResult:
        name, record = self._stage.name, hit.record
        self._store.note_use(self._spec.name, name, self._key)
        seconds = time.monotonic() - self._started
        self._emit(StageFinished(name, is_hit, reason, seconds, record.artefact, record.size_bytes))
        return StageResult(name, self._key, is_hit, reason, record, hit.path)

    def _build(self, reason: str) -> Hit:
        name = self._stage.name
        stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S")
        log_path = self._log_dir / f"{name}-{stamp}-{self._key[:8]}.log"
        with contextlib.ExitStack() as stack:
            with store_errors(log_path, "write"):
                log = stack.enter_context(stage_logger(name, log_path))
            folder = stack.enter_context(self._store.staging())
            self._emit(StageStarted(name, self._key, reason, log_path))
            with self._failures(folder, log, log_path):
                log.info("start: %s, key %s", reason, self._key)
                context = StageContext(
                    spec=self._spec,
                    inputs={input_name: result.path for input_name, result in self._inputs.items()},
                    records=self._records,
                    out=folder,
                    scratch=self._store.scratch(self._key),
                    log=log,
                    log_path=log_path,
                    progress=_Progress(name, self._emit),
                )
                self._stage.run(context)
                self._stage.check(folder)
                hit = self._store.publish(
                    folder,
                    self._document,
                    job=self._spec.name,
                    inputs=self._records,
                    facts=context.facts,
                    versions=_versions(),
                    seconds=time.monotonic() - self._started,
                    log=log_path,
                )
                self._store.discard(self._store.scratch(self._key))
                log.info("done: artefact %s, %d bytes", hit.record.artefact, hit.record.size_bytes)
        return hit

    @contextmanager
    def _failures(self, folder: Path, log: logging.Logger, log_path: Path) -> Iterator[None]:
        """Log and report whatever ends the stage early, and give it the type it deserves."""
        try:
            yield
        except BaseException as error:
            raised: BaseException = error
            if is_disk_full(error) and not isinstance(error, StoreError):
                cause = error if isinstance(error, OSError) else OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                raised = store_error(cause, folder)
            expected = isinstance(raised, PipelineError)
            interrupted = isinstance(raised, KeyboardInterrupt)
            message = "interrupted" if interrupted else str(raised) or type(raised).__name__
            kept = None
            with contextlib.suppress(OSError):  # a full disk may have room for neither
                log.error("failed: %s", message, exc_info=None if expected or interrupted else raised)
                kept = self._store.keep_failed(folder, log_path.with_suffix(".output")) if expected else None
            seconds = time.monotonic() - self._started
            self._emit(StageFailed(self._stage.name, redact(message), seconds, log_path, kept))
            if raised is error:
                raise
            raise raised from error


class _Progress:
    """Pass a stage's progress on, but not too often."""

    def __init__(self, stage: str, emit: Emit) -> None:
        self._stage, self._emit, self._next = stage, emit, 0.0

    def __call__(self, done: float, total: float | None, unit: str) -> None:
        now = time.monotonic()
        if now >= self._next or done == total:
            self._next = now + _PROGRESS_INTERVAL_S
            self._emit(StageProgress(self._stage, done, total, unit))


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    versions = {"python": platform.python_version(), "machine": platform.machine()}
    with contextlib.suppress(PackageNotFoundError):
        versions["trtllm-pipeline"] = version("trtllm-pipeline")
    return versions
