from __future__ import annotations

import errno
import hashlib
import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from toy_graph import Toy, ToyStage

from pipeline.errors import ConfigError, ExitCode, GateFailed, SourceError, StoreError, ToolError
from pipeline.graph.events import Event, RunFinished, StageFailed, StageFinished, StageProgress, StageStarted
from pipeline.graph.interrupt import Terminated
from pipeline.graph.plan import plan
from pipeline.graph.run import RunResult, run
from pipeline.stages.base import StageContext
from pipeline.store.inspect import verify


def go(toy: Toy, events: list[Event] | None = None) -> RunResult:
    return run(toy.spec, toy.stages, toy.store, emit=events.append if events is not None else lambda event: None)


def test_run_builds_once_then_hits(toy: Toy) -> None:
    first = go(toy)
    assert toy.ran() == ["fetch", "convert", "emit"]
    assert (first.artefact("emit") / "out.txt").read_text() == "emitted model converted model"
    assert first.stages["emit"].record.facts == {"words": 3}
    second = go(toy)
    assert toy.ran() == []
    assert second.all_hits
    assert second.artefact("emit") == first.artefact("emit")
    assert [result.reason for result in second.stages.values()] == ["same inputs"] * 3


def test_run_of_hits_takes_milliseconds(toy: Toy) -> None:
    go(toy)
    started = time.perf_counter()
    go(toy)
    # 3 ms were measured on a quiet machine.
    assert time.perf_counter() - started < 0.1


def test_run_repeats_only_what_a_change_reaches(toy: Toy) -> None:
    go(toy)
    toy.ran()
    toy.convert.text = "other"
    result = go(toy)
    assert toy.ran() == ["convert", "emit"]
    assert result.stages["convert"].reason == "text: converted → other"
    assert result.stages["emit"].reason == "input convert changed"
    toy.convert.text = "converted"
    assert go(toy).all_hits


def test_run_stops_early_where_the_content_is_the_same_again(toy: Toy) -> None:
    first = go(toy)
    toy.ran()
    toy.fetch.version = 2
    result = go(toy)
    assert toy.ran() == ["fetch"]
    assert result.stages["convert"].reason == "inputs have the same content as before"
    assert result.artefact("emit") == first.artefact("emit")
    assert [entry.status for entry in plan(toy.spec, toy.stages, toy.store)] == ["hit"] * 3
    assert go(toy).all_hits


def test_run_does_not_stop_early_where_facts_differ_that_a_stage_may_report(toy: Toy) -> None:
    source = "the hub"

    def work(context: StageContext) -> None:
        context.facts["source"] = source

    toy.fetch.work = work

    def report(context: StageContext) -> None:
        assert set(context.records) == {"fetch", "convert"}
        (context.out / "source").write_text(context.records["fetch"].facts["source"])

    toy.emit.work = report
    go(toy)
    toy.ran()
    toy.fetch.version, source = 2, "a wheel"
    result = go(toy)
    assert toy.ran() == ["fetch", "convert", "emit"]
    assert (result.artefact("emit") / "source").read_text() == "a wheel"


def test_two_models_in_one_path_with_equal_size_and_time_are_two_models(toy: Toy, tmp_path: Path) -> None:
    source = tmp_path / "model.bin"

    class FileStage(ToyStage):
        def identity(self, spec: Any) -> dict[str, str]:
            return {"sha256": hashlib.sha256(source.read_bytes()).hexdigest()}

        def run(self, context: StageContext) -> None:
            self.runs.append(self.name)
            (context.out / "out.txt").write_bytes(source.read_bytes())

    toy.fetch = FileStage("fetch")
    outputs = []
    for text in ("model A", "model B"):
        source.write_text(text)
        os.utime(source, (1_000_000_000, 1_000_000_000))
        outputs.append((go(toy).artefact("emit") / "out.txt").read_text())
    assert outputs == ["emitted model A converted model A", "emitted model B converted model B"]
    assert toy.ran() == ["fetch", "fetch", "convert", "convert", "emit", "emit"]


def test_run_emits_what_happens(toy: Toy) -> None:
    def work(context: StageContext) -> None:
        for done in range(10_001):
            context.progress(done, 10_000, "tensors")

    toy.convert.work = work
    events: list[Event] = []
    go(toy, events)
    kinds = [type(event).__name__ for event in events if not isinstance(event, StageProgress)]
    assert kinds == ["StageStarted", "StageFinished"] * 3 + ["RunFinished"]
    progress = [event for event in events if isinstance(event, StageProgress)]
    # Ten a second, and the last one.
    assert 2 <= len(progress) < 100
    assert progress[-1] == StageProgress("convert", 10_000, 10_000, "tensors")
    started = next(event for event in events if isinstance(event, StageStarted))
    assert started.log_path.is_relative_to(toy.store.root / "logs" / "toy")
    assert "wrote model" in started.log_path.read_text()
    events.clear()
    go(toy, events)
    assert [type(event) for event in events] == [StageFinished] * 3 + [RunFinished]
    assert isinstance(events[-1], RunFinished) and (events[-1].ok, events[-1].hits, events[-1].built) == (True, 3, 0)


def test_failure_is_reported_and_never_cached(toy: Toy) -> None:
    def fail(context: StageContext) -> None:
        (context.out / "report.html").write_text("why")
        raise GateFailed("perplexity 99, expected at most 40")

    toy.convert.work = fail
    events: list[Event] = []
    for _ in range(2):
        with pytest.raises(GateFailed, match="perplexity 99"):
            go(toy, events)
    assert toy.ran() == ["fetch", "convert", "convert"]
    failed = next(event for event in events if isinstance(event, StageFailed))
    assert failed.stage == "convert" and failed.message.startswith("perplexity 99")
    assert "perplexity 99" in failed.log_path.read_text()
    assert failed.kept and (failed.kept / "report.html").read_text() == "why"
    assert isinstance(events[-1], RunFinished) and not events[-1].ok
    assert list((toy.store.root / "staging").iterdir()) == []
    toy.convert.work = None
    go(toy)
    assert toy.ran() == ["convert", "emit"]


def test_failed_check_publishes_nothing(toy: Toy) -> None:
    toy.convert.work = lambda context: (context.out / "out.txt").mkdir()
    with pytest.raises(IsADirectoryError):
        go(toy)
    assert [entry.status for entry in plan(toy.spec, toy.stages, toy.store)] == ["hit", "miss", "miss"]
    assert verify(toy.store) == []


def test_bug_in_a_stage_leaves_its_traceback_in_the_log(toy: Toy) -> None:
    def bug(context: StageContext) -> None:
        raise ZeroDivisionError("division by zero")

    toy.fetch.work = bug
    events: list[Event] = []
    with pytest.raises(ZeroDivisionError):
        go(toy, events)
    failed = next(event for event in events if isinstance(event, StageFailed))
    assert "Traceback" in failed.log_path.read_text()


@pytest.mark.parametrize("wrap", [None, RuntimeError, SourceError], ids=["plain", "by a library", "by a stage"])
def test_full_disk_in_a_stage_is_a_store_error(toy: Toy, wrap: type[Exception] | None) -> None:
    def fill(context: StageContext) -> None:
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(context.out / "weights"))
        except OSError as error:
            if wrap:
                # A native library keeps the text, not the cause.
                raise wrap(f"I/O error: {error}") from (error if wrap is SourceError else None)
            raise

    toy.convert.work = fill
    with pytest.raises(StoreError, match=r"No space left on device \(.*free\)") as caught:
        go(toy)
    assert caught.value.exit_code == ExitCode.STORE
    assert "store gc" in caught.value.hint


def test_full_disk_of_a_started_program_stays_its_failure(toy: Toy) -> None:
    def fail(context: StageContext) -> None:
        raise ToolError("trtllm-build ended with exit code 1\n  | /tmp/x: No space left on device")

    toy.convert.work = fail
    with pytest.raises(ToolError):
        go(toy)


@pytest.fixture
def file_size_limit() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("file_size_limit")
def test_file_size_limit_is_a_store_error_and_the_store_stays_valid(toy: Toy) -> None:
    toy.convert.work = lambda context: (context.out / "weights").write_bytes(bytes(2 << 20)) and None
    with pytest.raises(StoreError, match="File too large"):
        go(toy)
    assert verify(toy.store) == []
    assert [entry.status for entry in plan(toy.spec, toy.stages, toy.store)] == ["hit", "miss", "miss"]


def test_damaged_result_is_built_again(toy: Toy) -> None:
    path = go(toy).artefact("convert") / "out.txt"
    toy.ran()
    path.parent.chmod(0o755)
    path.unlink()
    result = go(toy)
    assert toy.ran() == ["convert"]
    assert result.stages["convert"].reason == "artefact damaged: out.txt is missing"
    assert go(toy).all_hits


def test_sigterm_ends_a_run_like_ctrl_c_and_leaves_the_handler_alone(toy: Toy) -> None:
    toy.convert.work = lambda context: os.kill(os.getpid(), signal.SIGTERM)
    events: list[Event] = []
    with pytest.raises(Terminated):
        go(toy, events)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    failed = next(event for event in events if isinstance(event, StageFailed))
    assert failed.message == "interrupted"
    assert list((toy.store.root / "staging").iterdir()) == []
    toy.convert.work = None
    go(toy)
    assert toy.ran() == ["fetch", "convert", "convert", "emit"]


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([ToyStage("a", ("b",)), ToyStage("b", ("a",))], "in a circle: a, b"),
        ([ToyStage("a", ("x",))], "stage a reads x, which is no stage of a"),
        ([ToyStage("a"), ToyStage("a")], "given twice: a"),
    ],
    ids=["circle", "unknown input", "equal names"],
)
def test_run_refuses_what_is_no_graph(toy: Toy, stages: list[ToyStage], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(toy.spec, stages, toy.store)
    assert not toy.store.root.exists()


def test_plan_says_what_a_run_would_do_and_touches_nothing(toy: Toy, tmp_path: Path) -> None:
    plans = plan(toy.spec, toy.stages, toy.store)
    assert [(p.name, p.status, p.reason) for p in plans] == [
        ("fetch", "miss", "never built"),
        ("convert", "miss", "never built"),
        ("emit", "miss", "never built"),
    ]
    assert list(tmp_path.iterdir()) == []
    result = go(toy)
    toy.convert.text = "other"
    before = sorted((str(path), path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    plans = plan(toy.spec, toy.stages, toy.store)
    assert [(p.name, p.status, p.reason) for p in plans] == [
        ("fetch", "hit", "same inputs"),
        ("convert", "miss", "text: converted → other"),
        ("emit", "miss", "input convert changed"),
    ]
    assert plans[0].key == result.stages["fetch"].key
    assert sorted((str(path), path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == before


def test_plan_says_unknown_behind_what_is_not_resolved(toy: Toy) -> None:
    toy.fetch.unresolved = "branch main was not looked up"
    plans = plan(toy.spec, toy.stages, toy.store)
    assert [(p.status, p.key, p.reason) for p in plans] == [
        ("unknown", "", "branch main was not looked up"),
        ("unknown", "", "depends on fetch"),
        ("unknown", "", "depends on fetch, convert"),
    ]
