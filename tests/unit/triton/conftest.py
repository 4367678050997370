"""The tiny model of tests/triton, and a stand-in for the module that Triton gives to its models."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests" / "triton"))

from triton_models import MAX_SEQ_LEN, write_checkpoint, write_tokenizer  # noqa: E402

from pipeline.triton.repository import RepositorySettings, emit_repository  # noqa: E402

TEMPLATES = ROOT / "triton_repo" / "reference"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def repository(tmp_path: Path, checkpoint: Path, tokenizer: Path) -> Path:
    folder = tmp_path / "model_repository"
    settings = RepositorySettings(max_batch_size=4, max_seq_len=MAX_SEQ_LEN, threads=1)
    emit_repository(folder, checkpoint=checkpoint, tokenizer=tokenizer, settings=settings)
    return folder


def load_model_file(path: Path, name: str) -> ModuleType:
    """Import a template by path."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def triton_utilities() -> Iterator[None]:
    """Make `import triton_python_backend_utils` work; the real one exists inside Triton's stub only."""
    module = ModuleType("triton_python_backend_utils")
    module.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1  # type: ignore[attr-defined]
    module.TritonError = SimpleNamespace  # type: ignore[attr-defined]
    sys.modules["triton_python_backend_utils"] = module
    yield
    del sys.modules["triton_python_backend_utils"]


@pytest.fixture(scope="session")
def preprocessing(triton_utilities: None) -> ModuleType:
    return load_model_file(TEMPLATES / "preprocessing" / "1" / "model.py", "preprocessing_model")


@pytest.fixture(scope="session")
def postprocessing(triton_utilities: None) -> ModuleType:
    return load_model_file(TEMPLATES / "postprocessing" / "1" / "model.py", "postprocessing_model")


@pytest.fixture(scope="session")
def guided() -> Iterator[ModuleType]:
    yield load_model_file(TEMPLATES / "tensorrt_llm" / "1" / "guided.py", "guided")
    del sys.modules["guided"]


@pytest.fixture(scope="session")
def llm_request(guided: ModuleType) -> Iterator[ModuleType]:
    """The request parser of `tensorrt_llm`, with the engine's package under the name it has in a repository."""
    import pipeline.engines.reference as engine
    import pipeline.engines.reference.request as request

    sys.modules["reference"], sys.modules["reference.request"] = engine, request
    yield load_model_file(TEMPLATES / "tensorrt_llm" / "1" / "llm_request.py", "llm_request")
    for name in ("reference", "reference.request", "llm_request"):
        del sys.modules[name]
