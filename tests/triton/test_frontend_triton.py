"""The frontend as a process in front of a real tritonserver, through the openai client."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from echo_repository import write_model

from pipeline.triton.install import ensure_tritonserver
from pipeline.triton.server import TritonServer, free_port

pytestmark = pytest.mark.triton
TOKENIZER = Path(__file__).parents[1] / "data" / "frontend" / "tokenizers" / "byte_level"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
RUN = "import sys; from pathlib import Path; from pipeline.frontend import FrontendSettings, serve; " \
      "sys.exit(serve(FrontendSettings.from_json(Path(sys.argv[1]))))"  # fmt: skip


class Frontend:
    """A frontend process."""

    def __init__(self, folder: Path, **values: Any) -> None:
        folder.mkdir()
        (folder / "template.jinja").write_text(TEMPLATE)
        self.port = free_port()
        settings = {"tokenizer": str(TOKENIZER), "served_model": "echo", "port": self.port, "max_seq_len": 4096}
        settings |= {"chat_template": "template.jinja", **values}
        (folder / "frontend.json").write_text(json.dumps(settings))
        self.log = folder / "log"
        self.url = f"http://127.0.0.1:{self.port}"
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-c", RUN, str(folder / "frontend.json")], stdout=out, stderr=out
            )

    def wait_ready(self) -> None:
        wait_for(lambda: self.get("/health/ready") == 200, 60, lambda: self.log.read_text())

    def get(self, path: str) -> int | None:
        try:
            return httpx.get(self.url + path, timeout=5).status_code
        except httpx.TransportError:
            return None

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=30)

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=30)


def wait_for(condition: Callable[[], bool], timeout_s: float, explain: Callable[[], str] = lambda: "") -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.02)


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("journal") / "journal"


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory, journal: Path) -> Iterator[TritonServer]:
    folder = tmp_path_factory.mktemp("triton")
    repository = folder / "models"
    write_model(repository, "tensorrt_llm", journal=str(journal), max_seq_len="4096")
    write_model(repository, "old", old_names=True, says_reason=False, journal=str(journal))
    write_model(repository, "slow", delay_ms="50", journal=str(journal))
    with TritonServer(repository, ensure_tritonserver(), log_path=folder / "triton.log") as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="module")
def frontend(triton: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    server = Frontend(tmp_path_factory.mktemp("frontend") / "f", triton=[triton.grpc_url])
    server.wait_ready()
    yield server
    assert server.stop() == 0


@pytest.fixture
def slow(triton: TritonServer, tmp_path: Path) -> Iterator[Frontend]:
    server = Frontend(tmp_path / "slow", triton=[triton.grpc_url], model="slow")
    server.wait_ready()
    yield server
    server.stop()


TEXT = "naïve 👨‍👩‍👧‍👦 日本語 e\u0301 text, "


def test_chat_echoes_whole_and_streamed(frontend: Frontend) -> None:
    client = frontend.client()
    messages: Any = [{"role": "user", "content": TEXT}]
    whole = client.chat.completions.create(model="echo", messages=messages, max_tokens=200)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None and whole.usage.completion_tokens == 200
    parts = []
    stream = client.chat.completions.create(
        model="echo", messages=messages, max_tokens=200, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        parts += [choice.delta.content or "" for choice in chunk.choices]
        usage = chunk.usage
    assert "".join(parts) == whole.choices[0].message.content
    assert usage == whole.usage
    assert "".join(parts).startswith(TEXT * 2)


def test_end_token_ends_and_stop_string_cuts(frontend: Frontend) -> None:
    client = frontend.client()
    ended = client.completions.create(model="echo", prompt="one two<|end|>three", max_tokens=100)
    assert (ended.choices[0].text, ended.choices[0].finish_reason) == ("one two", "stop")
    cut = client.completions.create(model="echo", prompt="one two three ", stop="three", max_tokens=100)
    assert (cut.choices[0].text, cut.choices[0].finish_reason) == ("one two ", "stop")


def test_old_input_names_work(triton: TritonServer, tmp_path: Path, journal: Path) -> None:
    server = Frontend(tmp_path / "old", triton=[triton.grpc_url], model="old")
    server.wait_ready()
    try:
        extra = {"min_tokens": 3}
        answer = server.client().completions.create(
            model="echo", prompt="one two ", seed=3, max_tokens=8, extra_body=extra
        )
        assert answer.choices[0].finish_reason == "length"
        sent = journal.read_text().splitlines()[-1]
        assert "'random_seed'" in sent and "'min_length'" in sent and "'seed'" not in sent
    finally:
        assert server.stop() == 0


def test_unsupported_field_is_refused(frontend: Frontend) -> None:
    with pytest.raises(openai.BadRequestError, match="min_p"):
        frontend.client().completions.create(model="echo", prompt="a", extra_body={"min_p": 0.1})


def test_chosen_logprobs_come_from_the_model(frontend: Frontend) -> None:
    answer = frontend.client().chat.completions.create(
        model="echo", messages=[{"role": "user", "content": "one two"}], max_tokens=4, logprobs=True
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert len(logprobs.content) == 4
    text = b"".join(bytes(entry.bytes or []) for entry in logprobs.content)
    assert text.decode() == answer.choices[0].message.content


def test_model_exception_is_500_without_its_words(frontend: Frontend) -> None:
    body = {"model": "echo", "prompt": [20] * 13, "max_tokens": 13}
    for stream in (False, True):
        response = httpx.post(f"{frontend.url}/v1/completions", json={**body, "stream": stream})
        assert response.status_code == 500
        assert "secret" not in response.text and "model.py" not in response.text
        assert response.json()["error"]["type"] == "server_error"


def test_unknown_model_is_404(frontend: Frontend) -> None:
    with pytest.raises(openai.NotFoundError):
        frontend.client().completions.create(model="nope", prompt="a")


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_cancels_in_triton(slow: Frontend, journal: Path, stream: bool) -> None:
    body = {"model": "echo", "prompt": [20, 21], "max_tokens": 500, "stream": stream}
    before = journal.read_text().count("cancelled")
    with httpx.Client() as session:
        if stream:
            with session.stream("POST", f"{slow.url}/v1/completions", json=body) as response:
                next(response.iter_bytes())
        else:
            with pytest.raises(httpx.ReadTimeout):
                session.post(f"{slow.url}/v1/completions", json=body, timeout=0.5)
    left = time.monotonic()
    wait_for(lambda: journal.read_text().count("cancelled") > before, 2, lambda: journal.read_text()[-400:])
    assert time.monotonic() - left < 1
    metrics = httpx.get(f"{slow.url}/metrics").text
    assert 'frontend_in_flight_sequences{model="echo"} 0.0' in metrics


def test_sigterm_lets_open_streams_finish(slow: Frontend) -> None:
    found: list[str] = []

    def read() -> None:
        stream = slow.client().completions.create(model="echo", prompt="one two ", max_tokens=20, stream=True)
        found.extend(chunk.choices[0].text for chunk in stream)
        found.append("ended")

    reader = threading.Thread(target=read)
    reader.start()
    wait_for(lambda: len(found) >= 2, 10)
    slow.process.send_signal(signal.SIGTERM)
    wait_for(lambda: slow.get("/health/ready") != 200, 5)
    reader.join(20)
    assert found[-1] == "ended" and "".join(found[:-1]).startswith("one two one two")
    assert slow.process.wait(timeout=20) == 0


def test_triton_killed_mid_stream_ends_with_an_error_event_and_recovers(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    write_model(repository, "tensorrt_llm", delay_ms="50")
    http_port, grpc_port = free_port(), free_port()

    def start() -> TritonServer:
        server = TritonServer(
            repository, ensure_tritonserver(), http_port=http_port, grpc_port=grpc_port, log_path=tmp_path / "log"
        )
        server.start()
        server.wait_ready()
        return server

    triton = start()
    frontend = Frontend(tmp_path / "f", triton=[f"127.0.0.1:{grpc_port}"])
    body = {"model": "echo", "prompt": "one two ", "max_tokens": 200, "stream": True}
    try:
        frontend.wait_ready()
        with httpx.stream("POST", f"{frontend.url}/v1/completions", json=body, timeout=30) as response:
            lines = response.iter_lines()
            next(lines)
            triton.stop(grace_s=0.1)
            rest = [line for line in lines if line]
        assert response.status_code == 200
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "model_unavailable"
        refused = httpx.post(f"{frontend.url}/v1/completions", json=body)
        assert refused.status_code == 503
        triton = start()
        wait_for(lambda: frontend.get("/health/ready") == 200, 20)
        answer = frontend.client().completions.create(model="echo", prompt="one two ", max_tokens=4)
        assert answer.choices[0].finish_reason == "length"
    finally:
        triton.stop()
        frontend.stop()


def test_port_in_use_is_one_line(frontend: Frontend, tmp_path: Path) -> None:
    settings = tmp_path / "frontend.json"
    settings.write_text(json.dumps({"tokenizer": str(TOKENIZER), "port": frontend.port}))
    code = (
        "import sys; from pathlib import Path; from pipeline.errors import PipelineError\n"
        "from pipeline.frontend import FrontendSettings, serve\n"
        "try:\n    serve(FrontendSettings.from_json(Path(sys.argv[1])))\n"
        "except PipelineError as error:\n    print(error.message); sys.exit(int(error.exit_code))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(settings)], capture_output=True, text=True, timeout=60, env=os.environ
    )
    assert done.returncode == 3
    assert f"127.0.0.1:{frontend.port}" in done.stdout and "Traceback" not in done.stderr
