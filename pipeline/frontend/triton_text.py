"""Requests and answers of a Triton model that takes and gives text: an ``ensemble`` or ``tensorrt_llm_bls``.

Less can be asked of such a model than of one that speaks token ids: no log probabilities, no bias, no guides, no
adapters, and what a stream's pieces are is up to its postprocessing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.frontend.backend import Chunk, Features, GenerateRequest, PromptRejected
from pipeline.frontend.triton_wire import TensorSpec, declared, pack

_RENAMED = {"min_tokens": ("min_tokens", "min_length"), "seed": ("seed", "random_seed")}


@dataclass(frozen=True, slots=True)
class TextInterface:
    """What a text model takes and gives.

    Attributes:
        model: Name in the repository.
        inputs: Input name to its declaration.
        outputs: Output names.
        batched: Whether shapes have a leading batch dimension.
        decoupled: Whether text can be streamed.
        features: What that means for a client.
    """

    model: str
    inputs: dict[str, TensorSpec]
    outputs: frozenset[str]
    batched: bool
    decoupled: bool
    features: Features

    @classmethod
    def from_config(cls, config: Any) -> TextInterface:
        """Read a ``ModelConfig`` message that has ``text_input`` and ``text_output``."""
        inputs, outputs = declared(config)
        return cls(
            model=config.name,
            inputs=inputs,
            outputs=frozenset(outputs),
            batched=config.max_batch_size > 0,
            decoupled=config.model_transaction_policy.decoupled,
            features=Features(inputs=frozenset(inputs), takes_text=True),
        )

    def encode(self, request: GenerateRequest) -> Any:
        """Return the ``ModelInferRequest``.

        Raises:
            PromptRejected: A field was asked for that this model has no input for.
        """
        from tritonclient.grpc import service_pb2

        message = service_pb2.ModelInferRequest(model_name=self.model, id=request.request_id)
        for name, value in self._values(request).items():
            datatype = self.inputs[name].datatype
            message.inputs.add(name=name, datatype=datatype, shape=(1, 1) if self.batched else (1,))
            message.raw_input_contents.append(pack(np.asarray(value), datatype))
        for name in ("text_output", "num_output_tokens"):
            if name in self.outputs:
                message.outputs.add(name=name)
        return message

    def decode(self, response: Any, request: GenerateRequest, *, first: bool) -> Chunk:
        """Turn a ``ModelInferResponse`` into a chunk of text."""
        raw = dict(zip((o.name for o in response.outputs), response.raw_output_contents, strict=False))
        text = raw.get("text_output", b"")[4:].decode("utf-8", "replace")
        count = None
        if "return_num_output_tokens" in self.inputs and raw.get("num_output_tokens"):
            count = int.from_bytes(raw["num_output_tokens"][:4], "little")
        return Chunk((), text=text, text_tokens=count)

    def _values(self, request: GenerateRequest) -> dict[str, Any]:
        sampling = request.sampling
        greedy = sampling.temperature == 0
        values: dict[str, Any] = {
            "text_input": request.text,
            "max_tokens": request.max_tokens,
            "stream": request.stream and self.decoupled,
            "exclude_input_in_output": True,
            "return_num_output_tokens": True,
            # Always sent: without them the backend is greedy, whatever temperature says.
            "top_k": 1 if greedy else sampling.top_k,
            "top_p": 1.0 if greedy else sampling.top_p,
            "temperature": 1.0 if greedy else sampling.temperature,
        }
        if request.end_id is not None:
            values |= {"end_id": request.end_id, "pad_id": request.end_id}
        if sampling.seed is not None and not greedy:
            values["seed"] = sampling.seed % 2**64
        wanted = {
            "repetition_penalty": (sampling.repetition_penalty, 1.0),
            "presence_penalty": (sampling.presence_penalty, 0.0),
            "frequency_penalty": (sampling.frequency_penalty, 0.0),
            "min_tokens": (request.min_tokens, 0),
        }
        values |= {name: value for name, (value, neutral) in wanted.items() if value != neutral}
        named = {self._name(field): value for field, value in values.items()}
        for field, (value, neutral) in wanted.items():
            if value != neutral and self._name(field) not in self.inputs:
                raise PromptRejected(f"The model {self.model!r} does not support {field}.")
        return {name: value for name, value in named.items() if name in self.inputs}

    def _name(self, field: str) -> str:
        """Return what this model calls a field."""
        return next((name for name in _RENAMED.get(field, ()) if name in self.inputs), field)
