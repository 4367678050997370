"""Generation by a Triton server over gRPC, one stream per sequence.

The generated stub is used rather than the convenience client: it costs less per token, and errors in building a
request do not look like cancellations.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator
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
from pipeline.frontend.triton_wire import ModelInterface

_log = logging.getLogger(__name__)

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
    ) -> None:
        """Remember where the model is; connecting happens with the first call.

        Args:
            address: ``host:port`` of the gRPC endpoint.
            model: Name in the repository.
            gathered_logits: The engine gathers context and generation logits.
            timeout_s: Limit of calls that do not generate.
            vocab_size: Length of a logit bias where the model does not say it.
        """
        self.address = address
        self._model = model
        self._gathered_logits = gathered_logits
        self._timeout_s = timeout_s
        self._vocab_size = vocab_size
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None
        self._interface: ModelInterface | None = None

    async def features(self) -> Features:
        """Say what the model can do."""
        return (await self._read_interface()).features

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Yield the answer in parts; closing the iterator cancels the call."""
        interface = self._interface or await self._read_interface()
        message = interface.encode(request)
        call = self._connect().ModelStreamInfer()
        first = True
        try:
            await call.write(message)
            await call.done_writing()
            while (response := await call.read()) is not grpc.aio.EOF:
                if response.error_message:
                    raise self._in_band_error(response.error_message)
                yield interface.decode(response.infer_response, request, first=first)
                first = False
            if await call.code() is not grpc.StatusCode.OK:
                raise _status_error(await call.code(), await call.details())
        except grpc.aio.AioRpcError as error:
            raise _status_error(error.code(), error.details()) from error
        except asyncio.InvalidStateError as error:
            # write() on a call that has already ended; the status says why.
            raise _status_error(await call.code(), await call.details()) from error
        finally:
            if not call.done():
                call.cancel()

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

    def _connect(self) -> Any:
        if self._stub is None:
            from tritonclient.grpc import service_pb2_grpc

            # The channel belongs to the running event loop, so it cannot be made in the constructor.
            self._channel = grpc.aio.insecure_channel(self.address, options=_CHANNEL_OPTIONS)
            self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        return self._stub

    async def _read_interface(self) -> ModelInterface:
        from tritonclient.grpc import service_pb2

        try:
            reply = await self._connect().ModelConfig(
                service_pb2.ModelConfigRequest(name=self._model), timeout=self._timeout_s
            )
        except grpc.aio.AioRpcError as error:
            message = f"cannot read the configuration of {self._model} from {self.address}: {error.details()}"
            raise BackendUnavailable(message) from error
        interface = ModelInterface.from_config(
            reply.config, gathered_logits=self._gathered_logits, vocab_size=self._vocab_size
        )
        missing = {"input_ids", "input_lengths", "request_output_len"} - set(interface.inputs)
        if missing:
            raise BackendUnavailable(f"{self._model} on {self.address} lacks the inputs {sorted(missing)}")
        self._interface = interface
        return interface

    def _in_band_error(self, text: str) -> BackendError:
        if "unexpected inference input" in text:
            self._interface = None  # the model was reloaded with another configuration
        return classify(text)


def classify(text: str) -> BackendError:
    """Return the kind of an error that Triton reports as text only, inside the stream."""
    match = _TOO_LONG.search(text)
    if match:
        return PromptRejected(f"The prompt has {match[1]} tokens; the model takes at most {match[2]}.")
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
