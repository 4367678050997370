"""Guided decoding all the way: OpenAI's fields, the frontend, Triton, the reference engine, llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from test_frontend_triton import Frontend
from triton_models import Model

from pipeline.triton.server import TritonServer

pytestmark = pytest.mark.triton

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "big": {"type": "boolean"}},
    "required": ["city", "big"],
    "additionalProperties": False,
}
MESSAGES: Any = [{"role": "user", "content": "Hi"}]


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def client(
    server: TritonServer, tiny_model: Model, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    frontend = Frontend(
        tmp_path_factory.mktemp("guided") / "f",
        triton=[server.grpc_url],
        tokenizer=str(tiny_model.tokenizer),
        served_model="tiny",
        max_seq_len=256,
        tool_parser="hermes",
    )
    frontend.wait_ready()
    yield frontend.client()
    assert frontend.stop() == 0


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=200, seed=5, **fields)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_answers_of_a_random_model_match_the_schema(client: openai.OpenAI, seed: int) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
    answers = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=240, seed=seed, n=2, response_format=wanted
    )
    for choice in answers.choices:
        assert choice.finish_reason == "stop"
        document = json.loads(choice.message.content or "")
        assert document["city"] in ("Paris", "Rome") and isinstance(document["big"], bool)


def test_a_stream_and_a_whole_answer_of_an_expression_are_the_same(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": "tiny",
        "prompt": "x",
        "temperature": 0,
        "max_tokens": 50,
        "extra_body": {"response_format": {"type": "regex", "regex": "[a-f]{3,6} (one|two)"}},
    }
    whole = client.completions.create(**fields).choices[0]
    assert re.fullmatch("[a-f]{3,6} (one|two)", whole.text)
    assert whole.finish_reason == "stop"
    assert "".join(chunk.choices[0].text for chunk in client.completions.create(**fields, stream=True)) == whole.text


def test_a_grammar_and_any_object_hold(client: openai.OpenAI) -> None:
    grammar: Any = {"type": "grammar", "grammar": 'root ::= "yes" | "no"'}
    assert chat(client, response_format=grammar).choices[0].message.content in ("yes", "no")
    answer = chat(client, response_format={"type": "json_object"}).choices[0]
    assert (answer.message.content or "").lstrip().startswith("{")


def test_a_named_tool_gets_its_arguments(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "visit"}}
    message = chat(client, tools=[tool("visit"), tool("leave")], tool_choice=named).choices[0].message
    (call,) = message.tool_calls
    assert call.function.name == "visit"
    assert set(json.loads(call.function.arguments)) == {"city", "big"}


def test_a_required_call_is_made_whole_and_streamed(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"tools": [tool("visit"), tool("leave")], "tool_choice": "required", "temperature": 0}
    fields["parallel_tool_calls"] = False
    whole = chat(client, **fields).choices[0]
    assert whole.finish_reason == "tool_calls"
    (call,) = whole.message.tool_calls
    assert call.function.name in ("visit", "leave")
    assert set(json.loads(call.function.arguments)) == {"city", "big"}
    names, arguments = [], ""
    for chunk in chat(client, stream=True, **fields):
        for part in chunk.choices[0].delta.tool_calls or ():
            names += [part.function.name] if part.function.name else []
            arguments += part.function.arguments or ""
    assert (names, arguments) == ([call.function.name], call.function.arguments)


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"type": "regex", "regex": "(("}, "no usable regex"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nope"}}}, "no usable json_schema"),
        ({"type": "grammar", "grammar": "%%%"}, "no usable ebnf_grammar"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_guide_is_400_with_its_fault(client: openai.OpenAI, wanted: Any, words: str, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        chat(client, response_format=wanted, stream=stream)
    assert chat(client, response_format={"type": "regex", "regex": "ok"}).choices[0].message.content == "ok"
