from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import pipeline.stages
from pipeline.cli.main import main
from pipeline.errors import GateFailed, PreflightError
from pipeline.stages.base import StageContext


class ToyEmit:
    """A whole pipeline of one stage; fails as the precision says."""

    name = "emit"
    version = 1
    inputs: tuple[str, ...] = ()
    failures: Mapping[str, BaseException] = {}

    def identity(self, spec: Any) -> Mapping[str, Any]:
        return {"precision": spec.precision.name}

    def run(self, context: StageContext) -> None:
        if error := self.failures.get(context.spec.precision.name):
            raise error
        (context.out / "gate.json").write_text('{"verdict": "passed"}', encoding="utf-8")

    def check(self, path: Path) -> None:
        assert (path / "gate.json").is_file()


@pytest.fixture(autouse=True)
def _toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pipeline.stages, "all_stages", lambda spec, resolve: [ToyEmit()])


def failing(monkeypatch: pytest.MonkeyPatch, **failures: BaseException) -> None:
    monkeypatch.setattr(ToyEmit, "failures", failures)


def test_run_exports_and_says_what_where_verdict_and_next(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["target=reference"]) == 0
    assert (tmp_path / "dist" / "smollm2-bf16-reference" / "gate.json").is_file()
    out = capsys.readouterr().out
    assert "dist/smollm2-bf16-reference" in out
    assert "passed" in out and "CPU rehearsal" in out
    assert "-m pipeline serve target=reference" in out
    assert "curl http://127.0.0.1:8000/v1/chat/completions" in out


def test_second_run_is_all_hits(capsys: pytest.CaptureFixture[str]) -> None:
    main(["target=reference"])
    capsys.readouterr()
    assert main(["--json", "target=reference"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [stage["status"] for stage in document["stages"]] == ["hit"]
    assert document["verdict"] == "passed"


def test_printed_command_leaves_the_token_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "")
    assert main(["target=reference", "source.token=hf_TESTSECRET123"]) == 0
    captured = capsys.readouterr()
    assert "token" not in captured.out and "TESTSECRET" not in captured.out + captured.err
    assert not [file for file in Path.cwd().rglob("*") if file.is_file() and b"TESTSECRET" in file.read_bytes()]


def test_error_finding_stops_before_any_work(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["target=reference", "precision.quantize_lm_head=true"]) == 3
    assert list(tmp_path.iterdir()) == []
    assert "native-precision" in capsys.readouterr().err


def test_target_that_cannot_run_yet_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--json", "model=llama2", "hardware=h100_80g"]) == 3
    assert "gpu-missing" in {f["rule"] for f in json.loads(capsys.readouterr().out)["findings"]}
    assert list(tmp_path.iterdir()) == []


def test_failed_gate_exits_4_and_exports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, bf16=GateFailed("perplexity ratio 9.9"))
    assert main(["target=reference"]) == 4
    assert not (tmp_path / "dist").exists()


def test_sweep_lets_the_others_finish_and_returns_the_highest_code(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, bf16=GateFailed("too bad"), fp8=PreflightError("cannot work"))
    assert main(["run", "-m", "target=reference", "precision=bf16,fp8,fp16"]) == 4
    out = capsys.readouterr().out
    rows = [line.split()[:2] for line in out.splitlines() if line.strip()[:1].isdigit()]
    assert rows == [["4", "smollm2-bf16-reference"], ["3", "smollm2-fp8-reference"], ["0", "smollm2-fp16-reference"]]
    assert (tmp_path / "dist" / "smollm2-fp16-reference").is_dir()


@pytest.mark.parametrize(
    ("errors", "code", "runs"),
    [
        ({"bf16": ValueError("bug"), "fp16": GateFailed("x")}, 1, 2),
        ({"bf16": KeyboardInterrupt()}, 130, 1),
        ({"fp16": KeyboardInterrupt(), "bf16": ValueError("bug")}, 130, 2),
    ],
    ids=["bug-beats-gate", "interrupt-stops-the-rest", "interrupt-beats-bug"],
)
def test_sweep_code_is_130_else_1_else_the_highest(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    errors: dict[str, BaseException],
    code: int,
    runs: int,
) -> None:
    failing(monkeypatch, **errors)
    assert main(["run", "-m", "--json", "target=reference", "precision=bf16,fp16"]) == code
    document = json.loads(capsys.readouterr().out)
    assert document["exit_code"] == code
    assert len(document["runs"]) == runs


def test_sweep_that_would_overwrite_itself_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["run", "-m", "target=reference", "limits.max_batch_size=1,2"]) == 2
    assert "name=" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    names = "name=n-${limits.max_batch_size}"
    assert main(["run", "-m", "target=reference", "limits.max_batch_size=1,2", names]) == 0
    assert {folder.name for folder in (tmp_path / "dist").iterdir()} == {"n-1", "n-2"}


def test_run_and_plan_refuse_an_output_folder_before_any_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").touch()
    for verb in ("run", "plan"):
        assert main([verb, "--json", "target=reference", "output_dir=thesis"]) == 3
        (finding,) = [item for item in json.loads(capsys.readouterr().out)["findings"] if item["severity"] == "error"]
        assert (finding["rule"], finding["path"]) == ("place", "output_dir")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis"]


class ToyVerify(ToyEmit):
    name = "verify"

    def run(self, context: StageContext) -> None:
        super().run(context)
        context.facts["loaded"] = {"by": None, "reason": "libpython is missing"}


def test_run_says_each_time_that_no_server_was_tried(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline.stages, "all_stages", lambda spec, resolve: [ToyEmit(), ToyVerify()])
    for _ in range(2):
        assert main(["target=reference"]) == 0
        assert "not tried in a real server: libpython is missing" in capsys.readouterr().err
