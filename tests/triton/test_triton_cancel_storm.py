"""Clients that leave in the moment of the last token, 64 at a time: the server stays alive and answers everybody else.

Triton's gRPC server of 24.10 (2.51) has races between a cancellation and the end of a stream. They were repaired later
(triton-inference-server/server, pull requests 7840 and 8078, up to spring 2025). A model meets them when it sends its
last tokens and the final flag as two messages: with such a model 3 of 4 runs of 6,000 requests ended in signal 11 or in
a server that answered nobody, whether or not the model ever looked for cancelled clients; with both in one message none
of 4. So the models of the repositories send both in one. A rare request is still answered with an error about a model
without a name; it is let pass here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from triton_client import Client

from pipeline.triton.server import TritonServer

pytestmark = pytest.mark.triton

CONCURRENT = 64
TOKENS = 4
STUCK_S = 20.0


@dataclass
class Storm:
    """What became of the requests."""

    done: int = 0
    stuck: int = 0
    mixed_up: int = 0


def storm(url: str, model: str, *, requests: int, seconds: float) -> Storm:
    """Send streams and cancel each at its last token or just before, until the number or the time is reached."""
    seen = Storm()
    asyncio.run(_run(seen, url, model, requests, time.monotonic() + seconds))
    return seen


async def _run(seen: Storm, url: str, model: str, requests: int, deadline: float) -> None:
    import tritonclient.grpc.aio as grpc

    arrays = {
        "input_ids": ("INT32", np.array([[60, 70, 80]], np.int32)),
        "input_lengths": ("INT32", np.array([[3]], np.int32)),
        "request_output_len": ("INT32", np.array([[TOKENS]], np.int32)),
        "streaming": ("BOOL", np.array([[True]])),
    }
    tensors = []
    for name, (kind, array) in arrays.items():
        tensor = grpc.InferInput(name, list(array.shape), kind)
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)

    async def one(client: Any, number: int) -> None:
        gone = asyncio.Event()

        async def ask() -> AsyncIterator[dict[str, Any]]:
            message = {"model_name": model, "inputs": tensors, "request_id": str(number)}
            yield {**message, "enable_empty_final_response": True}
            await gone.wait()  # an ended request side would let the server end the call by itself

        answers = client.stream_infer(ask())
        received = 0
        try:
            while received < TOKENS - number % 2:
                result, error = await asyncio.wait_for(answers.__anext__(), STUCK_S)
                if error is not None:
                    assert "unknown model: ''" in error.message(), error
                    seen.mixed_up += 1
                    break
                ids = result.as_numpy("output_ids")
                received += 0 if ids is None else ids.size
                if result.get_response().parameters["triton_final_response"].bool_param:
                    break
        except asyncio.TimeoutError:
            seen.stuck += 1
        finally:
            answers.cancel()
            gone.set()
        seen.done += 1

    async def worker(first: int) -> None:
        client = grpc.InferenceServerClient(url)
        for number in range(first, requests, CONCURRENT):
            if time.monotonic() > deadline or seen.stuck:
                break
            await one(client, number)
        await client.close()

    await asyncio.gather(*(worker(first) for first in range(CONCURRENT)))


def _check(server: TritonServer, client: Client, seen: Storm) -> None:
    assert seen.stuck == 0
    assert seen.done > CONCURRENT
    assert seen.mixed_up <= seen.done / 100
    inputs = {"input_ids": [60, 70], "input_lengths": [2], "request_output_len": [3]}
    assert len(client.ask("tensorrt_llm", inputs).tokens()) == 3
    server.check_alive()


def test_server_survives_clients_that_leave_at_the_last_token(server: TritonServer, client: Client) -> None:
    _check(server, client, storm(server.grpc_url, "tensorrt_llm", requests=1500, seconds=60))


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_server_survives_ten_thousand_such_clients(server: TritonServer, client: Client) -> None:
    _check(server, client, storm(server.grpc_url, "tensorrt_llm", requests=10000, seconds=400))
