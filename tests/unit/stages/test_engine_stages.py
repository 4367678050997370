"""What the engine stages do around a tool: data for it, looks at its output, its failures as advice."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.compose import compose
from pipeline.config.engine_parts import Calibration
from pipeline.config.spec import Spec
from pipeline.errors import SourceError, ToolError
from pipeline.runners.job import ContainerJob, Image
from pipeline.runners.probe import Probed
from pipeline.runners.process import Completed, ProcessFailed
from pipeline.stages import all_stages
from pipeline.stages.base import StageContext, Unresolved
from pipeline.stages.engine import containers
from pipeline.stages.engine.calibration import prepare_calibration
from pipeline.stages.engine.host_inputs import content_digest
from pipeline.stages.engine.outputs import check_checkpoint, check_engine, error_lines
from pipeline.stages.engine.preflight import machine_findings

Work = Callable[[ContainerJob, Callable[[str], None]], None]


def engine_folder(path: Path, ranks: int = 2, version: str = "1.2.1") -> Path:
    path.mkdir(parents=True, exist_ok=True)
    config = {"version": version, "pretrained_config": {"mapping": {"world_size": ranks}}}
    (path / "config.json").write_text(json.dumps(config))
    for rank in range(ranks):
        (path / f"rank{rank}.engine").write_bytes(b"engine")
    return path


def test_complete_engine_is_accepted(tmp_path: Path) -> None:
    assert check_engine(engine_folder(tmp_path), ranks=2, release="1.2.1")["version"] == "1.2.1"
    assert check_engine(engine_folder(tmp_path, version="1.2.1+local"), ranks=2, release="1.2.1")


def _empty(path: Path) -> None:
    (path / "rank1.engine").write_bytes(b"")


def _missing(path: Path) -> None:
    (path / "rank1.engine").unlink()


def _extra(path: Path) -> None:
    (path / "rank2.engine").write_bytes(b"engine")


def _no_config(path: Path) -> None:
    (path / "config.json").unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_empty, "rank1.engine is empty"),
        (_missing, "rank1.engine is missing"),
        (_extra, "rank2.engine is of a rank that should not exist"),
        (_no_config, "config.json is missing"),
        (lambda path: engine_folder(path, version="1.1.0"), "1.1.0 built it, expected 1.2.1"),
        (lambda path: engine_folder(path, ranks=1), "is for 1 rank(s), expected 2"),
    ],
)
def test_incomplete_engine_is_a_failure_of_the_tool(tmp_path: Path, damage: Callable[[Path], Any], words: str) -> None:
    damage(engine_folder(tmp_path))
    with pytest.raises(ToolError) as caught:
        check_engine(tmp_path, ranks=2, release="1.2.1")
    assert words in caught.value.message


def test_truncated_checkpoint_is_a_failure_of_the_tool(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1}}))
    (tmp_path / "rank0.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    with pytest.raises(ToolError, match=r"rank0\.safetensors"):
        check_checkpoint(tmp_path, tp=1, pp=1, cp=1)
    with pytest.raises(ToolError, match="tp_size=1, expected 2"):
        check_checkpoint(tmp_path, tp=2, pp=1, cp=1)


@pytest.mark.parametrize(
    ("line", "is_error"),
    [
        ("[10/12/2025-10:00:00] [TRT] [E] IBuilder::buildSerializedNetwork: Error Code 4", True),
        ("[TensorRT-LLM][ERROR] Assertion failed", True),
        ("RuntimeError: Engine building failed, please check error log.", True),
        ("[TRT] [E] Requested amount of GPU memory (1024 bytes) could not be allocated; skipping tactic", False),
        ("[TRT-LLM] [I] Error tolerance is 0.1", False),
        ("[TRT] [W] Unable to determine GPU memory usage", False),
    ],
)
def test_error_marks_are_told_from_other_lines(line: str, is_error: bool) -> None:
    assert bool(error_lines([line])) == is_error


@pytest.mark.parametrize(("samples", "seq_len", "texts"), [(8, 32, 8), (10000, 512, 52)])
def test_shipped_text_is_cut_into_samples(tmp_path: Path, samples: int, seq_len: int, texts: int) -> None:
    # 147 500 characters; a sample of 512 tokens is at least 2560 and ends with a paragraph.
    folder, count = prepare_calibration(Calibration("", "text", samples, seq_len, 1), tmp_path / "data")
    lines = (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()
    assert count == len(lines) and abs(len(lines) - texts) <= 4
    assert all(len(json.loads(line)["text"]) >= seq_len * 4 for line in lines[:-1])


def test_column_of_a_jsonl_becomes_text_and_blank_lines_go(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n\n{"body": " "}\n{"body": "two"}\n')
    calibration = Calibration(str(tmp_path / "a.jsonl"), "body", 8, 8, 1)
    folder, count = prepare_calibration(calibration, tmp_path / "data")
    assert count == 2
    assert (folder / "train.jsonl").read_text() == '{"text": "one"}\n{"text": "two"}\n'
    with pytest.raises(SourceError, match="it has: body"):
        prepare_calibration(Calibration(str(tmp_path / "a.jsonl"), "text", 8, 8, 1), tmp_path / "other")


def test_folder_of_the_user_is_passed_on(tmp_path: Path) -> None:
    assert prepare_calibration(Calibration(str(tmp_path), "text", 8, 8, 1), tmp_path / "data") == (tmp_path, None)


def test_digest_is_of_the_content_not_of_the_place(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text("same")
    assert content_digest(tmp_path / "a", resolve=False) == content_digest(tmp_path / "b", resolve=False)
    with pytest.raises(SourceError, match="missing or empty"):
        content_digest(tmp_path / "c", resolve=True)


class FakeRunner:
    """A runner whose tool is a function."""

    name = "docker"

    def __init__(self, work: Work) -> None:
        self._work = work
        self.jobs: list[ContainerJob] = []

    def resolve(self, reference: str, **_: Any) -> Image:
        return Image(reference, digests=("sha256:" + "d" * 64,))

    def run(self, job: ContainerJob, *, on_line: Callable[[str], None], log_path: Path, **_: Any) -> Completed:
        self.jobs.append(job)
        self._work(job, on_line)
        return Completed(0, (), 0.0)


def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: Work, spec: Spec | None = None) -> StageContext:
    """Run the build stage with a fake runner."""
    spec = spec or compose(["model=llama2", "hardware=h100_80g", "parallel=tp2", "runner=docker"])
    runner = FakeRunner(work)
    monkeypatch.setattr(containers, "runner_of", lambda *_: runner)
    monkeypatch.setattr("pipeline.runners.probe.probe", lambda *_, **__: Probed("3.12", 1, {}, {}, {}, ()))
    (tmp_path / "convert" / "checkpoint").mkdir(parents=True)
    out = tmp_path / "out"
    out.mkdir()
    context = StageContext(
        spec=spec,
        inputs={"convert": tmp_path / "convert"},
        records={},
        out=out,
        scratch=tmp_path / "scratch",
        log=logging.getLogger("test"),
        log_path=tmp_path / "build.log",
        progress=lambda done, total, unit: None,
    )
    stage = all_stages(spec, resolve=True)[2]
    stage.run(context)
    stage.check(out)
    return context


def out_of(job: ContainerJob) -> Path:
    return next(bind.host for bind in job.binds if bind.writable)


def test_build_records_what_ran_where_and_keeps_the_timing_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(job: ContainerJob, see: Callable[[str], None]) -> None:
        job.scratch.mkdir(parents=True)
        (engine_folder(out_of(job)) / "model.cache").write_bytes(b"cache")

    context = build(tmp_path, monkeypatch, work)
    assert sorted(path.name for path in context.out.iterdir()) == ["engine", "timing_cache"]
    assert (context.out / "timing_cache" / "model.cache").is_file()
    tool = context.facts["tool"]
    assert tool["argv"][0] == "trtllm-build" and tool["image"]["digest"] == "sha256:" + "d" * 64
    assert str(tmp_path) not in json.dumps(context.facts)


def test_known_failure_becomes_cause_key_and_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(job: ContainerJob, see: Callable[[str], None]) -> None:
        see("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
        for number in range(100):
            see(f"later line {number}")
        raise ProcessFailed("trtllm-build ended with 1 (log: x)", program="trtllm-build", returncode=1, tail=("x",))

    with pytest.raises(ToolError) as caught:
        build(tmp_path, monkeypatch, work)
    assert caught.value.exit_code == 5
    (finding,) = caught.value.findings
    assert finding.rule.startswith("tool-") and finding.path and finding.hint
    assert "trtllm-build ended with 1 (log: x)" in caught.value.message
    assert not (tmp_path / "out" / ".scratch").exists()


def test_reported_error_with_exit_code_0_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(job: ContainerJob, see: Callable[[str], None]) -> None:
        engine_folder(out_of(job))
        see("[TRT] [E] Error Code 10: could not find any supported formats")

    with pytest.raises(ToolError, match="exit code 0 but reported errors"):
        build(tmp_path, monkeypatch, work)


def test_image_tag_is_looked_up_by_a_run_only(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = compose(["model=llama2", "hardware=h100_80g", "runner=docker"])
    with pytest.raises(Unresolved, match="image tag"):
        containers.BuildImage(spec, resolve=False).identity()
    monkeypatch.setattr(containers, "runner_of", lambda *_: FakeRunner(lambda job, see: None))
    assert containers.BuildImage(spec, resolve=True).identity() == {"digest": "sha256:" + "d" * 64}
    inside = compose(["model=llama2", "hardware=h100_80g", "runner=local"])
    assert containers.BuildImage(inside, resolve=False).identity() == {"reference": spec.toolchain.build_image}


def test_machine_without_gpu_or_engine_is_refused_before_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr("pipeline.config.machine.find_gpu", lambda: None)
    for runner in ("docker", "podman", "local"):
        spec = compose(["model=llama2", "hardware=h100_80g", f"runner={runner}"])
        found = [finding for finding in machine_findings(spec) if finding.severity == "error"]
        assert {finding.rule for finding in found} == {"runner-missing", "gpu-missing"}
        assert all(finding.hint for finding in found)
    rehearsal = compose(["model=llama2", "hardware=h100_80g", "runner=podman", "toolchain.standin=true"])
    assert {finding.rule for finding in machine_findings(rehearsal)} == {"runner-missing"}


def test_short_disk_and_host_memory_are_said_with_both_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["model=llama3_405b", "precision=fp8", "hardware=h100_80g", "parallel=tp8", "runner=docker"]
    spec = compose([*arguments, f"store.root={tmp_path}/not/yet"])
    usage = type("Usage", (), {"free": 100 * 10**9})()
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage)
    found = {finding.rule: finding for finding in machine_findings(spec)}
    # 405.9e9 weights: 812 GB at 16 bits, 440 GB each as FP8 checkpoint (tables at 16 bits, once per rank) and engines.
    assert "100 GB free" in found["disk-short"].message and "source 812" in found["disk-short"].message
    assert found["host-memory"].hint == "build.workers=1"
