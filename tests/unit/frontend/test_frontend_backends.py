"""Wire format of Triton requests and answers, the pool of servers, classification of errors."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frontend_fakes import TOKENIZERS, ScriptedBackend
from tritonclient.grpc import model_config_pb2, service_pb2

from pipeline.engines.reference.request import Sampling
from pipeline.errors import SourceError
from pipeline.frontend.backend import (
    BackendError,
    BackendOverloaded,
    BackendUnavailable,
    Chunk,
    GenerateRequest,
    Logprob,
    PromptRejected,
)
from pipeline.frontend.backend_pool import BackendPool, Probe
from pipeline.frontend.generation import Answer, EndRules
from pipeline.frontend.logits import score
from pipeline.frontend.lora import read_adapter
from pipeline.frontend.tokenizer import Tokenizer
from pipeline.frontend.triton_backend import TritonBackend, classify
from pipeline.frontend.triton_text import TextInterface
from pipeline.frontend.triton_wire import ModelInterface

BASE = {"input_ids": "INT32", "input_lengths": "INT32", "request_output_len": "INT32", "streaming": "BOOL"}
OUTPUTS = {"output_ids": ("INT32", 2), "sequence_length": ("INT32", 1)}


def interface(
    inputs: dict[str, str] = BASE, outputs: dict[str, tuple[str, int]] = OUTPUTS, *, decoupled: bool = True,
    gathered: bool = False, vocab_size: int | None = None, **parameters: str,
) -> ModelInterface:  # fmt: skip
    config = model_config_pb2.ModelConfig(name="m", max_batch_size=4)
    config.model_transaction_policy.decoupled = decoupled
    for name, kind in inputs.items():
        dims = [2, -1] if name == "stop_words_list" else [-1] if name in ("input_ids", "embedding_bias") else [1]
        config.input.add(name=name, data_type=f"TYPE_{kind}", dims=dims)
    for name, (kind, rank) in outputs.items():
        config.output.add(name=name, data_type=f"TYPE_{kind}", dims=[-1] * rank)
    for key, value in parameters.items():
        config.parameters[key].string_value = value
    return ModelInterface.from_config(config, gathered_logits=gathered, vocab_size=vocab_size)


def request(**values: Any) -> GenerateRequest:
    return GenerateRequest(**{"request_id": "r", "token_ids": [5, 6, 7], "max_tokens": 4, **values})


def sent(message: Any) -> dict[str, tuple[str, list[int], Any]]:
    kinds = {"INT32": np.int32, "UINT32": np.uint32, "UINT64": np.uint64, "FP32": np.float32, "BOOL": np.bool_}
    found = {}
    for tensor, raw in zip(message.inputs, message.raw_input_contents, strict=True):
        value = raw[4:].decode() if tensor.datatype == "BYTES" else np.frombuffer(raw, kinds[tensor.datatype]).tolist()
        found[tensor.name] = (tensor.datatype, list(tensor.shape), value)
    return found


def answer(**tensors: np.ndarray) -> Any:
    response = service_pb2.ModelInferResponse()
    for name, array in tensors.items():
        response.outputs.add(name=name, shape=array.shape)
        response.raw_output_contents.append(array.tobytes())
    return response


def ids(*values: int) -> dict[str, np.ndarray]:
    return {"output_ids": np.array([[values]], np.int32), "sequence_length": np.array([[len(values)]], np.int32)}


def test_only_known_inputs_are_sent_with_their_declared_types() -> None:
    message = interface({**BASE, "input_lengths": "UINT32", "runtime_top_k": "UINT32"}).encode(request())
    assert sent(message) == {
        "input_ids": ("INT32", [1, 3], [5, 6, 7]),
        "input_lengths": ("UINT32", [1, 1], [3]),
        "request_output_len": ("INT32", [1, 1], [4]),
        "streaming": ("BOOL", [1, 1], [True]),
        "runtime_top_k": ("UINT32", [1, 1], [1]),
    }
    assert [tensor.name for tensor in message.outputs] == ["output_ids", "sequence_length"]


@pytest.mark.parametrize(("seed", "minimum"), [("seed", "min_tokens"), ("random_seed", "min_length")])
def test_renamed_inputs_are_sent_under_the_model_s_name(seed: str, minimum: str) -> None:
    sampling = Sampling(temperature=0.5, seed=2**64 - 1)
    values = sent(
        interface({**BASE, seed: "UINT64", minimum: "INT32"}).encode(request(sampling=sampling, min_tokens=2))
    )
    assert values[seed][2] == [2**64 - 1] and values[minimum][2] == [2]


def test_greedy_and_sampled_requests_are_explicit() -> None:
    full = interface(
        {**BASE, "runtime_top_k": "INT32", "runtime_top_p": "FP32", "temperature": "FP32", "seed": "UINT64"}
    )
    greedy = sent(full.encode(request(sampling=Sampling(temperature=0.0, seed=1))))
    assert (greedy["runtime_top_k"][2], greedy["temperature"][2]) == ([1], [1.0]) and "seed" not in greedy
    sampled = sent(full.encode(request(sampling=Sampling(temperature=0.5, top_p=1.0, seed=1))))
    assert (sampled["runtime_top_k"][2], sampled["runtime_top_p"][2]) == ([0], [1.0])


def test_stop_words_and_bias_have_the_backend_s_layout() -> None:
    both = interface({**BASE, "stop_words_list": "INT32", "embedding_bias": "FP32"}, vocab_size=6)
    values = sent(both.encode(request(stop_words=((3, 4), (5,)), sampling=Sampling(logit_bias={2: 1.5}))))
    assert values["stop_words_list"] == ("INT32", [1, 2, 3], [3, 4, 5, 2, 3, -1])
    assert values["embedding_bias"] == ("FP32", [1, 6], [0, 0, 1.5, 0, 0, 0])


@pytest.mark.parametrize(
    "sampling",
    [Sampling(min_p=0.1, temperature=1.0), Sampling(presence_penalty=1.0), Sampling(repetition_penalty=1.1)],
)
def test_value_the_model_has_no_input_for_is_rejected(sampling: Sampling) -> None:
    with pytest.raises(PromptRejected, match="does not support"):
        interface().encode(request(sampling=sampling))


def test_scoring_only_asks_engines_for_one_token() -> None:
    assert sent(interface().encode(request(max_tokens=0)))["request_output_len"][2] == [1]
    native = interface({**BASE, "return_prompt_logprobs": "INT32"})
    assert sent(native.encode(request(max_tokens=0)))["request_output_len"][2] == [0]


def test_guided_decoding_counts_only_when_a_backend_is_set() -> None:
    inputs = {**BASE, "guided_decoding_guide_type": "STRING", "guided_decoding_guide": "STRING"}
    assert interface(inputs, guided_decoding_backend="xgrammar").features.guided
    assert not interface(inputs).features.guided
    assert not interface(inputs, guided_decoding_backend="${guided_decoding_backend}").features.guided


def test_new_tokens_are_read_from_every_shape_of_answer() -> None:
    decode = interface().decode
    assert decode(answer(**ids(9)), request(), first=True) == Chunk((9,))
    assert decode(answer(**ids(9, 10)), request(), first=True).token_ids == [9, 10]
    assert not decode(answer(**ids()), request(), first=False).token_ids
    padded = {"output_ids": np.array([[[9, -1, -1]]], np.int32), "sequence_length": np.array([[1]], np.int32)}
    assert decode(answer(**padded), request(), first=True).token_ids == [9]
    reason = np.frombuffer(b"\4\0\0\0stop", np.uint8)
    assert decode(answer(**ids(9), finish_reason=reason), request(), first=True).finish_reason == "stop"


def test_prompt_is_cut_from_answers_that_repeat_it() -> None:
    whole = answer(**ids(5, 6, 7, 9))
    assert interface(decoupled=False).decode(whole, request(stream=False), first=True).token_ids == [9]
    excluded = interface(decoupled=False, exclude_input_in_output="True")
    assert excluded.decode(answer(**ids(9, 8)), request(stream=False), first=True).token_ids == [9, 8]


def test_log_probs_are_the_tail_of_the_list_and_tops_are_sorted() -> None:
    outputs = {
        **OUTPUTS,
        "output_log_probs": ("FP32", 2),
        "top_logprobs": ("FP32", 2),
        "top_logprobs_ids": ("INT32", 2),
    }
    known = interface({**BASE, "return_log_probs": "BOOL", "return_top_logprobs": "INT32"}, outputs)
    response = answer(
        **ids(9),
        output_log_probs=np.array([[[-1, -2, -3]]], np.float32),
        top_logprobs_ids=np.array([[[4, 9]]], np.int32),
        top_logprobs=np.array([[[-5, -3]]], np.float32),
    )
    chunk = known.decode(response, request(logprobs=2), first=False)
    assert chunk.logprobs == [Logprob(9, -3.0, [(9, -3.0), (4, -5.0)])]


def test_prompt_log_probs_come_with_the_first_answer_only() -> None:
    outputs = {**OUTPUTS, "prompt_token_logprobs": ("FP32", 1)}
    known = interface({**BASE, "return_prompt_logprobs": "INT32"}, outputs)
    response = answer(**ids(9), prompt_token_logprobs=np.array([[math.nan, -1, -2]], np.float32))
    chunk = known.decode(response, request(prompt_logprobs=0), first=True)
    assert chunk.prompt_logprobs == [None, Logprob(6, -1.0, ()), Logprob(7, -2.0, ())]
    assert known.decode(answer(**ids(9)), request(prompt_logprobs=0), first=False).prompt_logprobs is None


@pytest.mark.parametrize("kind", [np.float16, np.float32])
def test_gathered_logits_become_log_probs(kind: type) -> None:
    rows = np.array([[1, 2, 0], [0, 0, 3], [5, 1, 1]], kind)
    expected = rows.astype(np.float64) - np.log(np.exp(rows.astype(np.float64)).sum(-1, keepdims=True))
    found = score(rows, [0, 2, 0], 2)
    assert [entry.logprob for entry in found] == pytest.approx(
        [expected[0, 0], expected[1, 2], expected[2, 0]], abs=1e-5
    )
    assert [index for index, _ in found[0].top] == [1, 0]
    name = "FP16" if kind is np.float16 else "FP32"
    inputs = {**BASE, "return_log_probs": "BOOL", "return_context_logits": "BOOL", "return_generation_logits": "BOOL"}
    outputs = {**OUTPUTS, "output_log_probs": ("FP32", 2), "context_logits": (name, 2), "generation_logits": (name, 3)}
    known = interface(inputs, outputs, gathered=True)
    assert known.features.top_logprobs and known.features.prompt_logprobs
    asked = request(token_ids=[0, 2, 0], logprobs=1, prompt_logprobs=1)
    response = answer(**ids(2), context_logits=rows[None], generation_logits=rows[None, None, 1:2])
    chunk = known.decode(response, asked, first=True)
    assert chunk.logprobs[0].logprob == pytest.approx(expected[1, 2], abs=1e-5)
    assert chunk.prompt_logprobs is not None and chunk.prompt_logprobs[1].logprob == pytest.approx(
        expected[0, 2], abs=1e-5
    )  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Prompt length (70) exceeds maximum input length (64). Set log level", PromptRejected),
        ("input lora_task_id: LoRA is not supported by the reference engine", PromptRejected),
        ("Maximum queue size has been reached", BackendOverloaded),
        ("Request for unknown model: 'm' is not found", BackendUnavailable),
        ("Traceback: ValueError", BackendError),
    ],
)
def test_errors_that_are_only_text_are_told_apart(text: str, kind: type[BackendError]) -> None:
    assert type(classify(text)) is kind


def test_pool_prefers_the_least_loaded_and_moves_on_when_one_is_away() -> None:
    async def go() -> None:
        first, second = ScriptedBackend(lambda _: [9, 9]), ScriptedBackend(lambda _: [9, 9])
        pool = BackendPool([("a", first), ("b", second)], period_s=60)
        busy = pool.generate(request())
        await anext(busy)
        assert [chunk.token_ids async for chunk in pool.generate(request())]
        assert (len(first.requests), len(second.requests)) == (1, 1)
        await busy.aclose()
        first.failure = BackendUnavailable("gone")
        assert len([chunk async for chunk in pool.generate(request())]) == 2
        assert [member.healthy for member in pool.members] == [False, True]
        await pool.check()
        assert [member.healthy for member in pool.members] == [True, True]
        second.failure = first.failure
        with pytest.raises(BackendUnavailable):
            async for _ in pool.generate(request()):
                pass
        second.fail_at = first.fail_at = 1
        found = []
        with pytest.raises(BackendUnavailable):
            async for chunk in pool.generate(request()):
                found.append(chunk)
        assert len(found) == 1, "a sequence that has begun is not started again elsewhere"
        assert all(member.running == 0 for member in pool.members)

    asyncio.run(go())


def test_a_server_that_makes_no_tokens_is_not_ready_until_it_does_again() -> None:
    class Stalling(ScriptedBackend):
        """Says that it is ready, and answers only while ``open``."""

        open = asyncio.Event()

        async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
            await self.open.wait()
            async for chunk in super().generate(request):
                yield chunk

    async def go() -> None:
        backend = Stalling(lambda _: [9])
        backend.open = asyncio.Event()
        probe = Probe(request(), period_s=0.05, timeout_s=0.1)
        pool = BackendPool([("a", backend)], period_s=60, probe=probe)
        assert not await pool.is_ready(), "it has not made a token yet"
        backend.open.set()
        assert await pool.is_ready()
        made = len(backend.requests)
        assert await pool.is_ready()
        assert len(backend.requests) == made, "a fresh sign of life counts"
        backend.open.clear()
        await asyncio.sleep(0.06)
        assert not await pool.is_ready(), "it did not answer within the time it has"
        backend.open.set()
        assert await pool.is_ready()
        backend.ready = False
        assert not await pool.is_ready()
        backend.ready, backend.failure = True, BackendError("broken")
        assert not await pool.is_ready(), "after a restart it has to prove itself again"
        backend.failure = None
        assert await pool.is_ready()
        await pool.close()

    asyncio.run(go())


def text_interface(*inputs: str, outputs: Sequence[str] = ("text_output",)) -> TextInterface:
    config = model_config_pb2.ModelConfig(name="ensemble", max_batch_size=4)
    config.model_transaction_policy.decoupled = True
    kinds = {"text_input": "STRING", "stream": "BOOL", "temperature": "FP32", "top_p": "FP32", "random_seed": "UINT64"}
    for name in ("text_input", "max_tokens", "stream", "temperature", "top_k", "top_p", *inputs):
        config.input.add(name=name, data_type=f"TYPE_{kinds.get(name, 'INT32')}", dims=[1])
    for name in outputs:
        config.output.add(name=name, data_type="TYPE_STRING" if name == "text_output" else "TYPE_INT32", dims=[-1])
    return TextInterface.from_config(config)


def test_a_text_model_gets_text_under_its_own_names() -> None:
    known = text_interface("random_seed", "end_id")
    values = sent(known.encode(request(text="Hé", end_id=2, sampling=Sampling(temperature=0.5, top_p=0.9, seed=7))))
    assert values["text_input"] == ("BYTES", [1, 1], "Hé")
    assert values["random_seed"] == ("UINT64", [1, 1], [7])
    assert {
        name: value[2] for name, value in values.items() if name in ("max_tokens", "top_k", "stream", "end_id")
    } == {
        "max_tokens": [4],
        "top_k": [0],
        "stream": [True],
        "end_id": [2],
    }
    assert sent(known.encode(request(text="a")))["top_k"][2] == [1], "temperature 0 is greedy"
    with pytest.raises(PromptRejected, match="presence_penalty"):
        known.encode(request(text="a", sampling=Sampling(presence_penalty=1.0)))


@pytest.mark.parametrize("counts", [True, False])
def test_text_of_a_text_model_is_cut_and_counted(counts: bool) -> None:
    known = text_interface(
        *(["return_num_output_tokens"] if counts else []), outputs=("text_output", "num_output_tokens")
    )
    response = service_pb2.ModelInferResponse()
    for name, data in (("text_output", b"\2\0\0\0ab"), ("num_output_tokens", b"\3\0\0\0")):
        response.outputs.add(name=name)
        response.raw_output_contents.append(data)
    chunk = known.decode(response, request(), first=True)
    assert chunk == Chunk((), text="ab", text_tokens=3 if counts else None)
    tokenizer = Tokenizer(TOKENIZERS / "byte_level")
    answer = Answer(tokenizer, EndRules(max_tokens=50, stop_strings=("STOP",)))
    shown = [answer.push(part)[0] for part in (chunk, Chunk((), text="ST"), Chunk((), text="OP more"))]
    assert "".join(shown) == "ab"
    assert (answer.finish_reason, answer.cut) == ("stop", True)
    assert answer.completion_tokens >= (3 if counts else 1)


def test_an_adapter_is_sent_once_and_again_when_the_server_dropped_it(tmp_path: Path) -> None:
    np.save(tmp_path / "model.lora_weights.npy", np.ones((1, 2, 6), np.float32))
    np.save(tmp_path / "model.lora_config.npy", np.ones((1, 2, 3), np.int32))
    adapter = read_adapter(tmp_path)
    inputs = {**BASE, "lora_task_id": "UINT64", "lora_weights": "FP16", "lora_config": "INT32"}
    known = interface(inputs)
    message = known.encode(request(lora_task_id=3), adapter)
    tensors = {tensor.name: (tensor.datatype, list(tensor.shape)) for tensor in message.inputs}
    assert tensors["lora_weights"] == ("FP16", [1, 2, 6])
    assert tensors["lora_config"] == ("INT32", [1, 2, 3])
    assert "lora_weights" not in sent(known.encode(request(lora_task_id=3)))
    with pytest.raises(PromptRejected, match="lora_weights"):
        interface({**BASE, "lora_task_id": "UINT64"}).encode(request(lora_task_id=3), adapter)

    calls: list[bool] = []

    class Dropping(TritonBackend):
        async def _generate(self, request: GenerateRequest, adapter: Any = None) -> AsyncGenerator[Chunk, None]:
            calls.append(adapter is not None)
            if adapter is None and len(calls) > 2:
                raise classify("LoRA task 3 not found in cache. Please send LoRA weights with request")
            yield Chunk([1])

    async def go() -> None:
        backend = Dropping("127.0.0.1:9", "m", adapters={3: adapter})
        for _ in range(3):
            assert [chunk async for chunk in backend.generate(request(lora_task_id=3))] == [Chunk([1])]

    asyncio.run(go())
    assert calls == [True, False, False, True]


def test_an_adapter_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="lora_weights"):
        read_adapter(tmp_path)
    np.save(tmp_path / "model.lora_weights.npy", np.ones((1, 2, 6), np.float32))
    np.save(tmp_path / "model.lora_config.npy", np.ones((1, 3, 3), np.int32))
    with pytest.raises(SourceError, match="as many rows"):
        read_adapter(tmp_path)


def test_triton_that_is_away_is_unavailable() -> None:
    async def go() -> None:
        backend = TritonBackend("127.0.0.1:9", "m", timeout_s=2)
        assert not await backend.is_ready()
        with pytest.raises(BackendUnavailable):
            await backend.features()
        await backend.close()

    asyncio.run(go())
