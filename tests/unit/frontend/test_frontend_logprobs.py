"""Log probabilities: shapes of both endpoints, alignment with the text, echo with prompt scores."""

from __future__ import annotations

from typing import Any

import pytest
from frontend_fakes import Bench, events, post

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "logprobs": True}
SCORE = {"model": "tiny", "logprobs": 2, "echo": True, "max_tokens": 0}


def joined(entries: list[dict[str, Any]]) -> str:
    return b"".join(bytes(entry["bytes"]) for entry in entries).decode()


@pytest.mark.parametrize("text", ["Hello world", "a 👨‍👩‍👧‍👦 b", "naïve 日本"])
@pytest.mark.parametrize("stream", [False, True])
def test_chat_bytes_concatenate_to_the_text(bench: Bench, text: str, stream: bool) -> None:
    ids = bench.answers(text)
    response = post(bench.app(), "/v1/chat/completions", {**CHAT, "top_logprobs": 3, "stream": stream})
    if stream:
        choices = [choice for chunk in events(response)[:-1] for choice in chunk["choices"]]
        entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    else:
        entries = response.json()["choices"][0]["logprobs"]["content"]
    assert joined(entries) == text
    assert [entry["logprob"] for entry in entries] == [-0.5 - index / 1000 for index in ids[:-1]]
    for entry in entries:
        assert len(entry["top_logprobs"]) == 3
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True)


def test_chat_stream_brings_scores_with_their_text(bench: Bench) -> None:
    bench.answers("a 日 b")
    choices = [
        choice
        for chunk in events(post(bench.app(), "/v1/chat/completions", {**CHAT, "stream": True}))[:-1]
        for choice in chunk["choices"]
        if choice["delta"].get("content")
    ]
    shown = ""
    for choice in choices:
        shown += choice["delta"]["content"]
        assert choice["logprobs"]["content"]
    assert shown == "a 日 b"


def test_special_token_is_named_and_adds_no_bytes(bench: Bench) -> None:
    bench.answers("a<|pad|>b")
    entries = post(bench.app(), "/v1/chat/completions", CHAT).json()["choices"][0]["logprobs"]["content"]
    assert [(entry["token"], entry["bytes"]) for entry in entries][1] == ("<|pad|>", [])
    assert joined(entries) == "ab"


@pytest.mark.parametrize("chunk", [1, 50])
def test_tokens_behind_a_stop_string_are_not_scored(bench: Bench, chunk: int) -> None:
    bench.answers("abcdef")
    bench.backend.chunk = chunk
    choice = post(bench.app(), "/v1/chat/completions", {**CHAT, "stop": "cd"}).json()["choices"][0]
    assert choice["message"]["content"] == "ab"
    assert joined(choice["logprobs"]["content"]) == "ab"


def test_completion_scores_have_text_offsets(bench: Bench) -> None:
    ids = bench.answers("ab 日")
    body = {"model": "tiny", "prompt": "x", "logprobs": 2}
    written = post(bench.app(), "/v1/completions", body).json()["choices"][0]["logprobs"]
    assert written["tokens"][0] == "a" and written["text_offset"][:3] == [0, 1, 2]
    assert any(token.startswith("bytes:\\x") for token in written["tokens"])
    assert len(written["tokens"]) == len(ids) - 1 == len(written["token_logprobs"]) == len(written["top_logprobs"])
    assert all(len(tops) in (2, 3) for tops in written["top_logprobs"])


@pytest.mark.parametrize("prompt", ["score me", [5, 70, 71]])
def test_echo_scores_the_prompt_with_null_first(bench: Bench, prompt: Any) -> None:
    choice = post(bench.app(), "/v1/completions", {**SCORE, "prompt": prompt}).json()["choices"][0]
    request = bench.backend.requests[0]
    ids = list(request.token_ids)
    written = choice["logprobs"]
    assert written["token_logprobs"] == [None, *(-0.5 - index / 1000 for index in ids[1:])]
    assert written["top_logprobs"][0] is None and len(written["top_logprobs"][1]) == 2
    assert len(written["tokens"]) == len(ids) == len(written["text_offset"])
    assert request.prompt_logprobs == 2 and request.max_tokens == 0
    assert choice["finish_reason"] == "length"


def test_echo_scores_prompt_and_answer_as_one_list(bench: Bench) -> None:
    body = {**SCORE, "prompt": "ab", "max_tokens": 1}
    for stream in (False, True):
        response = post(bench.app(), "/v1/completions", {**body, "stream": stream})
        if stream:
            choices = [chunk["choices"][0] for chunk in events(response)[:-1]]
            values = [
                value for choice in choices if choice["logprobs"] for value in choice["logprobs"]["token_logprobs"]
            ]
        else:
            values = response.json()["choices"][0]["logprobs"]["token_logprobs"]
        assert values == [
            None,
            *(-0.5 - i / 1000 for i in [*bench.backend.requests[0].token_ids[1:], *bench.answer_ids[:1]]),
        ]


def test_every_prompt_of_a_list_is_scored(bench: Bench) -> None:
    choices = post(bench.app(), "/v1/completions", {**SCORE, "prompt": ["one two", "three"], "n": 2}).json()["choices"]
    lengths = [len(choice["logprobs"]["tokens"]) for choice in choices]
    assert lengths[0] == lengths[1] != lengths[2] == lengths[3]


def test_best_of_returns_the_most_likely(bench: Bench) -> None:
    scripts = [bench.tokenizer.encode(text, add_special_tokens=False) for text in ("zz zz", "!!", "~~")]
    bench.backend.script = lambda request: [*scripts[int(request.request_id[-1])], 1]
    body = {"model": "tiny", "prompt": "x", "n": 1, "best_of": 3}
    answer = post(bench.app(), "/v1/completions", body).json()
    means = [sum(-0.5 - index / 1000 for index in ids) / len(ids) for ids in scripts]
    best = means.index(max(means))
    assert answer["choices"][0]["text"] == ("zz zz", "!!", "~~")[best]
    assert answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == sum(map(len, scripts))


@pytest.mark.parametrize(
    ("missing", "path", "body", "param"),
    [
        ("logprobs", "/v1/completions", {"prompt": "a", "logprobs": 0}, "logprobs"),
        ("top_logprobs", "/v1/completions", {"prompt": "a", "logprobs": 1}, "logprobs"),
        ("prompt_logprobs", "/v1/completions", {"prompt": "a", "logprobs": 0, "echo": True}, "logprobs"),
        ("logprobs", "/v1/completions", {"prompt": "a", "best_of": 2}, "best_of"),
        ("min_p", "/v1/completions", {"prompt": "a", "min_p": 0.1}, "min_p"),
        ("logit_bias", "/v1/completions", {"prompt": "a", "logit_bias": {"5": 1}}, "logit_bias"),
        ("guided", "/v1/completions", {"prompt": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ("top_logprobs", "/v1/chat/completions", {**CHAT, "top_logprobs": 1}, "top_logprobs"),
    ],
)
def test_what_the_model_lacks_is_refused_and_never_left_out(
    bench: Bench, missing: str, path: str, body: dict[str, Any], param: str
) -> None:
    bench.with_features(**{missing: False})
    response = post(bench.app(), path, {"model": "tiny", **body})
    assert response.status_code == 400 and not bench.backend.requests
    assert response.json()["error"]["param"] == param


def test_response_format_becomes_a_guide(bench: Bench) -> None:
    app = bench.app()
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    formats: list[tuple[dict[str, Any], str, str]] = [
        ({"type": "json_object"}, "json", ""),
        ({"type": "regex", "regex": "a+"}, "regex", "a+"),
        ({"type": "grammar", "grammar": "root ::= x"}, "ebnf_grammar", "root ::= x"),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
            "json_schema",
            '{"type":"object","properties":{"a":{"type":"integer"}}}',
        ),
    ]
    for response_format, kind, text in formats:
        post(app, "/v1/chat/completions", {**CHAT, "response_format": response_format})
        guide = bench.backend.requests[-1].guide
        assert guide is not None and (guide.kind, guide.text) == (kind, text)
    post(app, "/v1/chat/completions", {**CHAT, "response_format": {"type": "text"}})
    assert bench.backend.requests[-1].guide is None
