"""The model `tensorrt_llm` of a reference repository, in a real tritonserver.

Expected tokens and log probabilities come from the same engine run in this process on the same checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from triton_client import Client
from triton_models import MAX_SEQ_LEN, SLOW_SEQ_LEN, VOCAB_SIZE

from pipeline.engines.reference import ReferenceEngine, Request

pytestmark = pytest.mark.triton

PROMPT = (60, 70, 80)


def llm_inputs(prompt: tuple[int, ...] = PROMPT, tokens: int = 12, **more: Any) -> dict[str, Any]:
    return {"input_ids": list(prompt), "input_lengths": [len(prompt)], "request_output_len": [tokens], **more}


def greedy(engine: ReferenceEngine, tokens: int = 12, **options: Any) -> list[int]:
    return list(engine.generate([Request("expected", PROMPT, tokens, **options)])[0].token_ids)


def word_list(*words: list[int]) -> np.ndarray:
    flat = [token for word in words for token in word]
    ends = list(np.cumsum([len(word) for word in words]))
    return np.array([flat, ends + [-1] * (len(flat) - len(ends))], np.int32)


def test_stream_holds_only_new_tokens_and_ends_with_the_final_flag(client: Client, engine: ReferenceEngine) -> None:
    answer = client.ask("tensorrt_llm", llm_inputs(streaming=[True]))
    assert answer.tokens() == greedy(engine)
    assert answer.finish_reason == "length"


def test_tokens_arrive_while_the_others_are_made(slow_client: Client) -> None:
    answer = slow_client.ask("tensorrt_llm", llm_inputs(tokens=40, streaming=[True]))
    assert len(answer.tokens()) == 40
    assert len([response for response in answer.responses if response]) > 1


def test_answer_leaves_the_prompt_out_unless_asked(client: Client, engine: ReferenceEngine) -> None:
    plain = client.ask("tensorrt_llm", llm_inputs())
    with_prompt = client.ask("tensorrt_llm", llm_inputs(exclude_input_in_output=[False]))
    assert plain.tokens() == greedy(engine)
    assert with_prompt.tokens() == [*PROMPT, *greedy(engine)]
    assert len(plain.responses) == 1


def test_end_id_ends_the_answer_and_is_not_part_of_it(client: Client, engine: ReferenceEngine) -> None:
    expected = greedy(engine)
    answer = client.ask("tensorrt_llm", llm_inputs(end_id=[expected[4]], streaming=[True]))
    assert answer.tokens() == expected[:4]
    assert answer.finish_reason == "stop"


def test_stop_word_ends_the_answer_and_stays_in_it(client: Client, engine: ReferenceEngine) -> None:
    expected = greedy(engine)
    answer = client.ask("tensorrt_llm", llm_inputs(stop_words_list=word_list([9, 9], expected[3:5])))
    assert answer.tokens() == expected[:5]
    assert answer.finish_reason == "stop"


def test_bad_word_is_never_generated(client: Client, engine: ReferenceEngine) -> None:
    banned = greedy(engine)[0]
    assert banned not in client.ask("tensorrt_llm", llm_inputs(bad_words_list=word_list([banned]))).tokens()


def test_embedding_bias_is_added_to_the_logits(client: Client) -> None:
    bias = np.zeros(VOCAB_SIZE, np.float32)
    bias[42] = 1000.0
    assert client.ask("tensorrt_llm", llm_inputs(tokens=3, embedding_bias=bias)).tokens() == [42, 42, 42]


def test_log_probs_are_the_whole_list_so_far_and_agree_with_the_engine(client: Client, engine: ReferenceEngine) -> None:
    expected = engine.generate([Request("expected", PROMPT, 6, logprobs=3, prompt_logprobs=2)])[0]
    answer = client.ask(
        "tensorrt_llm",
        llm_inputs(
            tokens=6, streaming=[True], return_log_probs=[True], return_top_logprobs=[3], return_prompt_logprobs=[2]
        ),
    )
    made: list[int] = []
    for response in [response for response in answer.responses if response]:
        new = response["output_ids"][0][0].tolist()
        made += new
        own = [entry.logprob for entry in expected.logprobs[: len(made)]]
        np.testing.assert_allclose(response["output_log_probs"][0][0], own, rtol=1e-5)
        np.testing.assert_allclose(response["cum_log_probs"][0][0], sum(own), rtol=1e-5)
        top = [entry.top for entry in expected.logprobs[len(made) - len(new) : len(made)]]
        assert response["top_logprobs_ids"][0].tolist() == [[token for token, _ in row] for row in top]
        np.testing.assert_allclose(response["top_logprobs"][0], [[value for _, value in row] for row in top], rtol=1e-5)


def test_prompt_log_probs_are_in_the_first_response_only(client: Client, engine: ReferenceEngine) -> None:
    logits = engine.logits(PROMPT).astype(np.float64)
    scores = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    answer = client.ask("tensorrt_llm", llm_inputs(tokens=3, streaming=[True], return_prompt_logprobs=[2]))
    first, *later = [response for response in answer.responses if response]
    own = first["prompt_token_logprobs"][0]
    assert np.isnan(own[0])
    np.testing.assert_allclose(own[1:], [scores[0, 70], scores[1, 80]], rtol=1e-4)
    assert first["prompt_top_ids"].shape == (1, 3, 2)
    assert first["prompt_top_ids"][0, 1].tolist() == np.argsort(-scores[0])[:2].tolist()
    assert all("prompt_token_logprobs" not in response for response in later)


def test_scoring_alone_makes_no_token(client: Client) -> None:
    answer = client.ask("tensorrt_llm", llm_inputs(tokens=0, return_prompt_logprobs=[0]))
    assert answer.tokens() == []
    assert answer.finish_reason == "length"
    assert answer.responses[0]["prompt_token_logprobs"].shape == (1, 3)


def test_logits_have_the_shapes_of_the_backend(client: Client, engine: ReferenceEngine) -> None:
    answer = client.ask(
        "tensorrt_llm", llm_inputs(tokens=4, return_context_logits=[True], return_generation_logits=[True])
    )
    context = answer.responses[0]["context_logits"]
    assert context.shape == (1, 3, VOCAB_SIZE)
    assert answer.responses[0]["generation_logits"].shape == (1, 1, 4, VOCAB_SIZE)
    np.testing.assert_allclose(context[0], engine.logits(PROMPT), rtol=1e-4, atol=1e-5)


def test_only_asked_outputs_are_sent(client: Client) -> None:
    answer = client.ask("tensorrt_llm", llm_inputs(tokens=2), outputs=["output_ids", "sequence_length"])
    assert set(answer.responses[0]) == {"output_ids", "sequence_length"}


def test_sequences_differ_and_repeat_with_a_seed(client: Client) -> None:
    sampling = {"num_return_sequences": [3], "runtime_top_p": [1.0], "temperature": [1.5]}
    seeded = llm_inputs(tokens=10, seed=np.array([7], np.uint64), **sampling)
    first, second = client.ask("tensorrt_llm", seeded), client.ask("tensorrt_llm", seeded)
    texts = [tuple(first.tokens(sequence)) for sequence in range(3)]
    assert len(set(texts)) == 3
    assert texts == [tuple(second.tokens(sequence)) for sequence in range(3)]
    unseeded = {tuple(client.ask("tensorrt_llm", llm_inputs(tokens=10, **sampling)).tokens()) for _ in range(3)}
    assert len(unseeded) > 1


def test_streamed_sequences_interleave_and_the_last_response_is_final(client: Client) -> None:
    answer = client.ask(
        "tensorrt_llm",
        llm_inputs(tokens=8, streaming=[True], num_return_sequences=[2], runtime_top_p=[1.0], temperature=[2.0]),
    )
    assert [len(answer.tokens(sequence)) for sequence in range(2)] == [8, 8]
    ends = [response["sequence_index"][0][0] for response in answer.responses if "finish_reason" in response]
    assert sorted(ends) == [0, 1]


def test_rows_of_one_request_are_answered_by_index(client: Client, engine: ReferenceEngine) -> None:
    inputs = {
        "input_ids": [[60, 70, 80], [5, 6, 0]],
        "input_lengths": [[3], [2]],
        "request_output_len": [[4], [4]],
    }
    stream = client.start("tensorrt_llm", inputs, is_batched=True)
    rows = {int(response["batch_index"][0][0]): response for response in stream.rest().responses if response}
    assert rows[0]["output_ids"][0][0].tolist() == greedy(engine, 4)
    expected = engine.generate([Request("row", (5, 6), 4)])[0].token_ids
    assert rows[1]["output_ids"][0][0].tolist() == list(expected)


def test_output_length_is_clipped_to_the_context(client: Client) -> None:
    answer = client.ask("tensorrt_llm", llm_inputs(tokens=10 * MAX_SEQ_LEN))
    assert len(answer.tokens()) == MAX_SEQ_LEN - len(PROMPT)
    assert answer.finish_reason == "length"


LIMIT = MAX_SEQ_LEN - 1


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        (llm_inputs((5,) * MAX_SEQ_LEN), f"Prompt length ({MAX_SEQ_LEN}) exceeds maximum input length ({LIMIT})"),
        (llm_inputs(beam_width=[2]), "beam_width is 2"),
        (llm_inputs(lora_task_id=np.array([3], np.uint64)), "lora_task_id: LoRA is not supported"),
        (llm_inputs(draft_input_ids=[4, 5]), "draft tokens is not supported"),
        (llm_inputs((5, VOCAB_SIZE)), f"input_ids holds {VOCAB_SIZE}"),
        (llm_inputs(temperature=[float("nan")]), "temperature is nan"),
        (llm_inputs(stop_words_list=np.array([[1], [5]], np.int32)), "stop_words_list has offset 5"),
        (llm_inputs(embedding_bias=np.zeros(3, np.float32)), f"embedding_bias has 3 values, expected {VOCAB_SIZE}"),
        (llm_inputs(nonsense=[1]), "unexpected inference input 'nonsense' for model 'tensorrt_llm'"),
    ],
    ids=["too-long", "beam", "lora", "draft", "id", "nan", "offsets", "bias", "unknown-input"],
)
def test_bad_request_is_refused_by_name_and_the_next_one_works(
    client: Client, inputs: Mapping[str, Any], text: str
) -> None:
    answer = client.ask("tensorrt_llm", inputs)
    assert text in answer.error
    assert "Traceback" not in answer.error
    assert len(client.ask("tensorrt_llm", llm_inputs(tokens=2)).tokens()) == 2


def long_inputs() -> dict[str, Any]:
    return llm_inputs(tokens=SLOW_SEQ_LEN - len(PROMPT), streaming=[True])


def test_stop_request_with_the_same_id_cancels(slow_client: Client) -> None:
    stream = slow_client.start("tensorrt_llm", long_inputs(), request_id="stop-me")
    first, _ = stream.next()
    assert first["output_ids"].size
    stopped = slow_client.ask("tensorrt_llm", llm_inputs(tokens=1, stop=[True]), request_id="stop-me")
    assert stopped.error == ""
    assert stopped.responses == [{}]
    answer = stream.rest()
    assert answer.finish_reason == "cancelled"
    assert len(answer.tokens()) < SLOW_SEQ_LEN // 2


def test_stop_request_needs_an_id_and_ignores_an_unknown_one(client: Client) -> None:
    assert "stop needs the request id" in client.ask("tensorrt_llm", llm_inputs(stop=[True])).error
    assert client.ask("tensorrt_llm", llm_inputs(stop=[True]), request_id="nobody").error == ""


def test_cancelled_calls_free_their_slots(slow_client: Client) -> None:
    streams = [slow_client.start("tensorrt_llm", long_inputs()) for _ in range(2)]  # as many as the engine has slots
    for stream in streams:
        stream.next()
        stream.close(cancel=True)
    # With both slots busy this answer would come after thousands of steps, beyond the time limit of the client here.
    assert len(slow_client.ask("tensorrt_llm", llm_inputs(tokens=1)).tokens()) == 1


def test_request_joins_a_running_batch(slow_client: Client) -> None:
    slow = slow_client.start("tensorrt_llm", long_inputs())
    slow.next()
    assert len(slow_client.ask("tensorrt_llm", llm_inputs(tokens=5)).tokens()) == 5
    assert not slow.is_done
    slow.close(cancel=True)
