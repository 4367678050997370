"""Clients as people use them, each in an environment of its own, against a served model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from shutil import copyfile, copytree
from typing import Any

import pytest
from conftest import ROOT, Served, program, run
from tokenizers import Tokenizer

from pipeline.engines.reference import ReferenceEngine
from pipeline.gate.scoring import score_continuation
from pipeline.gate.tasks import load_task, task_path

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]
TASKS = Path(__file__).parent / "tasks"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "none"}
ITEMS = 8


@pytest.fixture
def tokenizer(served: Served, tmp_path: Path) -> Path:
    """The emitted tokenizer, with the class that transformers wants to be told."""
    folder = copytree(served.folder / "tokenizer", tmp_path / "tokenizer")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def samples(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.rglob("samples_*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_text_contract_holds(served: Served) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", "frontend-check", served.url, "--json"], cwd=ROOT, capture_output=True
    )
    checks = json.loads(done.stdout)["checks"]
    assert [check for check in checks if check["verdict"] != "passed"] == []
    assert done.returncode == 0 and len(checks) == 28


def test_openai_for_javascript(served: Served, tmp_path: Path) -> None:
    folder = Path(program("node/node_modules/openai")).parents[1]
    copyfile(Path(__file__).with_name("openai_client.mjs"), folder / "openai_client.mjs")
    seen = json.loads(run([program("node"), "openai_client.mjs"], folder, BASE_URL=served.url + "/v1"))
    assert seen["model"] == "tiny"
    assert seen["streamed"] == seen["whole"] and seen["streamedUsage"] == seen["usage"]
    assert seen["entries"] == seen["usage"]["completion_tokens"]
    assert [text[:3] for text in seen["texts"]] == ["one", "one", "two", "two"] and seen["firstScore"] is None
    assert isinstance(json.loads(seen["place"])["big"], bool)
    assert [error[:2] for error in seen["errors"]] == [
        ["NotFoundError", 404],
        ["BadRequestError", 400],
        ["BadRequestError", 400],
    ]


@pytest.mark.parametrize("tokenized", [True, False])
def test_lm_eval_scores_what_the_gate_scores(served: Served, tokenizer: Path, tmp_path: Path, tokenized: bool) -> None:
    lines = task_path("hellaswag").read_text("utf-8").splitlines(keepends=True)
    (tmp_path / "hellaswag.jsonl").write_text("".join(lines[:ITEMS]), "utf-8")
    arguments = (
        f"model={served.model},base_url={served.url}/v1/completions,tokenizer_backend=huggingface,"
        f"tokenizer={tokenizer},tokenized_requests={tokenized},num_concurrent=4,max_retries=1"
    )
    argv = [program("lm-eval/bin/lm_eval"), "--model", "local-completions", "--model_args", arguments]
    argv += ["--tasks", "hellaswag_local", "--include_path", str(TASKS), "--log_samples", "--output_path", "out"]
    run(argv, tmp_path, HF_HOME=str(tmp_path / "hf"), **OFFLINE)

    encode = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).encode
    task = load_task(tmp_path / "hellaswag.jsonl", lambda text: encode(text, add_special_tokens=False).ids)
    engine = ReferenceEngine.load(
        served.folder / "model_repository" / "tensorrt_llm" / "1", max_batch_size=1, threads=1
    )
    found = samples(tmp_path / "out")
    assert len(found) == len(task.items) == ITEMS
    for item, sample in zip(task.items, sorted(found, key=lambda sample: sample["doc_id"]), strict=True):
        theirs = [float(answer[0][0]) for answer in sample["resps"]]
        ours = [score_continuation(engine, item.context_ids, choice)[0] for choice in item.choice_ids]
        assert theirs == pytest.approx(ours, abs=1e-3)


def test_lm_eval_chats(served: Served, tmp_path: Path) -> None:
    questions = [{"question": f"Say the number {number}", "answer": str(number)} for number in range(3)]
    (tmp_path / "chat.jsonl").write_text("\n".join(json.dumps(question) for question in questions))
    arguments = f"model={served.model},base_url={served.url}/v1/chat/completions,num_concurrent=2,max_retries=1"
    argv = [program("lm-eval/bin/lm_eval"), "--model", "local-chat-completions", "--apply_chat_template"]
    argv += ["--model_args", arguments, "--tasks", "chat_local", "--include_path", str(TASKS)]
    run([*argv, "--log_samples", "--output_path", "out"], tmp_path, HF_HOME=str(tmp_path / "hf"), **OFFLINE)
    answers = [sample["resps"][0][0] for sample in samples(tmp_path / "out")]
    assert len(answers) == 3 and all(answers) and not any("\n\n" in answer for answer in answers)


def test_aiperf_measures(served: Served, tokenizer: Path, tmp_path: Path) -> None:
    argv = [program("aiperf/bin/aiperf"), "profile", "--model", served.model, "--url", served.url, "--endpoint-type"]
    argv += ["chat", "--streaming", "--tokenizer", str(tokenizer), "--request-count", "20", "--concurrency", "2"]
    argv += ["--synthetic-input-tokens-mean", "50", "--output-tokens-mean", "10", "--random-seed", "1"]
    argv += ["--use-server-token-count", "--no-gpu-telemetry", "--no-server-metrics", "--workers-max", "1"]
    argv += ["--record-processor-service-count", "1", "--ui", "none", "--output-artifact-dir", "out"]
    run([*argv, "--extra-inputs", "ignore_eos:true"], tmp_path)
    result = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text())
    assert result["request_count"]["avg"] == 20
    assert result["output_sequence_length"]["avg"] == 10
    assert 0 < result["time_to_first_token"]["avg"] < result["request_latency"]["avg"]


def test_schemathesis_finds_nothing(served: Served, tmp_path: Path) -> None:
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    argv = [program("schemathesis/bin/schemathesis"), "run", served.url + "/openapi.json", "--max-examples", "25"]
    argv += ["--seed", "1", "--request-timeout", "30", "--checks", checks]
    # 501 is what embeddings are meant to answer, and no failure.
    run([*argv, "--exclude-path", "/v1/embeddings"], tmp_path)


def test_the_status_page_shows_in_a_browser(served: Served, tmp_path: Path) -> None:
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    flags += " --disable-component-update --disable-sync --hide-scrollbars --window-size=900,700"
    argv = [program("chromium"), *flags.split(), f"--user-data-dir={tmp_path / 'profile'}"]
    shown = run([*argv, "--dump-dom", served.url + "/"], tmp_path, timeout_s=120)
    for text in ("<h1>tiny</h1>", "reference", "Sequences in flight", "ready"):
        assert text in shown
    run([*argv, f"--screenshot={tmp_path / 'page.png'}", served.url + "/"], tmp_path, timeout_s=120)
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")
