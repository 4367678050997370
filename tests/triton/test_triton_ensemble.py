"""Text in, text out: preprocessing, tensorrt_llm and postprocessing through `ensemble` in a real tritonserver."""

from __future__ import annotations

from typing import Any

import pytest
from triton_client import Answer, Client
from triton_models import EOS, IM_END, Model

from pipeline.engines.reference import ReferenceEngine, Request

pytestmark = pytest.mark.triton

TEXT = "User: the"


def text_inputs(text: str = TEXT, tokens: int = 24, **more: Any) -> dict[str, Any]:
    return {"text_input": [text], "max_tokens": [tokens], **more}


def texts(answer: Answer) -> list[str]:
    assert answer.error == ""
    return [response["text_output"][0][0].decode() for response in answer.responses if response]


def expected_text(model: Model, engine: ReferenceEngine, tokens: int = 24, **options: Any) -> str:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model.tokenizer / "tokenizer.json"))
    prompt = tuple(tokenizer.encode(TEXT).ids)
    made = engine.generate([Request("text", prompt, tokens, end_ids=(EOS, IM_END), **options)])[0]
    return str(tokenizer.decode([token for token in made.token_ids if token not in (EOS, IM_END)]))


def test_ensemble_answers_the_text_of_the_engine(client: Client, tiny_model: Model, engine: ReferenceEngine) -> None:
    (text,) = texts(client.ask("ensemble", text_inputs()))
    assert text == expected_text(tiny_model, engine)
    assert TEXT not in text


def test_streamed_text_adds_up_to_the_whole_text(client: Client, tiny_model: Model, engine: ReferenceEngine) -> None:
    parts = texts(client.ask("ensemble", text_inputs(stream=[True])))
    assert "".join(parts) == expected_text(tiny_model, engine)


def test_slow_stream_comes_in_parts_that_add_up(slow_client: Client) -> None:
    (whole,) = texts(slow_client.ask("ensemble", text_inputs(tokens=60)))
    parts = texts(slow_client.ask("ensemble", text_inputs(tokens=60, stream=[True])))
    assert "".join(parts) == whole
    assert len(parts) > 1


def test_ensemble_gives_every_output_of_nvidias(client: Client) -> None:
    answer = client.ask("ensemble", text_inputs(tokens=5, return_log_probs=[True]))
    response = answer.responses[0]
    assert response["output_log_probs"].shape == (1, 1, 5)
    assert response["cum_log_probs"][0][0] == pytest.approx(response["output_log_probs"].sum(), rel=1e-5)
    # "<s>", "User:", and " the": BOS is added once.
    assert response["num_input_tokens"].tolist() == [[3]]
    assert {"context_logits", "generation_logits", "sequence_index", "batch_index"} <= response.keys()


def test_bos_in_the_text_is_not_doubled(client: Client) -> None:
    answer = client.ask("ensemble", text_inputs("<s>" + TEXT, tokens=1))
    assert answer.responses[0]["num_input_tokens"].tolist() == [[3]]


def test_stop_word_that_is_cut_otherwise_in_context_still_stops(client: Client) -> None:
    # "User:" is one token, and after a newline another one; the bias makes the model say the second.
    answer = client.ask(
        "ensemble",
        text_inputs(tokens=20, stop_words=["User:"], embedding_bias_words=["\nUser:"], embedding_bias_weights=[1000.0]),
    )
    assert texts(answer) == ["\nUser:"]


def test_second_end_id_of_the_model_ends_the_text_without_a_marker(client: Client) -> None:
    answer = client.ask(
        "ensemble", text_inputs(tokens=20, embedding_bias_words=["<|im_end|>"], embedding_bias_weights=[1000.0])
    )
    assert texts(answer) == [""]


def test_error_of_a_step_reaches_the_client(client: Client) -> None:
    assert "beam_width is 3" in client.ask("ensemble", text_inputs(beam_width=[3])).error
    answer = client.ask("ensemble", text_inputs(embedding_bias_words=["a"]))
    assert "1 embedding_bias_words but 0 embedding_bias_weights" in answer.error


def test_stop_request_with_the_ensembles_id_ends_it(slow_client: Client) -> None:
    stream = slow_client.start("ensemble", text_inputs(tokens=4000, stream=[True]), request_id="text-1")
    stream.next()
    stop = {"input_ids": [5], "input_lengths": [1], "request_output_len": [1], "stop": [True]}
    slow_client.ask("tensorrt_llm", stop, request_id="text-1")
    answer = stream.rest()
    assert answer.error == ""
    assert len(answer.responses) < 4000
