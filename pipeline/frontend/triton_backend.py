"""Generation by a Triton server over gRPC, one call per sequence.

Calls that ask about the server use the generated stub. Token streams use :mod:`pipeline.frontend.http2`, which costs a
fraction of the CPU per token.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio

from pipeline.frontend.backend import (
    BackendError,
    BackendOverloaded,
    BackendUnavailable,
    Chunk,
    Features,
    GenerateRequest,
    PromptRejected,
)
from pipeline.frontend.http2 import CallFailed, Connection
from pipeline.frontend.lora import NOT_CACHED, Adapter
from pipeline.frontend.triton_text import TextInterface
from pipeline.frontend.triton_wire import ModelInterface

_log = logging.getLogger(__name__)

_STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"
_STATUS = {status.value[0]: status for status in grpc.StatusCode}
_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # A Triton that was restarted is found again within a second or two.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)
_TOO_LONG = re.compile(r"[Pp]rompt length \(?(\d+)\)? exceeds maximum input length \(?(\d+)\)?")
_BAD_GUIDE = re.compile(r"guided_decoding_guide\w* (?:is|has) (.*)", re.DOTALL)
_QUEUE_FULL = re.compile(r"(?i)exceeds maximum queue size|max(imum)? queue size|queue is full|request queue")
_NOT_SUPPORTED = re.compile(r"(?i)(is|are) not supported|unsupported")
_NOT_LOADED = re.compile(r"(?i)unknown model|is not found|not ready|unavailable|shutting down|unloaded")


class TritonBackend:
    """One model of one Triton server."""

    def __init__(
        self,
        address: str,
        model: str,
        *,
        gathered_logits: bool = False,
        timeout_s: float = 5.0,
        vocab_size: int | None = None,
        adapters: Mapping[int, Adapter] | None = None,
    ) -> None:
        """Remember where the model is; connecting happens with the first call.

        Args:
            address: ``host:port`` of the gRPC endpoint.
            model: Name in the repository.
            gathered_logits: The engine gathers context and generation logits.
            timeout_s: Limit of calls that do not generate.
            vocab_size: Length of a logit bias where the model does not say it.
            adapters: Task id to the weights that are sent with the first request for it.
        """
        self.address = address
        self._model = model
        self._gathered_logits = gathered_logits
        self._timeout_s = timeout_s
        self._vocab_size = vocab_size
        self._adapters = adapters or {}
        self._known_adapters: set[int] = set()
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None
        self._interface: ModelInterface | TextInterface | None = None
        self._connection: Connection | None = None
        self._opening = asyncio.Lock()

    async def features(self) -> Features:
        """Say what the model can do."""
        return (await self._read_interface()).features

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Yield the answer in parts; closing the iterator cancels the call.

        Responses that arrived together are one part.
        """
        task_id = request.lora_task_id
        if task_id is None or task_id not in self._adapters:
            return self._generate(request)
        return self._generate_adapted(request, task_id)

    async def _generate_adapted(self, request: GenerateRequest, task_id: int) -> AsyncGenerator[Chunk, None]:
        """Send an adapter's weights with its first request, and again when the server has dropped them."""
        adapter = self._adapters[task_id]
        if task_id in self._known_adapters:
            try:
                async with aclosing(self._generate(request)) as chunks:
                    async for chunk in chunks:
                        yield chunk
                return
            except AdapterUnknown:  # said before the first token
                self._known_adapters.discard(task_id)
        async with aclosing(self._generate(request, adapter)) as chunks:
            async for chunk in chunks:
                self._known_adapters.add(task_id)
                yield chunk

    async def _generate(self, request: GenerateRequest, adapter: Adapter | None = None) -> AsyncGenerator[Chunk, None]:
        from tritonclient.grpc import service_pb2

        interface = self._interface or await self._read_interface()
        if isinstance(interface, ModelInterface):
            message = interface.encode(request, adapter).SerializeToString()
        else:
            message = interface.encode(request).SerializeToString()
        read = service_pb2.ModelStreamInferResponse.FromString
        first = True
        try:
            connection = self._connection
            if connection is None or not connection.usable:
                connection = await self._open_connection()
            async with aclosing(connection.call(_STREAM_INFER, message).messages()) as batches:
                async for batch in batches:
                    chunks = []
                    for data in batch:
                        response = read(data)
                        if response.error_message:
                            raise self._in_band_error(response.error_message)
                        chunks.append(interface.decode(response.infer_response, request, first=first))
                        first = False
                    yield chunks[0] if len(chunks) == 1 else joined(chunks)
        except CallFailed as error:
            raise _status_error(_STATUS.get(error.code, grpc.StatusCode.UNKNOWN), str(error)) from error

    async def is_ready(self) -> bool:
        """Say whether the server is up and the model loaded."""
        from tritonclient.grpc import service_pb2

        try:
            reply = await self._connect().ModelReady(
                service_pb2.ModelReadyRequest(name=self._model), timeout=self._timeout_s
            )
        except grpc.aio.AioRpcError:
            self._interface = None
            return False
        if not reply.ready:
            self._interface = None
        return bool(reply.ready)

    async def close(self) -> None:
        """Close the connection."""
        channel, self._channel, self._stub = self._channel, None, None
        if channel is not None:
            await channel.close()
        if self._connection is not None:
            self._connection.close()

    async def _open_connection(self) -> Connection:
        """Return a connection for streams; requests that need one at the same time share it."""
        async with self._opening:
            if self._connection is None or not self._connection.usable:
                self._connection = await Connection.open(self.address, timeout_s=self._timeout_s)
            return self._connection

    def _connect(self) -> Any:
        if self._stub is None:
            from tritonclient.grpc import service_pb2_grpc

            # The channel belongs to the running event loop, so it cannot be made in the constructor.
            self._channel = grpc.aio.insecure_channel(self.address, options=_CHANNEL_OPTIONS)
            self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        return self._stub

    async def _read_interface(self) -> ModelInterface | TextInterface:
        from tritonclient.grpc import service_pb2

        try:
            reply = await self._connect().ModelConfig(
                service_pb2.ModelConfigRequest(name=self._model), timeout=self._timeout_s
            )
        except grpc.aio.AioRpcError as error:
            message = f"cannot read the configuration of {self._model} from {self.address}: {error.details()}"
            raise BackendUnavailable(message) from error
        names = {tensor.name for tensor in reply.config.input}
        interface: ModelInterface | TextInterface
        if "text_input" in names:
            interface = TextInterface.from_config(reply.config)
            missing = {"max_tokens"} - names
        else:
            interface = ModelInterface.from_config(
                reply.config, gathered_logits=self._gathered_logits, vocab_size=self._vocab_size
            )
            missing = {"input_ids", "input_lengths", "request_output_len"} - names
        if missing:
            raise BackendUnavailable(f"{self._model} on {self.address} lacks the inputs {sorted(missing)}")
        self._interface = interface
        return interface

    def _in_band_error(self, text: str) -> BackendError:
        if "unexpected inference input" in text:
            self._interface = None  # the model was reloaded with another configuration
        return classify(text)


class AdapterUnknown(BackendError):
    """The server does not hold the weights of an adapter."""


def joined(chunks: Sequence[Chunk]) -> Chunk:
    """Return consecutive chunks as one."""
    return Chunk(
        token_ids=[token_id for chunk in chunks for token_id in chunk.token_ids],
        logprobs=[entry for chunk in chunks for entry in chunk.logprobs],
        prompt_logprobs=chunks[0].prompt_logprobs,
        finish_reason=chunks[-1].finish_reason,
        text=None if chunks[0].text is None else "".join(chunk.text or "" for chunk in chunks),
        text_tokens=None if chunks[0].text_tokens is None else sum(chunk.text_tokens or 0 for chunk in chunks),
    )


def classify(text: str) -> BackendError:
    """Return the kind of an error that Triton reports as text only, inside the stream."""
    match = _TOO_LONG.search(text)
    if match:
        return PromptRejected(f"The prompt has {match[1]} tokens; the model takes at most {match[2]}.")
    if NOT_CACHED.search(text):
        return AdapterUnknown(text)
    match = _BAD_GUIDE.search(text)
    if match:
        return PromptRejected(f"response_format (or a tool's schema) is {match[1][:400]}")
    if _NOT_SUPPORTED.search(text):
        _log.info("request refused by the model", extra={"reason": text[:500]})
        return PromptRejected("The model does not support what this request asks for.")
    if _QUEUE_FULL.search(text):
        return BackendOverloaded(text)
    if _NOT_LOADED.search(text):
        return BackendUnavailable(text)
    return BackendError(text)


def _status_error(code: Any, details: str | None) -> BackendError:
    text = f"{code}: {details}"
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.CANCELLED):
        return BackendUnavailable(text)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return BackendOverloaded(text)
    return classify(text)
