"""The endpoints against a scripted backend: text, reasons, counts, the grammar of streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from frontend_fakes import Bench, call, events, post

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"model": "tiny", "prompt": "Hi"}
MakeBench = Callable[..., Bench]


def streamed_text(found: list[Any]) -> str:
    assert found[-1] == "[DONE]"
    choices = [choice for chunk in found[:-1] for choice in chunk["choices"]]
    return "".join(choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices)


def test_chat_answers_with_text_reason_and_counts(bench: Bench) -> None:
    answer = post(bench.app(), "/v1/chat/completions", CHAT).json()
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hello world", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    prompt = bench.tokenizer.encode("<|begin|>user: Hi\nassistant:", add_special_tokens=False)
    assert bench.backend.requests[0].token_ids == prompt
    generated = len(bench.answer_ids) - 1
    assert answer["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": generated,
        "total_tokens": len(prompt) + generated,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_chat_prompt_has_the_beginning_once_and_completion_has_the_default(bench: Bench) -> None:
    app = bench.app()
    post(app, "/v1/chat/completions", CHAT)
    post(app, "/v1/completions", COMPLETION)
    begin = bench.tokenizer.bos_id
    for request in bench.backend.requests:
        assert list(request.token_ids).count(begin) == 1 and request.token_ids[0] == begin


@pytest.mark.parametrize("chunk", [1, 2, 8])
@pytest.mark.parametrize("kind", ["byte_level", "metaspace_bpe", "unigram", "word_piece"])
@pytest.mark.parametrize("text", ["Hello world", "a 👨‍👩‍👧‍👦 b 日本語", " it's  fine , really "])
def test_stream_equals_non_stream(make_bench: MakeBench, kind: str, chunk: int, text: str) -> None:
    bench = make_bench(kind=kind)
    bench.backend.chunk = chunk
    bench.answer_ids = bench.tokenizer.encode(text, add_special_tokens=False)
    expected = bench.tokenizer.decode(bench.answer_ids)
    app = bench.app()
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
        whole = post(app, path, {**body, "max_tokens": 100}).json()["choices"][0]
        found = events(post(app, path, {**body, "max_tokens": 100, "stream": True}))
        assert streamed_text(found) == expected
        assert (whole["message"]["content"] if "message" in whole else whole["text"]) == expected


def test_chat_stream_follows_the_grammar(bench: Bench) -> None:
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    found = events(post(bench.app(), "/v1/chat/completions", body))
    assert found[-1] == "[DONE]"
    *chunks, last = found[:-1]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == len(bench.answer_ids) - 1
    for key in ("id", "created", "model", "system_fingerprint", "object"):
        assert len({chunk[key] for chunk in (*chunks, last)}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"


def test_completion_stream_follows_the_grammar(bench: Bench) -> None:
    found = events(post(bench.app(), "/v1/completions", {**COMPLETION, "stream": True}))
    chunks = found[:-1]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, 50])
@pytest.mark.parametrize(
    ("stop", "expected", "reason"),
    [
        (["DEFGHIJ"], "ABC", "stop"),
        (["DEFX"], "ABCDEFGHIJK", "length"),
        ("K", "ABCDEFGHIJ", "stop"),
        (["GH", "CDEF"], "AB", "stop"),
        (["ABCDEFGHIJK"], "", "stop"),
    ],
)
def test_stop_strings_are_cut_and_never_leak(
    bench: Bench, stop: Any, expected: str, reason: str, chunk: int, stream: bool
) -> None:
    ids = bench.answers("ABCDEFGHIJK", end=False)
    bench.backend.chunk = chunk
    body = {**COMPLETION, "stop": stop, "stream": stream, "max_tokens": len(ids)}
    response = post(bench.app(), "/v1/completions", body)
    if stream:
        found = events(response)
        assert streamed_text(found) == expected
        assert found[-2]["choices"][0]["finish_reason"] == reason
    else:
        choice = response.json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (expected, reason)


def test_stop_string_can_stay_in_the_text(bench: Bench) -> None:
    bench.answers("ABCDEF")
    body = {**COMPLETION, "stop": "CD", "include_stop_str_in_output": True}
    assert post(bench.app(), "/v1/completions", body).json()["choices"][0]["text"] == "ABCD"


def test_stop_string_cancels_the_sequence(bench: Bench) -> None:
    bench.answers("ABCDEF" * 20, end=False)
    answer = post(bench.app(), "/v1/completions", {**COMPLETION, "stop": "BC", "max_tokens": 100}).json()
    assert answer["choices"][0]["text"] == "A"
    assert len(bench.backend.cancelled) == 1 and bench.backend.made < 10
    # The tokens up to the one that completes the stop string were generated, the rest never.
    assert answer["usage"]["completion_tokens"] == bench.backend.made


def test_special_token_text_works_as_stop(bench: Bench) -> None:
    bench.answers("one<|pad|>two")
    choice = post(bench.app(), "/v1/completions", {**COMPLETION, "stop": "<|pad|>"}).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("one", "stop")


def test_stop_token_ids_end_the_answer(bench: Bench) -> None:
    ids = bench.answers("abc")
    body = {**COMPLETION, "stop_token_ids": [ids[1]]}
    assert post(bench.app(), "/v1/completions", body).json()["choices"][0]["text"] == "a"
    assert bench.backend.requests[0].stop_words == ((ids[1],),)
    body["include_stop_str_in_output"] = True
    assert post(bench.app(), "/v1/completions", body).json()["choices"][0]["text"] == "ab"


def test_further_end_tokens_stop_and_leave_no_mark(make_bench: MakeBench) -> None:
    bench = make_bench()
    (bench.folder / "generation_config.json").write_text('{"eos_token_id": [1, 20]}')
    bench.answer_ids = [*bench.tokenizer.encode("Hi", add_special_tokens=False), 20, 21, 22]
    answer = post(bench.app(), "/v1/chat/completions", CHAT).json()
    request = bench.backend.requests[0]
    assert (request.end_id, request.stop_words) == (1, ((20,),))
    assert answer["choices"][0]["message"]["content"] == "Hi"
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_ignore_eos_runs_on(bench: Bench) -> None:
    bench.answers("Hi")
    post(bench.app(), "/v1/completions", {**COMPLETION, "ignore_eos": True})
    assert bench.backend.requests[0].end_id is None and bench.backend.requests[0].stop_words == ()


def test_chat_without_limit_takes_the_rest_of_the_context(make_bench: MakeBench) -> None:
    bench = make_bench(max_seq_len=64)
    bench.answers("word " * 100, end=False)
    answer = post(bench.app(), "/v1/chat/completions", CHAT).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 64


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("says_reason", [True, False])
def test_chat_cut_by_the_client_s_limit_says_length(bench: Bench, field: str, says_reason: bool) -> None:
    bench.backend.says_reason = says_reason
    bench.answers("one two three four five six seven", end=False)
    answer = post(bench.app(), "/v1/chat/completions", {**CHAT, field: 5}).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 5


def test_completion_has_sixteen_tokens_by_default(bench: Bench) -> None:
    bench.answers("word " * 30, end=False)
    assert post(bench.app(), "/v1/completions", COMPLETION).json()["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(("size", "asked", "fits"), [(63, 1, True), (64, 1, False), (65, 1, False), (32, 33, False)])
def test_context_overflow_is_refused_before_anything_is_sent(
    make_bench: MakeBench, size: int, asked: int, fits: bool
) -> None:
    bench = make_bench(max_seq_len=64)
    response = post(bench.app(), "/v1/completions", {"model": "tiny", "prompt": [20] * size, "max_tokens": asked})
    if fits:
        assert response.status_code == 200
        return
    assert response.status_code == 400 and not bench.backend.requests
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "64" in error["message"] and str(size + asked) in error["message"]


def test_context_length_is_read_from_the_model(bench: Bench) -> None:
    body = {"model": "tiny", "prompt": [20] * 1100}
    assert post(bench.app(), "/v1/completions", body).json()["error"]["code"] == "context_length_exceeded"


def test_sampling_is_always_explicit(bench: Bench) -> None:
    app = bench.app()
    post(app, "/v1/completions", COMPLETION)
    post(app, "/v1/completions", {**COMPLETION, "temperature": 0})
    post(app, "/v1/completions", {**COMPLETION, "temperature": None, "top_p": 0.5, "top_k": 3, "seed": 7})
    first, greedy, given = (request.sampling for request in bench.backend.requests)
    assert (first.temperature, first.top_p, first.top_k) == (1.0, 1.0, 0) and first.seed is not None
    assert greedy.temperature == 0
    assert (given.temperature, given.top_p, given.top_k, given.seed) == (1.0, 0.5, 3, 7)


def test_seeds_differ_without_seed_and_follow_the_given_one(bench: Bench) -> None:
    app = bench.app()
    for _ in range(3):
        post(app, "/v1/completions", COMPLETION)
    assert len({request.sampling.seed for request in bench.backend.requests}) == 3
    bench.backend.requests.clear()
    post(app, "/v1/completions", {**COMPLETION, "seed": 7, "n": 3})
    assert [request.sampling.seed for request in bench.backend.requests] == [7, 8, 9]
    ids = [request.request_id for request in bench.backend.requests]
    assert len(set(ids)) == 3 and all(name[0].isalpha() for name in ids)


@pytest.mark.parametrize("stream", [False, True])
def test_n_choices_are_kept_apart(bench: Bench, stream: bool) -> None:
    texts = ["zero 0", "one ö", "two 日本"]
    scripts = [[*bench.tokenizer.encode(text, add_special_tokens=False), 1] for text in texts]
    bench.backend.script = lambda request: scripts[int(request.request_id[-1])]
    response = post(bench.app(), "/v1/chat/completions", {**CHAT, "n": 3, "stream": stream})
    if stream:
        found = [""] * 3
        for chunk in events(response)[:-1]:
            for choice in chunk["choices"]:
                found[choice["index"]] += choice["delta"].get("content", "")
        assert found == texts
    else:
        answer = response.json()
        assert [choice["message"]["content"] for choice in answer["choices"]] == texts
        assert answer["usage"]["completion_tokens"] == sum(len(script) - 1 for script in scripts)
        assert answer["usage"]["prompt_tokens"] == len(bench.backend.requests[0].token_ids)


def test_prompts_come_in_every_shape(bench: Bench) -> None:
    app = bench.app()
    for prompt, count in (("a", 1), (["a", "b"], 2), ([20, 21], 1), ([[20], [21, 22]], 2), ("", 1), ([""], 1)):
        response = post(app, "/v1/completions", {"model": "tiny", "prompt": prompt, "n": 2})
        choices = response.json()["choices"]
        assert [choice["index"] for choice in choices] == list(range(2 * count))
    assert bench.backend.requests[-1].token_ids == [bench.tokenizer.bos_id]


def test_echo_returns_the_prompt_first(bench: Bench) -> None:
    app = bench.app()
    body = {**COMPLETION, "echo": True}
    assert post(app, "/v1/completions", body).json()["choices"][0]["text"] == "HiHello world"
    assert streamed_text(events(post(app, "/v1/completions", {**body, "stream": True}))) == "HiHello world"
    assert post(app, "/v1/completions", {**body, "max_tokens": 0}).json()["choices"][0]["text"] == "Hi"


def test_developer_is_system_unless_the_template_knows_it(bench: Bench) -> None:
    body = {"model": "tiny", "messages": [{"role": "developer", "content": "x"}, {"role": "user", "content": "y"}]}
    post(bench.app(), "/v1/chat/completions", body)
    assert "system: x" in bench.tokenizer.decode(list(bench.backend.requests[0].token_ids))


def test_text_parts_are_joined(bench: Bench) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    post(bench.app(), "/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": parts}]})
    assert "user: one\ntwo" in bench.tokenizer.decode(list(bench.backend.requests[0].token_ids))


def test_chat_without_template_is_refused_and_completion_works(make_bench: MakeBench) -> None:
    bench = make_bench(template="")
    app = bench.app()
    response = post(app, "/v1/chat/completions", CHAT)
    assert response.status_code == 400 and "chat template" in response.json()["error"]["message"]
    assert post(app, "/v1/completions", COMPLETION).status_code == 200


def test_models_lists_names_and_target(make_bench: MakeBench) -> None:
    app = make_bench(aliases=("other",), lora={"tiny-lora": 5}, target="reference", created=17).app()
    listed = call(app, "GET", "/v1/models").json()
    assert [entry["id"] for entry in listed["data"]] == ["tiny", "other", "tiny-lora"]
    assert listed["data"][0] == {
        "id": "tiny",
        "object": "model",
        "created": 17,
        "owned_by": "trtllm-pipeline",
        "target": "reference",
    }
    assert call(app, "GET", "/v1/models/tiny").json()["id"] == "tiny"
    missing = call(app, "GET", "/v1/models/no/such")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"


def test_lora_is_chosen_by_model_name(make_bench: MakeBench) -> None:
    bench = make_bench(lora={"tuned": 5})
    post(bench.app(), "/v1/completions", {**COMPLETION, "model": "tuned"})
    assert bench.backend.requests[0].lora_task_id == 5


def test_health_tells_live_from_ready(bench: Bench) -> None:
    app = bench.app()
    assert call(app, "GET", "/health/ready").status_code == 200
    bench.backend.ready = False
    assert call(app, "GET", "/health/ready").status_code == 503
    assert call(app, "GET", "/health/live").status_code == 200
    bench.backend.ready = True
    app.state.service.draining = True
    assert call(app, "GET", "/health/ready").status_code == 503
    assert post(app, "/v1/completions", COMPLETION).status_code == 503
