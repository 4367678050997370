"""The tensors of a request become engine requests; what cannot be done is refused."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import numpy as np
import pytest


@pytest.fixture(scope="module")
def parse(llm_request: ModuleType) -> Any:
    limits = llm_request.Limits(vocab_size=50, max_seq_len=16, exclude_input=True)

    def parse_one(**inputs: Any) -> Any:
        given = {"input_ids": [1, 2, 3], "input_lengths": [3], "request_output_len": [5], **inputs}
        tensors = {name: np.asarray(value)[np.newaxis] for name, value in given.items()}
        (call,) = llm_request.parse_calls(tensors, limits, 7)
        return call

    return parse_one


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({}, {"temperature": 0.0}),
        ({"temperature": [0.7]}, {"temperature": 0.0}),  # no top-k, no top-p: the backend is greedy
        ({"temperature": [0.7], "runtime_top_p": [1.0]}, {"temperature": 0.7, "top_p": 1.0}),
        ({"runtime_top_p": [0.9]}, {"temperature": 1.0, "top_p": 0.9}),
        ({"runtime_top_k": [1], "runtime_top_p": [0.9]}, {"temperature": 0.0}),
        ({"runtime_top_k": [40]}, {"temperature": 1.0, "top_k": 40, "top_p": 1.0}),
        ({"runtime_top_k": [40], "runtime_top_p": [0.0]}, {"temperature": 1.0, "top_k": 40, "top_p": 1.0}),
        ({"min_p": [0.1]}, {"temperature": 1.0, "min_p": pytest.approx(0.1)}),
        ({"seed": [2**63]}, {"seed": 2**63}),
        ({"frequency_penalty": [0.5]}, {"frequency_penalty": 0.5}),
        ({"embedding_bias": np.eye(1, 50, 4)[0]}, {"logit_bias": {4: 1.0}}),
        ({"bad_words_list": [[9, 8], [1, 2]]}, {"logit_bias": {9: -math.inf, 8: -math.inf}}),
    ],
)
def test_sampling_follows_the_backends_defaults(parse: Any, inputs: Any, expected: dict[str, Any]) -> None:
    sampling = parse(**inputs).template.sampling
    assert {name: getattr(sampling, name) for name in expected} == expected


def test_absent_or_negative_end_id_runs_to_the_limit(parse: Any) -> None:
    assert parse().template.end_ids == ()
    assert parse(end_id=[-1]).template.end_ids == ()
    assert parse(end_id=[2]).template.end_ids == (2,)


def test_output_length_is_clipped_to_what_the_context_leaves(parse: Any) -> None:
    assert parse(request_output_len=[100]).template.max_tokens == 13


def test_prompt_may_fill_the_context_only_when_no_token_is_wanted(parse: Any, llm_request: ModuleType) -> None:
    full = {"input_ids": [1] * 16, "input_lengths": [16]}
    assert parse(**full, request_output_len=[0]).template.max_tokens == 0
    with pytest.raises(llm_request.RequestError, match=r"Prompt length \(16\) exceeds maximum input length \(15\)"):
        parse(**full)


def test_word_lists_are_split_at_their_offsets(llm_request: ModuleType) -> None:
    packed = np.array([[5, 6, 7, 0], [2, 3, -1, -1]], np.int32)
    assert llm_request.word_list(packed, "stop_words_list") == ((5, 6), (7,))


@pytest.mark.parametrize("offsets", [[2, 1, -1], [4, -1, -1], [1, -1, 2], [0, 2, 3]])
def test_word_list_with_bad_offsets_is_refused(llm_request: ModuleType, offsets: list[int]) -> None:
    with pytest.raises(llm_request.RequestError, match="stop_words_list has"):
        llm_request.word_list(np.array([[5, 6, 7], offsets], np.int32), "stop_words_list")


def test_sequences_get_seeds_of_their_own_and_score_the_prompt_once(parse: Any) -> None:
    call = parse(num_return_sequences=[3], seed=[2**64 - 1], runtime_top_p=[1.0], return_prompt_logprobs=[0])
    requests = call.engine_requests("9.0")
    assert [request.sampling.seed for request in requests] == [2**64 - 1, 0, 1]
    assert [request.prompt_logprobs for request in requests] == [0, None, None]
    assert len({request.request_id for request in requests}) == 3


def test_streamed_answer_never_repeats_the_prompt(parse: Any) -> None:
    assert parse(exclude_input_in_output=[False]).include_input
    assert not parse(exclude_input_in_output=[False], streaming=[True]).include_input
    assert not parse().include_input


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({"input_ids": []}, "input_ids is missing or empty"),
        ({"input_lengths": [4]}, "input_lengths is 4, expected 1 to 3"),
        ({"input_ids": [1, -1, 3]}, "input_ids holds -1"),
        ({"request_output_len": [-2]}, "request_output_len is -2"),
        ({"num_return_sequences": [0]}, "num_return_sequences is 0"),
        ({"runtime_top_p": [1.5]}, "runtime_top_p is 1.5"),
        ({"temperature": [-0.1]}, "temperature is -0.1"),
        ({"repetition_penalty": [0.0]}, "repetition_penalty is 0"),
        ({"bad_words_list": [[1, 2], [2, -1]]}, "a word of 2 tokens"),
        ({"embedding_bias": np.full(50, np.nan)}, "embedding_bias holds NaN"),
        ({"guided_decoding_guide_type": np.array([b"json"], np.object_)}, "guided decoding is not supported"),
        ({"lora_weights": np.zeros((2, 3))}, "LoRA is not supported"),
        ({"runtime_top_p_decay": [0.9]}, "runtime_top_p_decay"),
    ],
)
def test_impossible_request_is_refused(parse: Any, llm_request: ModuleType, inputs: Any, text: str) -> None:
    with pytest.raises(llm_request.RequestError, match=text):
        parse(**inputs)


def test_neutral_values_of_unsupported_inputs_are_accepted(parse: Any) -> None:
    call = parse(
        beam_width=[1],
        len_penalty=[1.0],
        draft_input_ids=np.zeros(0, np.int32),
        guided_decoding_guide_type=np.array([b""], np.object_),
        retention_decode_priority=[50],
        early_stopping=[True],
    )
    assert call.sequences == 1
