"""``serve``: a real tritonserver and the OpenAI frontend, seen by the openai client."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from command_line import pipeline, tiny_job
from conftest import Served, serving

pytestmark = pytest.mark.triton

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "smollm2_generation.json").read_text())


@pytest.fixture(scope="module")
def served(default_job: Path) -> Iterator[Served]:
    """The default model, served."""
    with serving(default_job, default_job / "serve", "target=reference") as running:
        yield running


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as made:
        yield made


def _question(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_default_model_knows_the_capital_of_france(client: openai.OpenAI) -> None:
    """Expected text: transformers' greedy answer, tests/data/smollm2_generation.json."""
    answer = client.chat.completions.create(
        model="smollm2", messages=_question("What is the capital of France?"), temperature=0
    )

    choice = answer.choices[0]
    assert choice.message.content == "The capital of France is Paris."
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(GOLDEN["cases"][0]["prompt_ids"])
    # The end token is not text and not counted; the golden list holds it.
    assert answer.usage.completion_tokens == len(GOLDEN["cases"][0]["greedy_ids"]) - 1


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["text"][:20])
def test_greedy_text_is_what_transformers_says(case: dict[str, object], client: openai.OpenAI) -> None:
    text = str(case["text"])
    if case["kind"] == "chat":
        answer = (
            client.chat.completions.create(model="smollm2", messages=_question(text), temperature=0, max_tokens=40)
            .choices[0]
            .message.content
        )
    else:
        answer = client.completions.create(model="smollm2", prompt=text, temperature=0, max_tokens=40).choices[0].text

    assert answer == case["greedy_text"]


def test_streamed_text_is_the_unstreamed_text(client: openai.OpenAI) -> None:
    asked = {"model": "smollm2", "messages": _question("List three colours."), "temperature": 0, "max_tokens": 30}
    whole = client.chat.completions.create(**asked)  # type: ignore[call-overload]
    stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})  # type: ignore[call-overload]

    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert text == whole.choices[0].message.content
    assert reasons[-1] == whole.choices[0].finish_reason == "length"
    assert set(reasons[:-1]) == {None}
    assert chunks[-1].usage == whole.usage


def test_prompt_logprobs_agree_with_transformers(client: openai.OpenAI) -> None:
    """Source: prompt_logprobs_from_second_token, float32 transformers on the bf16 weights; 1e-3 covers bf16 rounding
    differences of the norms. Largest difference measured: 2e-5."""
    case = GOLDEN["cases"][0]
    answer = client.completions.create(model="smollm2", prompt=case["prompt_ids"], max_tokens=0, echo=True, logprobs=1)

    found = answer.choices[0].logprobs
    assert found is not None and found.token_logprobs is not None
    assert found.token_logprobs[0] is None
    for mine, theirs in zip(found.token_logprobs[1:], case["prompt_logprobs_from_second_token"], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-3)


def test_models_say_that_this_is_a_rehearsal(client: openai.OpenAI, served: Served) -> None:
    assert [model.id for model in client.models.list()] == ["smollm2"]
    with urllib.request.urlopen(f"{served.url}/v1/models/smollm2") as answer:
        assert json.load(answer)["target"] == "reference"


def test_health_endpoints_answer(served: Served) -> None:
    for path in ("/health/live", "/health/ready"):
        with urllib.request.urlopen(served.url + path) as answer:
            assert answer.status == 200


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_signal_ends_both_servers_cleanly(number: signal.Signals, tiny: Path, tmp_path: Path) -> None:
    with serving(tiny, tmp_path / "serve", *tiny_job()) as running:
        started = _descendants(running.process.pid)
        code = running.stop(number)

    assert code == 0, running.stderr
    assert "Traceback" not in running.stderr
    assert [pid for pid in started if _is_alive(pid)] == []


def test_dead_triton_ends_serve_with_the_reason(tiny: Path, tmp_path: Path) -> None:
    with serving(tiny, tmp_path / "serve", *tiny_job()) as running:
        (triton,) = _descendants(running.process.pid, "tritonserver")
        os.kill(triton, signal.SIGKILL)
        code = running.process.wait(timeout=60)

    assert code == 5, running.stderr
    assert "tritonserver ended with" in running.stderr
    assert "Traceback" not in running.stderr


def test_moved_result_serves_as_before(tiny: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere (1)"
    shutil.copytree(tiny / "dist" / "tiny", moved)

    with serving(tmp_path, tmp_path / "serve", *tiny_job(f"output_dir={moved}")) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none")
        answer = client.completions.create(model="tiny-llama", prompt="Sir Walter Elliot", max_tokens=5)
        client.close()

    assert answer.usage is not None and answer.usage.completion_tokens == 5


def test_serve_refuses_files_that_are_not_the_judged_ones(tiny: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny / "dist" / "tiny", copy)
    config = copy / "model_repository" / "tensorrt_llm" / "config.pbtxt"
    config.write_text(config.read_text() + "\n")

    ended = pipeline("serve", *tiny_job(f"output_dir={copy}"), cwd=tmp_path)

    assert ended.code == 3
    assert "model_repository/tensorrt_llm/config.pbtxt was changed" in ended.stderr


def test_serve_names_the_port_that_is_in_use(tiny: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        ended = pipeline("serve", *tiny_job(f"frontend.port={port}"), cwd=tiny)

    assert ended.code == 3
    assert f"frontend.port={port} is in use" in ended.stderr
    assert "frontend.port=PORT" in ended.stderr


def test_serve_says_what_to_do_when_nothing_was_made(tmp_path: Path) -> None:
    ended = pipeline("serve", *tiny_job(), cwd=tmp_path)

    assert ended.code == 3
    assert "there is nothing to serve" in ended.stderr


def _descendants(pid: int, name: str = "") -> list[int]:
    """Return the processes below a process, by name."""
    listing = subprocess.run(["ps", "-eo", "pid=,ppid=,comm="], capture_output=True, text=True, check=True).stdout
    rows = [(int(a), int(b), c) for a, b, c in (line.split(None, 2) for line in listing.splitlines())]
    found, frontier = [], {pid}
    while frontier:
        frontier = {child for child, parent, _ in rows if parent in frontier}
        found += [child for child, _, command in rows if child in frontier and command.startswith(name)]
    return found


def _is_alive(pid: int) -> bool:
    """A zombie is dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
