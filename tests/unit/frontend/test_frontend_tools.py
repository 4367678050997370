"""Tool calls: the three formats, whole and in pieces, and what tool_choice does."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from frontend_fakes import Bench, events, post
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.frontend.tool_calls import ToolDelta, tool_parser

ARGUMENTS = '{"place": "Köln, \\"Süd\\" }{", "days": [1, {"a": null}]}'
CALL = '{"name": "get_weather", "arguments": ' + ARGUMENTS + "}"
SWAPPED = '{"arguments": ' + ARGUMENTS + ', "name": "get_weather"}'
LLAMA = '{"name": "get_weather", "parameters": ' + ARGUMENTS + "}"
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
OTHER = {"type": "function", "function": {"name": "other"}}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "tools": [TOOL, OTHER]}

# format, answer, text beside the calls, calls
CASES: list[tuple[str, str, str, int]] = [
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", "", 1),
    ("hermes", f"Let me see.\n<tool_call>{CALL}</tool_call>\n<tool_call>{SWAPPED}</tool_call>", "Let me see.\n", 2),
    ("hermes", "no call, only <tool and </tool_call> text", "no call, only <tool and </tool_call> text", 0),
    ("hermes", "<tool_call>not json</tool_call> after", "<tool_call>not json</tool_call> after", 0),
    ("hermes", '<tool_call>{"nam', '<tool_call>{"nam', 0),
    ("mistral", f"[TOOL_CALLS][{CALL}]", "", 1),
    ("mistral", f"[TOOL_CALLS] [{CALL}, {CALL}]", "", 2),
    ("mistral", f"Sure.[TOOL_CALLS]{CALL}", "Sure.", 1),
    ("mistral", "[TOOL and {braces}", "[TOOL and {braces}", 0),
    ("llama3", LLAMA, "", 1),
    ("llama3", f"<|python_tag|>{LLAMA}; {LLAMA}", "", 2),
    ("llama3", "plain { text }", "plain { text }", 0),
    ("llama3", '{"no": "call"}', '{"no": "call"}', 0),
    ("llama3", "{broken", "{broken", 0),
]


def read(name: str, pieces: list[str]) -> tuple[str, list[dict[str, Any]]]:
    """Assemble what a client would."""
    parser = tool_parser(name)
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
    text = "".join(part for part in parts if isinstance(part, str))
    calls: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, ToolDelta):
            if part.name is not None:
                assert part.call == len(calls) and part.call_id
                calls.append({"name": part.name, "arguments": ""})
            calls[part.call]["arguments"] += part.arguments
    return text, calls


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("name", "answer", "text", "count"), CASES)
def test_parser_finds_calls_in_pieces_of_any_size(name: str, answer: str, text: str, count: int, size: int) -> None:
    found, calls = read(name, [answer[start : start + size] for start in range(0, len(answer), size)])
    assert found == text
    assert [call["name"] for call in calls] == ["get_weather"] * count
    assert all(json.loads(call["arguments"]) == json.loads(ARGUMENTS) for call in calls)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(CASES), st.data())
def test_parser_does_not_depend_on_the_cuts(case: tuple[str, str, str, int], data: st.DataObject) -> None:
    name, answer, text, count = case
    cuts = sorted(data.draw(st.sets(st.integers(0, len(answer)))) | {0, len(answer)})
    pieces = [answer[a:b] for a, b in pairwise(cuts)]
    found, calls = read(name, pieces)
    assert (found, len(calls)) == (text, count)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["hermes", "mistral", "llama3"]), st.lists(st.text('{}[]",:<>/\\ntol_cal|', max_size=8), max_size=8)
)
def test_parser_takes_any_text(name: str, pieces: list[str]) -> None:
    whole = "".join(pieces)
    text, calls = read(name, pieces)
    if not calls and "<tool_call>" not in whole and "[TOOL_CALLS]" not in whole:
        assert text == whole.lstrip() if name == "llama3" and whole.lstrip().startswith("{") else text == whole


def test_arguments_stream_while_the_model_writes_them() -> None:
    parser = tool_parser("hermes")
    parser.push('<tool_call>{"name": "f", "arguments": {"a":')
    assert parser.push(' "long') == [ToolDelta(0, arguments=' "long')]
    assert parser.push("er ") == [ToolDelta(0, arguments="er ")]


@pytest.mark.parametrize("stream", [False, True])
def test_chat_returns_tool_calls(make_bench: Callable[..., Bench], stream: bool) -> None:
    bench = make_bench(tool_parser="hermes")
    bench.answers(f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>")
    response = post(bench.app(), "/v1/chat/completions", {**CHAT, "stream": stream, "max_tokens": 600})
    if not stream:
        choice = response.json()["choices"][0]
        calls = choice["message"]["tool_calls"]
        assert choice["message"]["content"] is None and choice["finish_reason"] == "tool_calls"
    else:
        calls = []
        choices = [choice for chunk in events(response)[:-1] for choice in chunk["choices"]]
        assert choices[-1]["finish_reason"] == "tool_calls"
        for choice in choices:
            for delta in choice["delta"].get("tool_calls", ()):
                if "id" in delta:
                    calls.append({"id": delta["id"], "type": delta["type"], "function": {"name": "", "arguments": ""}})
                for key, value in delta["function"].items():
                    calls[delta["index"]]["function"][key] += value
    assert len(calls) == 2 and calls[0]["id"] != calls[1]["id"]
    assert json.loads(calls[1]["function"]["arguments"]) == json.loads(ARGUMENTS)


def test_only_one_call_when_parallel_calls_are_off(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(tool_parser="hermes")
    bench.answers(f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>")
    body = {**CHAT, "parallel_tool_calls": False, "max_tokens": 600}
    assert len(post(bench.app(), "/v1/chat/completions", body).json()["choices"][0]["message"]["tool_calls"]) == 1


def test_tools_are_refused_without_a_parser_unless_none_may_be_called(bench: Bench) -> None:
    app = bench.app()
    assert post(app, "/v1/chat/completions", CHAT).json()["error"]["param"] == "tools"
    assert post(app, "/v1/chat/completions", {**CHAT, "tool_choice": "none"}).status_code == 200


def test_named_tool_is_forced_by_a_guide(bench: Bench) -> None:
    bench.answers('{"place": "Bonn"}')
    choice = {"type": "function", "function": {"name": "get_weather"}}
    body = {**CHAT, "tool_choice": choice, "max_tokens": 100}
    answer = post(bench.app(), "/v1/chat/completions", body).json()["choices"][0]
    assert answer["message"]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"place": "Bonn"}'}
    assert answer["finish_reason"] == "stop"
    guide = bench.backend.requests[0].guide
    assert guide is not None and guide.kind == "json_schema" and json.loads(guide.text) == {"type": "object"}


def test_required_tool_reports_the_one_that_was_called(bench: Bench) -> None:
    bench.answers('[{"name": "other", "arguments": {}}]')
    answer = post(bench.app(), "/v1/chat/completions", {**CHAT, "tool_choice": "required", "max_tokens": 100}).json()
    message = answer["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["other"]
    assert answer["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [{"type": "code_interpreter"}]}, "tools[0].type"),
    ],
)
def test_choice_that_does_not_fit_is_refused(bench: Bench, change: dict[str, Any], param: str) -> None:
    response = post(bench.app(), "/v1/chat/completions", {**CHAT, **change})
    assert response.status_code == 400 and response.json()["error"]["param"] == param


def test_marks_that_are_special_tokens_are_seen(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(tool_parser="mistral")
    config = json.loads((bench.folder / "tokenizer_config.json").read_text())
    config["additional_special_tokens"] = ["[TOOL_CALLS]"]
    (bench.folder / "tokenizer_config.json").write_text(json.dumps(config))
    bench.tokenizer = type(bench.tokenizer)(bench.folder)
    ids = bench.answers(f"[TOOL_CALLS][{CALL}]")
    assert bench.tokenizer.special_ids("[TOOL_CALLS]") == (ids[0],)
    choice = post(bench.app(), "/v1/chat/completions", {**CHAT, "max_tokens": 600}).json()["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"


def test_arguments_reach_the_template_as_values(make_bench: Callable[..., Bench]) -> None:
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.arguments.place }}{% endfor %}"
    template = "{% for m in messages %}" + calls + "{% endfor %}!"
    bench = make_bench(template=template)
    call = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": '{"place": "Bonn"}'}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    post(bench.app(), "/v1/chat/completions", {"model": "tiny", "messages": messages})
    assert bench.tokenizer.decode(list(bench.backend.requests[0].token_ids)) == "Bonn!"
