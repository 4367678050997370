"""The transformers baseline made by another interpreter."""

from __future__ import annotations

import importlib.util
import json
import sys
from functools import partial

import pytest

from pipeline.errors import PreflightError, ToolError
from pipeline.gate.baseline import save_baseline
from pipeline.gate.oracle import main, transformers_baseline
from pipeline.gate.protocol import QUICK
from pipeline.runners.process import run

without_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is not None, reason="shows what happens where torch is missing"
)


def run_program(argv, env, on_line):
    return run(argv, env=env, on_line=on_line)


@pytest.fixture
def make(tmp_path):
    (tmp_path / "model").mkdir()
    return partial(transformers_baseline, tmp_path / "model", tmp_path / "out", source_digest="5" * 64, protocol=QUICK)


@without_torch
def test_transformers_baseline_says_what_to_install_when_this_interpreter_has_no_torch(make):
    with pytest.raises(PreflightError, match="torch") as caught:
        make()
    assert "oracle" in caught.value.hint


def test_transformers_baseline_reports_why_the_other_interpreter_failed(make):
    with pytest.raises(ToolError) as caught:
        make(interpreter=sys.executable, run_program=run_program)
    assert "tokenizer.json: missing" in "\n".join(caught.value.tail)


def test_transformers_baseline_reads_what_the_other_interpreter_wrote(make, baseline, tmp_path):
    seen, asked = [], []

    def pretend(argv, env, on_line):
        asked.append(json.loads((tmp_path / "out" / "request.json").read_text()))
        assert argv[0] == "python-with-torch" and env["HF_HUB_OFFLINE"] == "1"
        save_baseline(baseline, tmp_path / "out", "baseline")
        on_line("Loading weights")
        on_line("progress 10 2047 tokens")

    made = make(interpreter="python-with-torch", run_program=pretend, progress=lambda *event: seen.append(event))
    assert made.perplexity == pytest.approx(baseline.perplexity)
    assert seen == [(10.0, 2047.0, "tokens")]
    assert asked[0]["protocol"]["tokens"] == 2048
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["baseline.json", "baseline.safetensors"]


def test_main_ends_with_the_error_and_its_exit_code(tmp_path, capsys):
    request = {"model": str(tmp_path), "out": str(tmp_path), "source_digest": "", "protocol": QUICK.to_json()}
    path = tmp_path / "request.json"
    path.write_text(json.dumps({**request, "tasks": [], "text": None}))
    assert main([str(path)]) == 3
    assert "tokenizer.json: missing" in capsys.readouterr().err
