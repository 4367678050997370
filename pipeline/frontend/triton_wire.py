"""Requests and answers of a Triton model that takes token ids, as the tensorrt_llm backend defines them.

Tensor names changed between releases and a request with one unknown input fails, so everything is built from the
model's own configuration. Shape letters: P prompt tokens, N new tokens, K alternatives, V vocabulary.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.frontend.backend import Chunk, Features, GenerateRequest, Logprob, PromptRejected
from pipeline.frontend.logits import score
from pipeline.frontend.lora import Adapter

_log = logging.getLogger(__name__)

# Names of the same input, newest release first.
_RENAMED = {"min_tokens": ("min_tokens", "min_length"), "seed": ("seed", "random_seed")}
_LENGTH_PARAMETERS = ("max_seq_len", "max_sequence_length", "max_context_len")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input as the configuration declares it: KServe datatype and number of dimensions."""

    datatype: str
    dims: int


@dataclass(frozen=True, slots=True)
class ModelInterface:
    """What a model takes and gives.

    Attributes:
        model: Name in the repository.
        inputs: Input name to its declaration.
        outputs: Output name to KServe datatype.
        batched: Whether shapes have a leading batch dimension.
        decoupled: Whether tokens can be streamed.
        excludes_input: Whether the model leaves the prompt out of its answers by configuration.
        features: What that means for a client.
        logits: Whether log probabilities may be computed from gathered logits.
    """

    model: str
    inputs: dict[str, TensorSpec]
    outputs: dict[str, str]
    batched: bool
    decoupled: bool
    excludes_input: bool
    features: Features
    logits: bool = False

    @classmethod
    def from_config(
        cls, config: Any, *, gathered_logits: bool = False, vocab_size: int | None = None
    ) -> ModelInterface:
        """Read a ``ModelConfig`` message.

        Args:
            config: ``inference.ModelConfig`` as ``ModelConfig`` RPCs return it.
            gathered_logits: The engine behind the model gathers context and generation logits.
            vocab_size: Length of a logit bias where the parameters do not say it.
        """
        inputs, outputs = declared(config)
        parameters = {key: value.string_value for key, value in config.parameters.items()}
        if vocab_size is not None:
            parameters.setdefault("vocab_size", str(vocab_size))
        logits = gathered_logits and "return_generation_logits" in inputs
        return cls(
            model=config.name,
            inputs=inputs,
            outputs=outputs,
            batched=config.max_batch_size > 0,
            decoupled=config.model_transaction_policy.decoupled,
            excludes_input=parameters.get("exclude_input_in_output", "").lower() in ("true", "1"),
            features=_features(inputs, outputs, parameters, logits=logits),
            logits=logits,
        )

    def encode(self, request: GenerateRequest, adapter: Adapter | None = None) -> Any:
        """Return the ``ModelInferRequest``.

        Args:
            request: What to generate.
            adapter: Weights to send along with the request's ``lora_task_id``.

        Raises:
            PromptRejected: A field was asked for that this model has no input for.
        """
        from tritonclient.grpc import service_pb2

        message = service_pb2.ModelInferRequest(model_name=self.model, id=request.request_id)
        values = self._values(request)
        if adapter is not None:
            self._put_optional(values, "lora_weights", adapter.weights, None)
            self._put_optional(values, "lora_config", adapter.config, None)
        for name, value in values.items():
            spec = self.inputs[name]
            array = np.asarray(value)
            shape = array.shape or (1,)
            tensor = message.inputs.add(name=name, datatype=spec.datatype)
            tensor.shape.extend((1, *shape) if self.batched else shape)
            message.raw_input_contents.append(pack(array, spec.datatype))
        for name in self._wanted_outputs(request):
            message.outputs.add(name=name)
        return message

    def decode(self, response: Any, request: GenerateRequest, *, first: bool) -> Chunk:
        """Turn a ``ModelInferResponse`` into a chunk.

        Args:
            response: The message.
            request: What was asked.
            first: Whether it is the first answer of the request.
        """
        raw = dict(zip((o.name for o in response.outputs), response.raw_output_contents, strict=False))
        ids = self._new_tokens(raw, request)
        reason = raw.get("finish_reason")
        chunk = Chunk(ids, finish_reason=_text(reason) or None if reason else None)
        if request.logprobs is not None and ids:
            chunk = chunk._replace(logprobs=self._logprobs(raw, ids, request.logprobs))
        if first and request.prompt_logprobs is not None:
            chunk = chunk._replace(prompt_logprobs=self._prompt_logprobs(raw, request))
        return chunk

    def _values(self, request: GenerateRequest) -> dict[str, Any]:
        """Return input name to value, for the inputs that exist."""
        sampling = request.sampling
        greedy = sampling.temperature == 0
        values: dict[str, Any] = {
            "input_ids": np.asarray(request.token_ids, np.int32),
            "input_lengths": len(request.token_ids),
            # Engines make at least one token; a model that scores prompts by itself need not.
            "request_output_len": request.max_tokens or (0 if "return_prompt_logprobs" in self.inputs else 1),
        }
        self._put(values, "streaming", request.stream and self.decoupled)
        self._put(values, "exclude_input_in_output", True)
        # The backend's own default is greedy, whatever temperature says: top_k and top_p are always sent.
        self._put(values, "runtime_top_k", 1 if greedy else sampling.top_k)
        self._put(values, "runtime_top_p", 1.0 if greedy else sampling.top_p)
        self._put(values, "temperature", 1.0 if greedy else sampling.temperature)
        if request.end_id is not None:
            self._put(values, "end_id", request.end_id)
            self._put(values, "pad_id", request.end_id)
        if sampling.seed is not None and not greedy:
            self._put(values, "seed", sampling.seed % 2**64)
        if request.stop_words:
            self._put(values, "stop_words_list", _word_list(request.stop_words))
        self._put_optional(values, "min_p", 0.0 if greedy else sampling.min_p, 0.0)
        self._put_optional(values, "repetition_penalty", sampling.repetition_penalty, 1.0)
        self._put_optional(values, "presence_penalty", sampling.presence_penalty, 0.0)
        self._put_optional(values, "frequency_penalty", sampling.frequency_penalty, 0.0)
        self._put_optional(values, "min_tokens", request.min_tokens, 0)
        if sampling.logit_bias:
            self._put_optional(values, "embedding_bias", self._bias(sampling.logit_bias), None)
        if request.guide is not None:
            self._put_optional(values, "guided_decoding_guide_type", request.guide.kind, None)
            if request.guide.text:
                self._put_optional(values, "guided_decoding_guide", request.guide.text, None)
        if request.lora_task_id is not None:
            self._put_optional(values, "lora_task_id", request.lora_task_id, None)
        if request.logprobs is not None:
            self._put_optional(values, "return_log_probs", True, None)
            if request.logprobs:
                self._put(values, "return_top_logprobs", request.logprobs)
                if "return_top_logprobs" not in self.inputs and self.logits:
                    self._put(values, "return_generation_logits", True)
        if request.prompt_logprobs is not None:
            self._put(values, "return_prompt_logprobs", request.prompt_logprobs)
            if "return_prompt_logprobs" not in self.inputs:
                self._put_optional(values, "return_context_logits", True, None)
        return values

    def _put(self, values: dict[str, Any], field: str, value: Any) -> bool:
        """Set an input under the name this model has for it; return whether it has one."""
        for name in _RENAMED.get(field, (field,)):
            if name in self.inputs:
                values[name] = value
                return True
        return False

    def _put_optional(self, values: dict[str, Any], field: str, value: Any, neutral: Any) -> None:
        """Set an input; a model without it can only serve the neutral value."""
        if not self._put(values, field, value) and (neutral is None or value != neutral):
            raise PromptRejected(f"The model {self.model!r} does not support {field}.")

    def _bias(self, bias: dict[int, float]) -> npt.NDArray[np.float32]:
        size = self.features.vocab_size
        if size is None:
            raise PromptRejected(f"The vocabulary size of {self.model!r} is unknown, so logit_bias cannot be sent.")
        row = np.zeros(size, np.float32)
        for token_id, value in bias.items():
            row[token_id] = value
        return row

    def _wanted_outputs(self, request: GenerateRequest) -> list[str]:
        names = ["output_ids", "sequence_length", "finish_reason"]
        if request.logprobs is not None:
            names += ["output_log_probs"]
            if request.logprobs:
                names += ["top_logprobs_ids", "top_logprobs"]
                if self.logits and "top_logprobs" not in self.outputs:
                    names += ["generation_logits"]
        if request.prompt_logprobs is not None:
            names += ["prompt_token_logprobs", "prompt_top_ids", "prompt_top_logprobs"]
            if "prompt_token_logprobs" not in self.outputs:
                names += ["context_logits"]
        return [name for name in names if name in self.outputs]

    def _new_tokens(self, raw: dict[str, bytes], request: GenerateRequest) -> Sequence[int]:
        data = raw.get("output_ids", b"")
        if len(data) == 4:  # the usual case: one token
            token_id = int.from_bytes(data, "little", signed=True)
            return (token_id,) if token_id >= 0 and int.from_bytes(raw.get("sequence_length", b"\1"), "little") else ()
        ids = np.frombuffer(data, np.int32)
        if "sequence_length" in raw:
            ids = ids[: int.from_bytes(raw["sequence_length"][:4], "little")]
        tokens: list[int] = ids[ids >= 0].tolist()
        streamed = request.stream and self.decoupled
        excluded = streamed or self.excludes_input or "exclude_input_in_output" in self.inputs
        return tokens if excluded else tokens[len(request.token_ids) :]

    def _logprobs(self, raw: dict[str, bytes], ids: Sequence[int], k: int) -> list[Logprob]:
        if k and "generation_logits" in raw:
            rows = self._array(raw, "generation_logits").reshape(len(ids), -1)
            return score(rows, ids, k)
        # The list covers the whole answer so far; its tail belongs to the new tokens.
        chosen = np.frombuffer(raw.get("output_log_probs", b""), np.float32)[-len(ids) :].tolist()
        chosen = [math.nan] * (len(ids) - len(chosen)) + chosen
        tops = _tops(raw.get("top_logprobs_ids"), raw.get("top_logprobs"), len(ids)) if k else [()] * len(ids)
        return [Logprob(*entry) for entry in zip(ids, chosen, tops, strict=True)]

    def _prompt_logprobs(self, raw: dict[str, bytes], request: GenerateRequest) -> list[Logprob | None]:
        ids, k = list(request.token_ids), request.prompt_logprobs or 0
        if "context_logits" in raw:
            rows = self._array(raw, "context_logits").reshape(len(ids), -1)
            return [None, *score(rows[:-1], ids[1:], k)]
        chosen = np.frombuffer(raw.get("prompt_token_logprobs", b""), np.float32).tolist()
        if len(chosen) != len(ids):
            raise PromptRejected(f"The model {self.model!r} gave no log probabilities for the prompt.")
        tops: Sequence[Sequence[tuple[int, float]]] = [()] * len(ids)
        if k:
            tops = _tops(raw.get("prompt_top_ids"), raw.get("prompt_top_logprobs"), len(ids))
        entries = [Logprob(*entry) for entry in zip(ids, chosen, tops, strict=True)]
        return [None, *entries[1:]]

    def _array(self, raw: dict[str, bytes], name: str) -> npt.NDArray[Any]:
        return np.frombuffer(raw[name], np.float16 if self.outputs[name] == "FP16" else np.float32)


def declared(config: Any) -> tuple[dict[str, TensorSpec], dict[str, str]]:
    """Return the inputs and the datatypes of the outputs that a ``ModelConfig`` message declares, by name."""
    from tritonclient.grpc import model_config_pb2

    def datatype(number: int) -> str:
        name = str(model_config_pb2.DataType.Name(number)).removeprefix("TYPE_")
        return "BYTES" if name == "STRING" else name

    inputs = {tensor.name: TensorSpec(datatype(tensor.data_type), len(tensor.dims)) for tensor in config.input}
    return inputs, {tensor.name: datatype(tensor.data_type) for tensor in config.output}


def _features(
    inputs: dict[str, TensorSpec], outputs: dict[str, str], parameters: dict[str, str], *, logits: bool
) -> Features:
    def number(*names: str) -> int | None:
        for name in names:
            if parameters.get(name, "").isdigit():
                return int(parameters[name])
        return None

    def filled(name: str) -> bool:
        value = parameters.get(name, "")
        return bool(value) and not value.startswith("${")

    return Features(
        inputs=frozenset(inputs),
        max_seq_len=number(*_LENGTH_PARAMETERS),
        vocab_size=number("vocab_size"),
        logprobs="return_log_probs" in inputs and "output_log_probs" in outputs,
        top_logprobs="return_top_logprobs" in inputs or logits,
        prompt_logprobs="return_prompt_logprobs" in inputs or (logits and "return_context_logits" in inputs),
        min_p="min_p" in inputs,
        logit_bias="embedding_bias" in inputs,
        guided="guided_decoding_guide_type" in inputs and filled("guided_decoding_backend"),
        # The reference model declares all inputs of the real one and refuses some.
        lora="lora_task_id" in inputs and parameters.get("target") != "reference",
    )


_NUMPY = {"BOOL": np.bool_, "INT32": np.int32, "UINT32": np.uint32, "INT64": np.int64, "UINT64": np.uint64,
          "FP16": np.float16, "FP32": np.float32, "UINT8": np.uint8}  # fmt: skip


def pack(array: npt.NDArray[Any], datatype: str) -> bytes:
    """Return the raw contents of a tensor."""
    if datatype == "BYTES":
        data = str(array).encode("utf-8")
        return len(data).to_bytes(4, "little") + data
    if datatype == "BF16":
        import ml_dtypes

        return array.astype(ml_dtypes.bfloat16).tobytes()
    return array.astype(_NUMPY[datatype]).tobytes()


def _text(raw: bytes) -> str:
    """Read a BYTES tensor of one element."""
    return raw[4:].decode("utf-8", "replace")


def _word_list(words: Sequence[Sequence[int]]) -> npt.NDArray[np.int32]:
    """Return [2, n] int32: row 0 all ids, row 1 the end offset of each word, padded with -1."""
    ids = [token_id for word in words for token_id in word]
    ends = np.cumsum([len(word) for word in words]).tolist()
    return np.asarray([ids, ends + [-1] * (len(ids) - len(ends))], np.int32)


def _tops(raw_ids: bytes | None, raw_values: bytes | None, rows: int) -> list[list[tuple[int, float]]]:
    """Return, per row, the alternatives, most likely first."""
    if not raw_ids or not raw_values:
        return [[] for _ in range(rows)]
    ids = np.frombuffer(raw_ids, np.int32).reshape(rows, -1).tolist()
    values = np.frombuffer(raw_values, np.float32).reshape(rows, -1).tolist()
    return [
        sorted(((i, v) for i, v in zip(*row, strict=True) if i >= 0), key=lambda pair: -pair[1])
        for row in zip(ids, values, strict=True)
    ]
