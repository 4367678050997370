from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli import verbs
from pipeline.cli.main import main
from pipeline.cli.verbs import VERBS, Request
from pipeline.errors import ExitCode, Finding, GateFailed, PipelineError, PreflightError, StoreError

Answer = Callable[[Request], int]


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer], list[Request]]:
    """Replace the code behind ``plan``; returns the requests it gets."""
    import pipeline.cli.plan

    def replace(answer: Answer) -> list[Request]:
        seen: list[Request] = []

        def stand_in(request: Request) -> int:
            seen.append(request)
            return answer(request)

        monkeypatch.setattr(pipeline.cli.plan, "main", stand_in)
        return seen

    return replace


def raising(error: BaseException) -> Answer:
    def answer(request: Request) -> int:
        raise error

    return answer


def test_first_bare_word_is_the_verb_and_the_rest_are_overrides(answering: Any) -> None:
    seen = answering(lambda request: 0)
    assert main(["--json", "plan", "--config-dir", "/x", "model=llama2", "limits.max_batch_size=2"]) == 0
    (request,) = seen
    assert request.arguments == ("model=llama2", "limits.max_batch_size=2")
    assert request.config_dir == Path("/x")
    assert request.output.mode == "json"


@pytest.mark.parametrize("arguments", [[], ["model=llama2"], ["+model=llama2"], ["~gate"], ["--json"]])
def test_no_verb_means_run(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    import pipeline.cli.run

    seen: list[Request] = []

    def stand_in(request: Request) -> int:
        seen.append(request)
        return 0

    monkeypatch.setattr(pipeline.cli.run, "main", stand_in)
    assert main(arguments) == 0
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plna"], "did you mean plan?"),
        (["deploi"], "verbs are run"),
        (["plan", "--jsno"], "did you mean --json?"),
        (["plan", "--model", "llama2"], "no flag --model"),
        (["plan", "-m", "precision=fp16,bf16"], "-m goes with run"),
        (["plan", "model", "llama2"], "choose an option: model=NAME"),
        (["--config-dir"], "needs a folder"),
        (["plan", "--config-dir", "nowhere"], "is not a folder"),
        (["checkpoint", "convrt"], "checkpoint --help"),
        (["store"], "store --help"),
    ],
)
def test_wrong_use_exits_2_with_advice(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""
    assert "Traceback" not in captured.err


@pytest.mark.parametrize("arguments", [["plan", "modle=x"], ["plna"], ["checkpoint", "convrt"], ["plan", "--jsno"]])
def test_json_is_one_document_also_on_failure(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert main(["--json", *arguments]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["schema_version"] == 1
    assert document["findings"][0]["severity"] == "error"
    assert document["error"]["message"]


def test_every_mistake_gets_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "modle=x", "parallel.tp=two"]) == 2
    error = capsys.readouterr().err
    assert "2 mistakes" in error and "modle" in error and "'two' is not a whole number" in error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PreflightError("x", findings=[Finding("r", "error", "p", "m")]), 3),
        (GateFailed("x"), 4),
        (StoreError("x"), 6),
        (KeyboardInterrupt(), 130),
        (ValueError("a bug"), 1),
    ],
    ids=["finding", "gate", "store", "ctrl-c", "bug"],
)
def test_endings_have_exit_codes(answering: Any, error: BaseException, code: int) -> None:
    answering(raising(error))
    assert main(["plan"]) == code


def test_sigterm_exits_143(answering: Any) -> None:
    def terminated(request: Request) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
        return 0

    answering(terminated)
    before = signal.getsignal(signal.SIGTERM)
    assert main(["plan"]) == 143
    assert signal.getsignal(signal.SIGTERM) is before


def test_bug_is_one_line_with_a_log_file(
    answering: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    answering(raising(ValueError("a bug\nwith two lines")))
    assert main(["plan"]) == ExitCode.INTERNAL
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    (log,) = tmp_path.glob("pipeline-error-*.log")
    assert str(log) in error
    assert "Traceback" in log.read_text(encoding="utf-8")
    assert main(["plan", "--debug"]) == ExitCode.INTERNAL
    assert "Traceback" in capsys.readouterr().err


def test_bug_in_json_mode_is_a_document(answering: Any, capsys: pytest.CaptureFixture[str]) -> None:
    answering(raising(ValueError("a bug")))
    assert main(["plan", "--json"]) == 1
    assert "a bug" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_quiet_leaves_errors(answering: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def talk(request: Request) -> int:
        request.output.line("result")
        request.output.note("note")
        request.output.findings([Finding("a", "warning", "p", "a warning"), Finding("b", "error", "p", "an error")])
        return 0

    answering(talk)
    assert main(["plan", "--quiet"]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "an error" in captured.err
    assert "note" not in captured.err and "warning" not in captured.err


@pytest.mark.parametrize("mode", [[], ["--json"], ["--quiet"], ["--debug"]])
@pytest.mark.parametrize("key", ["source.token", "hf_token", "+source.token", "frontend.api_key", "name"])
def test_token_is_never_shown(
    answering: Any, capsys: pytest.CaptureFixture[str], mode: list[str], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "")

    def leak(request: Request) -> int:
        request.output.line(f"arguments {request.arguments}")
        request.output.note(f"arguments {request.arguments}")
        raise PipelineError(f"arguments {request.arguments}")

    answering(leak)
    main(["plan", *mode, f"{key}=hf_TESTSECRET123"])
    captured = capsys.readouterr()
    assert "TESTSECRET" not in captured.out + captured.err


@pytest.mark.parametrize("verb", [verb.name for verb in VERBS])
def test_help_of_a_verb_shows_examples(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    assert main([verb, "--help"]) == 0
    text = capsys.readouterr().out
    assert "examples:" in text and f"python -m pipeline {verb}" in text


def test_help_lists_the_verbs_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {verb.name} " in text for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_code_behind_a_verb_exists(verb: verbs.Verb) -> None:
    import importlib

    module, _, name = verb.location.partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_file_verb_reports_findings_as_exit_3(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--json", "checkpoint", "verify", str(tmp_path)]) == 3
    assert json.loads(capsys.readouterr().out)["findings"]


def test_store_verb_without_a_store_exits_6(tmp_path: Path) -> None:
    assert main(["store", "--root", str(tmp_path / "none"), "ls"]) == 6


def command_line(text: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a shell line in which ``$RUN`` is the program."""
    run = f"{sys.executable} -m pipeline"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "RUN": run, **variables}
    return subprocess.run(
        ["bash", "-c", text], cwd=cwd, env=environment, capture_output=True, text=True, errors="replace"
    )


@pytest.mark.parametrize(
    ("redirect", "code"),
    [
        ("plan >&-", 0),
        ("plan 2>&-", 0),
        ("plan --json >&- 2>&-", 0),
        ("plan 2>/dev/full", 0),
        ("plan >/dev/full", 1),
        ("plan --json >/dev/full", 1),
        ("plan --json nope=1 >/dev/full", 2),
        ("plan nope=1 2>/dev/full", 2),
        ("plan nope=1 2>&-", 2),
    ],
)
def test_streams_that_are_closed_or_full_never_give_a_traceback(tmp_path: Path, redirect: str, code: int) -> None:
    done = command_line(f"$RUN {redirect}", tmp_path)
    assert done.returncode == code
    assert "Traceback" not in done.stderr and "internal error" not in done.stderr
    if redirect == "plan >/dev/full":
        assert "cannot be written to stdout: No space left on device" in done.stderr


def test_reader_that_goes_away_is_no_failure_but_hides_none(tmp_path: Path) -> None:
    assert command_line("set -o pipefail; $RUN plan | head -1", tmp_path).returncode == 0
    assert command_line("set -o pipefail; $RUN plan --json nope=1 | true", tmp_path).returncode == 2
    assert command_line("set -o pipefail; $RUN plan nope=1 2>&1 | true", tmp_path).returncode == 2


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_letters_that_a_terminal_lacks_are_spelled_out(tmp_path: Path, encoding: str) -> None:
    done = command_line("$RUN plan 'model.path=/data/Ω' 'nöpe=1'", tmp_path, PYTHONIOENCODING=encoding)
    assert done.returncode == 2
    assert "there is no key or group 'n" in done.stderr
    done = command_line("$RUN plan output_dir=dist/Ω", tmp_path, PYTHONIOENCODING=encoding)
    assert done.returncode == 0
    assert "dist/\\u03a9" in done.stdout


def test_folder_that_is_gone_is_said(tmp_path: Path) -> None:
    done = command_line("mkdir x && cd x && rmdir ../x && $RUN plan", tmp_path)
    assert done.returncode == 2
    assert "the folder you are in no longer exists" in done.stderr
