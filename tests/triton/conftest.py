"""A real tritonserver on a tiny repository, one for all tests, and a slow one for tests of cancelling."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from triton_client import Client
from triton_models import MAX_SEQ_LEN, SLOW_SEQ_LEN, Model, emit, write_checkpoint, write_tokenizer

from pipeline.engines.reference import ReferenceEngine
from pipeline.errors import PipelineError
from pipeline.triton.install import TritonInstall, ensure_tritonserver
from pipeline.triton.server import TritonServer


@pytest.fixture(scope="session")
def triton_install() -> TritonInstall:
    """The unpacked server; without it the tests are skipped by name, or fail where services are required."""
    try:
        return ensure_tritonserver()
    except PipelineError as error:
        if os.environ.get("REQUIRE_SERVICES") == "1":
            raise
        pytest.skip(f"tritonserver is not available: {error.message}")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A random checkpoint and its tokenizer."""
    root = tmp_path_factory.mktemp("model")
    return Model(write_checkpoint(root / "checkpoint"), write_tokenizer(root / "tokenizer"))


@pytest.fixture(scope="session")
def engine(tiny_model: Model) -> ReferenceEngine:
    """The same engine in this process: says what the server has to answer."""
    return ReferenceEngine.load(tiny_model.checkpoint, max_batch_size=4, max_seq_len=MAX_SEQ_LEN, threads=1)


@pytest.fixture(scope="session")
def server(
    triton_install: TritonInstall, tiny_model: Model, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    """A ready server on the tiny repository."""
    root = tmp_path_factory.mktemp("server")
    with TritonServer(emit(root / "repository", tiny_model), triton_install, log_path=root / "log.txt") as running:
        running.wait_ready(120)
        yield running


@pytest.fixture(scope="session")
def slow_client(
    triton_install: TritonInstall, tiny_model: Model, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    """A client of a server with two slots whose longest answers take many seconds."""
    root = tmp_path_factory.mktemp("slow")
    checkpoint = write_checkpoint(root / "checkpoint", layers=12, hidden=128, positions=SLOW_SEQ_LEN)
    model = Model(checkpoint, tiny_model.tokenizer)
    repository = emit(root / "repository", model, max_batch_size=2, max_seq_len=SLOW_SEQ_LEN)
    with TritonServer(repository, triton_install, log_path=root / "log.txt") as running:
        running.wait_ready(120)
        connected = Client(running.grpc_url)
        yield connected
        connected.client.close()


@pytest.fixture(scope="session")
def client(server: TritonServer) -> Iterator[Client]:
    """A client of the running server."""
    connected = Client(server.grpc_url)
    yield connected
    connected.client.close()
