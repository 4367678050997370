"""A gRPC client that keeps every response of a decoupled request, also the empty ones."""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

DATATYPES = {"int32": "INT32", "float32": "FP32", "bool": "BOOL", "uint64": "UINT64", "object": "BYTES"}


@dataclass
class Answer:
    """What a streamed request gave: outputs of each response by name, and the error that ended it."""

    responses: list[dict[str, np.ndarray]] = field(default_factory=list)
    error: str = ""

    def tokens(self, sequence: int = 0) -> list[int]:
        """Return all new tokens of one sequence, checking that lengths are told right."""
        tokens: list[int] = []
        for response in self.responses:
            if "output_ids" in response and int(response.get("sequence_index", [[0]])[0][0]) == sequence:
                ids = response["output_ids"][0][0].tolist()
                assert response["sequence_length"].tolist() == [[len(ids)]]
                tokens += ids
        return tokens

    @property
    def finish_reason(self) -> str:
        """Return the reason in the last response that has outputs; earlier ones must have none."""
        *earlier, last = [response for response in self.responses if response]
        assert all("finish_reason" not in response for response in earlier)
        return last["finish_reason"][0][0].decode()


class Client:
    """A decoupled request over gRPC; arrays are given without their batch dimension."""

    def __init__(self, url: str) -> None:
        import tritonclient.grpc as grpc

        self.grpc = grpc
        self.url = url
        self.client = grpc.InferenceServerClient(url)

    def start(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        outputs: Sequence[str] | None = None,
        request_id: str = "",
        is_batched: bool = False,
    ) -> Stream:
        """Send a request and return its stream; ``is_batched`` inputs have their batch dimension already."""
        tensors = self.tensors({name: _array(value, is_batched=is_batched) for name, value in inputs.items()})
        return Stream(self, model, tensors, outputs, request_id)

    def ask(self, model: str, inputs: Mapping[str, Any], **options: Any) -> Answer:
        """Send a request and return everything it gave."""
        return self.start(model, inputs, **options).rest()

    def tensors(self, arrays: Mapping[str, np.ndarray]) -> list[Any]:
        """Return the inputs as the client library wants them."""
        tensors = []
        for name, array in arrays.items():
            tensor = self.grpc.InferInput(name, list(array.shape), DATATYPES[array.dtype.name])
            tensor.set_data_from_numpy(array)
            tensors.append(tensor)
        return tensors


def _array(value: Any, *, is_batched: bool) -> np.ndarray:
    array = np.atleast_1d(np.asarray(value))
    if array.dtype.kind == "U":
        array = np.array([text.encode() for text in array.tolist()], np.object_)
    array = array.astype({"int64": np.int32, "float64": np.float32}.get(array.dtype.name, array.dtype))
    return array if is_batched else array[np.newaxis]


class Stream:
    """One request on a gRPC stream of its own."""

    def __init__(
        self, client: Client, model: str, tensors: list[Any], outputs: Sequence[str] | None, request_id: str
    ) -> None:
        self._queue: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self._client = client.grpc.InferenceServerClient(client.url)
        self._client.start_stream(lambda result, error: self._queue.put((result, error)))
        wanted = None if outputs is None else [client.grpc.InferRequestedOutput(name) for name in outputs]
        self._client.async_stream_infer(
            model, tensors, outputs=wanted, request_id=request_id, enable_empty_final_response=True
        )
        self.is_done = False

    def next(self) -> tuple[dict[str, np.ndarray], str]:
        """Return outputs and error of the next response."""
        result, error = self._queue.get(timeout=60)
        if error is not None:
            self.is_done = True
            return {}, error.message()
        response = result.get_response()
        self.is_done = response.parameters["triton_final_response"].bool_param
        return {output.name: result.as_numpy(output.name) for output in response.outputs}, ""

    def rest(self) -> Answer:
        """Read to the end."""
        answer = Answer()
        while not self.is_done:
            outputs, answer.error = self.next()
            answer.responses.append(outputs)
        self.close()
        return answer

    def close(self, *, cancel: bool = False) -> None:
        """End the stream; ``cancel`` tells the server to stop working on it."""
        self._client.stop_stream(cancel_requests=cancel)
        self._client.close()
