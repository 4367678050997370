"""Whatever is sent, the answer has the right status and OpenAI's error shape, and nothing leaks."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from frontend_fakes import Bench, call, client, events, post
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.errors import ConfigError, SourceError
from pipeline.frontend.backend import BackendError, BackendOverloaded, BackendUnavailable, PromptRejected
from pipeline.frontend.settings import FrontendSettings

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"model": "tiny", "prompt": "Hi"}
MakeBench = Callable[..., Bench]

BAD_COMPLETIONS: list[tuple[dict[str, Any], str | None]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]] * 2, "n": 128, "best_of": 1}, "best_of"),
    ({"prompt": ["a", 5]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [2**31]}, "prompt"),
    ({"prompt": [100000]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"model": None}, "model"),
    ({"model": ""}, "model"),
    ({"model": ["tiny"]}, "model"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -5}, "top_k"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 2, "best_of": 1}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"stop": ["a"] * 5}, "stop"),
    ({"stop": ""}, "stop[0]"),
    ({"stop": [""]}, "stop[0]"),
    ({"stop": [5]}, "stop[0]"),
    ({"stop": "x" * 2000}, "stop"),
    ({"stop": ["x"] * 10000}, "stop"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": None, "repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"999999": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"suffix": "x"}, "suffix"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"seed": 1.5}, "seed"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"frobnicate": 1}, "frobnicate"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
]
BAD_CHATS: list[tuple[dict[str, Any], str | None]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [{}]}, "messages[0].role"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": 5}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"tools": "x"}, "tools"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"continue_final_message": True}, "messages"),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
]


def check_error(response: Any, status: int | None = None) -> dict[str, Any]:
    assert response.status_code == status or status is None
    assert set(response.json()) == {"error"}
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert "Traceback" not in response.text and "/pipeline/" not in response.text and ".py" not in response.text
    return error


@pytest.mark.parametrize(("change", "param"), BAD_COMPLETIONS)
def test_bad_completion_is_400_naming_the_field(bench: Bench, change: dict[str, Any], param: str | None) -> None:
    error = check_error(post(bench.app(), "/v1/completions", {**COMPLETION, **change}), 400)
    assert error["param"] == param and not bench.backend.requests


@pytest.mark.parametrize(("change", "param"), BAD_CHATS)
def test_bad_chat_is_400_naming_the_field(bench: Bench, change: dict[str, Any], param: str | None) -> None:
    error = check_error(post(bench.app(), "/v1/chat/completions", {**CHAT, **change}), 400)
    assert error["param"] == param and not bench.backend.requests


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b'{"model": "tiny", "prompt": "\xff"}',
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"model": "tiny", "prompt": "a", "temperature": NaN}',
        b'{"model": "tiny", "prompt": "a", "temperature": 1e999}',
        b'{"model": "tiny", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"model": "tiny", "prompt": "a", "metadata": ' + b'{"a":' * 5_000 + b"1" + b"}" * 5_000 + b"}",
    ],
)
def test_body_that_is_no_request_is_400(bench: Bench, data: bytes) -> None:
    check_error(call(bench.app(), "POST", "/v1/completions", content=data), 400)


def test_nul_and_odd_text_is_served(bench: Bench) -> None:
    for text in ("\0", "\u202e\ufeff", "a" * 800, "<|end|>"):
        response = post(bench.app(), "/v1/completions", {"model": "tiny", "prompt": text})
        assert response.status_code == 200, text


def test_unknown_model_path_and_method(bench: Bench) -> None:
    app = bench.app()
    assert check_error(post(app, "/v1/completions", {**COMPLETION, "model": "x"}), 404)["code"] == "model_not_found"
    assert check_error(call(app, "GET", "/v1/nothing"), 404)["code"] == "unknown_url"
    assert check_error(call(app, "GET", "/v1/completions"), 405)["code"] == "method_not_allowed"
    assert check_error(post(app, "/v1/embeddings", {"model": "tiny", "input": "a"}), 501)["code"] == "not_implemented"


def test_body_above_the_limit_is_413_without_reading_the_rest(make_bench: MakeBench) -> None:
    app = make_bench(max_body_bytes=1000).app()
    check_error(post(app, "/v1/completions", {**COMPLETION, "prompt": "x" * 2000}), 413)
    sent = 0

    async def parts() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(1000):
            sent += 1
            yield b"x" * 500

    async def go() -> Any:
        async with client(app) as session:
            return await session.post("/v1/completions", content=parts())

    check_error(asyncio.run(go()), 413)
    assert sent < 10


def test_body_that_never_comes_is_408(make_bench: MakeBench) -> None:
    app = make_bench(body_timeout_s=0.05).app()

    async def parts() -> AsyncIterator[bytes]:
        yield b'{"model": '
        await asyncio.Event().wait()

    async def go() -> Any:
        async with client(app) as session:
            return await session.post("/v1/completions", content=parts())

    check_error(asyncio.run(go()), 408)


@pytest.mark.parametrize(
    ("failure", "status", "kind"),
    [
        (BackendUnavailable("tcp://secret:1 refused"), 503, "server_error"),
        (BackendOverloaded("queue secret"), 429, "rate_limit_error"),
        (BackendError("Traceback secret /srv/model.py"), 500, "server_error"),
        (PromptRejected("The prompt has 9 tokens; the model takes at most 8."), 400, "invalid_request_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_backend_failure_has_its_status_and_keeps_secrets(
    bench: Bench, failure: BackendError, status: int, kind: str, stream: bool
) -> None:
    bench.backend.failure = failure
    response = post(bench.app(), "/v1/completions", {**COMPLETION, "stream": stream})
    error = check_error(response, status)
    assert error["type"] == kind and "secret" not in response.text
    if status in (429, 503):
        assert int(response.headers["retry-after"]) > 0


def test_failure_mid_stream_is_an_error_event_and_the_end(bench: Bench) -> None:
    bench.backend.failure, bench.backend.fail_at = BackendUnavailable("gone"), 2
    found = events(post(bench.app(), "/v1/completions", {**COMPLETION, "stream": True}))
    assert found[-1]["error"]["code"] == "model_unavailable"
    assert all("choices" in chunk for chunk in found[:-1])
    bench.backend.failure = None
    assert post(bench.app(), "/v1/completions", COMPLETION).status_code == 200


def test_one_failing_choice_ends_the_request_and_cancels_the_others(bench: Bench) -> None:
    ids = bench.answers("word " * 50, end=False)
    bench.backend.delay_s = 0.005

    def script(request: Any) -> list[int]:
        if request.request_id.endswith("-1"):
            raise BackendUnavailable("gone")
        return ids

    bench.backend.script = script
    check_error(post(bench.app(), "/v1/completions", {**COMPLETION, "n": 3, "max_tokens": 100}), 503)
    assert len(bench.backend.cancelled) == 2 and bench.backend.made < 20


def test_client_that_leaves_cancels_the_sequence(bench: Bench) -> None:
    bench.answers("word " * 100, end=False)
    bench.backend.delay_s = 0.01
    app = bench.app()

    async def go() -> None:
        received = asyncio.Event()
        body = json.dumps({**COMPLETION, "stream": True, "max_tokens": 300}).encode()
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await received.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                received.set()

        scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions",
            "headers": [(b"content-type", b"application/json")], "query_string": b"", "http_version": "1.1",
            "scheme": "http", "server": ("test", 80), "client": ("test", 1), "asgi": {"version": "3.0"},
            "root_path": "",
        }  # fmt: skip
        await asyncio.wait_for(app(scope, receive, send), 5)

    asyncio.run(go())
    assert len(bench.backend.cancelled) == 1 and bench.backend.made < 10
    metrics = app.state.service.metrics
    assert metrics.value("frontend_in_flight_sequences") == 0
    assert 'frontend_sequences_total{model="tiny",reason="cancelled"} 1.0' in metrics.text().decode()


def test_queue_is_bounded_and_refuses_at_once(make_bench: MakeBench) -> None:
    bench = make_bench(max_in_flight=1, max_queued=2)
    bench.backend.delay_s = 0.01
    app = bench.app()

    async def go() -> list[int]:
        async with client(app) as session:
            asked = [session.post("/v1/completions", json=COMPLETION) for _ in range(10)]
            return sorted(response.status_code for response in await asyncio.gather(*asked))

    assert asyncio.run(go()) == [200] * 3 + [429] * 7
    assert asyncio.run(go()) == [200] * 3 + [429] * 7  # places came back


def test_waiting_too_long_is_503(make_bench: MakeBench) -> None:
    bench = make_bench(max_in_flight=1, queue_timeout_s=0.05)
    bench.backend.delay_s = 0.1
    app = bench.app()

    async def go() -> list[int]:
        async with client(app) as session:
            asked = [session.post("/v1/completions", json=COMPLETION) for _ in range(3)]
            return sorted(response.status_code for response in await asyncio.gather(*asked))

    assert asyncio.run(go()) == [200, 503, 503]


def test_api_keys_open_the_api_only(make_bench: MakeBench, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first-key # for ci\n\nsecond-key\n")
    app = make_bench(api_keys_file=keys).app()
    assert check_error(call(app, "GET", "/v1/models"), 401)["code"] == "invalid_api_key"
    wrong = call(app, "GET", "/v1/models", headers={"Authorization": "Bearer nope"})
    assert check_error(wrong, 401) and wrong.headers["www-authenticate"] == "Bearer"
    for key in ("first-key", "second-key"):
        assert call(app, "GET", "/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
    assert check_error(post(app, "/tokenize", {"prompt": "a"}), 401)
    for path in ("/health/live", "/health/ready", "/metrics"):
        assert call(app, "GET", path).status_code == 200
    keys.write_text("third-key-of-another-length\n")
    assert call(app, "GET", "/v1/models", headers={"Authorization": "Bearer first-key"}).status_code == 401
    third = {"Authorization": "Bearer third-key-of-another-length"}
    assert call(app, "GET", "/v1/models", headers=third).status_code == 200


def test_api_keys_come_from_the_environment(make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRONTEND_KEYS", "a-key,b-key")
    app = make_bench(api_keys_env="FRONTEND_KEYS", protect_metrics=True).app()
    assert call(app, "GET", "/v1/models", headers={"Authorization": "bearer b-key"}).status_code == 200
    assert call(app, "GET", "/metrics").status_code == 401


def test_empty_key_file_is_refused_at_start(make_bench: MakeBench, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# nothing\n")
    with pytest.raises(SourceError, match="none was found"):
        make_bench(api_keys_file=tmp_path / "keys").app()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [False, True])
def test_log_tells_model_tokens_and_reason(
    make_bench: MakeBench, caplog: pytest.LogCaptureFixture, stream: bool, prompts: bool
) -> None:
    bench = make_bench(log_format="json", log_prompts=prompts)
    app = bench.app()
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "secret words"}], "stream": stream}
    plain = {"model": "tiny", "prompt": ["secret words", "more"], "max_tokens": 1, "stream": stream}
    with caplog.at_level(logging.INFO):
        post(app, "/v1/chat/completions", chat)
        post(app, "/v1/completions", plain)
        post(app, "/v1/completions", {"model": "other", "prompt": "x"})
    first, second, third = (record for record in caplog.records if record.name == "pipeline.frontend.access")
    assert (first.model, first.stream, first.finish_reason) == ("tiny", stream, "stop")
    assert first.completion_tokens == len(bench.answer_ids) - 1
    assert first.prompt_tokens == len(bench.backend.requests[0].token_ids)
    assert (second.finish_reason, second.completion_tokens) == ("length", 2)
    assert getattr(second, "prompts", None) == (["secret words", "more"] if prompts else None)
    assert third.status == 404 and not hasattr(third, "model")
    assert prompts or "secret" not in "".join(str(record.__dict__) for record in caplog.records)


def test_an_adapter_by_name_needs_a_model_that_takes_adapters(make_bench: MakeBench) -> None:
    bench = make_bench(lora={"sql": 7})
    assert post(bench.app(), "/v1/completions", {"model": "sql", "prompt": "a"}).status_code == 200
    assert bench.backend.requests[-1].lora_task_id == 7
    bench.with_features(lora=False)
    answer = post(bench.app(), "/v1/completions", {"model": "sql", "prompt": "a"})
    assert answer.status_code == 400 and "takes no LoRA adapters" in answer.text
    assert post(bench.app(), "/v1/completions", {"model": "tiny", "prompt": "a"}).status_code == 200


def test_log_has_request_ids_and_no_prompt(make_bench: MakeBench, caplog: pytest.LogCaptureFixture) -> None:
    app = make_bench(log_format="json").app()
    with caplog.at_level(logging.INFO):
        answered = post(
            app, "/v1/completions", {**COMPLETION, "prompt": "prompt text"}, headers={"X-Request-Id": "mine-7"}
        )
        post(app, "/v1/completions", {"model": "tiny", "prompt": {"prompt text": 1}})
    assert answered.headers["x-request-id"] == "mine-7"
    records = [record for record in caplog.records if record.name == "pipeline.frontend.access"]
    assert [record.__dict__["status"] for record in records] == [200, 400]
    assert records[0].__dict__["request_id"] == "mine-7"
    assert not any("prompt text" in str(record.__dict__) for record in caplog.records if "frontend" in record.name)


def test_metrics_agree_with_what_was_sent(bench: Bench) -> None:
    app = bench.app()
    used = [0, 0]
    for stream in (False, True, False):
        post(app, "/v1/completions", {**COMPLETION, "stream": stream})
        used[0] += len(bench.backend.requests[-1].token_ids)
        used[1] += len(bench.answer_ids) - 1
    post(app, "/v1/completions", {**COMPLETION, "n": 0})
    text = call(app, "GET", "/metrics").text
    for line in (
        'frontend_requests_total{endpoint="/v1/completions",model="tiny",status="200"} 3.0',
        'frontend_requests_total{endpoint="/v1/completions",model="tiny",status="400"} 1.0',
        'frontend_sequences_total{model="tiny",reason="stop"} 3.0',
        f'frontend_prompt_tokens_total{{model="tiny"}} {used[0]}.0',
        f'frontend_completion_tokens_total{{model="tiny"}} {used[1]}.0',
        'frontend_time_to_first_token_seconds_count{model="tiny"} 3.0',
        'frontend_in_flight_sequences{model="tiny"} 0.0',
    ):
        assert line in text, line


def test_tokenize_shows_the_ids_that_are_sent(bench: Bench) -> None:
    app = bench.app()
    post(app, "/v1/completions", COMPLETION)
    post(app, "/v1/chat/completions", CHAT)
    sent = [list(request.token_ids) for request in bench.backend.requests]
    assert post(app, "/tokenize", {"prompt": "Hi"}).json()["tokens"] == sent[0]
    shown = post(app, "/tokenize", {"messages": CHAT["messages"], "return_token_strs": True}).json()
    assert shown["tokens"] == sent[1] and shown["count"] == len(sent[1])
    assert shown["token_strs"][0] == "<|begin|>"
    back = post(app, "/detokenize", {"tokens": sent[0]}).json()["prompt"]
    assert back == "<|begin|>Hi"
    assert check_error(post(app, "/detokenize", {"tokens": [10**6]}), 400)["param"] == "tokens"
    assert check_error(post(app, "/tokenize", {}), 400)
    assert check_error(post(app, "/tokenize", {"prompt": "a", "model": "x"}), 404)


def test_description_and_status_page(make_bench: MakeBench) -> None:
    app = make_bench(served_model="a<b>").app()
    document = call(app, "GET", "/openapi.json").json()
    body = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["$ref"].rpartition("/")[2] in document["components"]["schemas"]
    assert "Message" in document["components"]["schemas"]
    page = call(app, "GET", "/")
    assert "a&lt;b&gt;" in page.text and page.headers["content-type"].startswith("text/html")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    ["prompt", "messages", "model", "max_tokens", "temperature", "top_p", "n", "stop", "seed", "stream", "logprobs",
     "top_logprobs", "echo", "best_of", "logit_bias", "tools", "tool_choice", "response_format", "stream_options",
     "user", "chat_template_kwargs", "stop_token_ids", "min_tokens", "top_k", "min_p", "metadata", "modalities"]
)  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from(["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]),
    changes=st.dictionaries(FIELDS, JSON, max_size=3),
)
def test_no_body_is_a_server_error(bench: Bench, path: str, changes: dict[str, Any]) -> None:
    if not hasattr(bench, "fuzzed"):
        bench.fuzzed = bench.app()  # type: ignore[attr-defined]
    base: dict[str, Any] = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}.get(path, {"prompt": "a"})
    data = json.dumps({**base, **changes}).encode("utf-8", "surrogatepass")
    response = call(bench.fuzzed, "POST", path, content=data)  # type: ignore[attr-defined]
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        check_error(response)


def test_settings_collect_every_problem(tmp_path: Path) -> None:
    path = tmp_path / "frontend.json"
    path.write_text(json.dumps({"tokenizr": "x", "port": "80", "triton": "a:1"}))
    with pytest.raises(ConfigError) as caught:
        FrontendSettings.from_json(path)
    messages = [finding.message for finding in caught.value.findings]
    assert len(messages) == 4
    assert any(finding.hint == "Did you mean tokenizer?" for finding in caught.value.findings)
    path.write_text(json.dumps({"tokenizer": "tok", "triton": ["nohost"], "tool_parser": "x", "port": 70000}))
    with pytest.raises(ConfigError) as caught:
        FrontendSettings.from_json(path)
    assert len(caught.value.findings) == 3
    path.write_text(json.dumps({"tokenizer": "tok", "lora": {"a": 1}, "drain_s": 5, "aliases": ["x"]}))
    read = FrontendSettings.from_json(path)
    assert read.tokenizer == tmp_path / "tok" and read.name == "tok" and read.aliases == ("x",)
    path.write_text("{")
    with pytest.raises(SourceError, match="not JSON"):
        FrontendSettings.from_json(path)
    with pytest.raises(SourceError, match="Cannot read"):
        FrontendSettings.from_json(tmp_path / "none.json")
