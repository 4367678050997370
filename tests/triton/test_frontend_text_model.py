"""The frontend in front of the ensemble: text in, text out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from test_frontend_triton import Frontend
from triton_models import Model

from pipeline.triton.server import TritonServer

pytestmark = pytest.mark.triton


@pytest.fixture(scope="module")
def clients(
    server: TritonServer, tiny_model: Model, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[openai.OpenAI, openai.OpenAI]]:
    """One client of a frontend that speaks token ids, one of a frontend that speaks text, on the same model."""
    folder = tmp_path_factory.mktemp("text")
    common: dict[str, Any] = {
        "triton": [server.grpc_url],
        "tokenizer": str(tiny_model.tokenizer),
        "served_model": "tiny",
        "max_seq_len": 256,
    }
    frontends = [Frontend(folder / model, model=model, **common) for model in ("tensorrt_llm", "ensemble")]
    for frontend in frontends:
        frontend.wait_ready()
    yield frontends[0].client(), frontends[1].client()
    assert [frontend.stop() for frontend in frontends] == [0, 0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 1.0, "seed": 3, "top_p": 0.9}])
def test_text_models_answer_like_token_models(
    clients: tuple[openai.OpenAI, openai.OpenAI], fields: dict[str, Any], stream: bool
) -> None:
    seen = []
    for client in clients:
        answer: Any = client.completions.create(
            model="tiny", prompt="the User: é", max_tokens=24, stream=stream, **fields
        )
        if stream:
            chunks = list(answer)
            reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
            seen.append(("".join(choice.text for chunk in chunks for choice in chunk.choices), *reasons))
        else:
            usage = answer.usage
            seen.append((answer.choices[0].text, answer.choices[0].finish_reason, usage.completion_tokens))
    assert seen[0] == seen[1]


def test_text_models_refuse_what_needs_token_ids(clients: tuple[openai.OpenAI, openai.OpenAI]) -> None:
    for fields in ({"logprobs": 1}, {"extra_body": {"stop_token_ids": [5]}}, {"logit_bias": {"5": 1.0}}):
        with pytest.raises(openai.BadRequestError):
            clients[1].completions.create(model="tiny", prompt="a", **fields)
    with pytest.raises(openai.BadRequestError, match="give the prompt as text"):
        clients[1].completions.create(model="tiny", prompt=[5, 6])
