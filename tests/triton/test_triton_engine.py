"""Repositories for engines in a real tritonserver.

The C++ backend is not here: a Python model takes its place, with the emitted config but for the name of the backend, so
Triton checks every tensor of every step.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engine_files import write_engine
from triton_client import Answer, Client
from triton_models import EOS, MAX_SEQ_LEN, Model

from pipeline.triton.engine_repository import EngineModel, emit_engines
from pipeline.triton.engine_serving import Bls, EngineServing, KvCache
from pipeline.triton.install import TritonInstall
from pipeline.triton.model_config import read_config, write_config
from pipeline.triton.repository import RepositorySettings
from pipeline.triton.server import TritonServer
from pipeline.triton.verify import verify_repository

pytestmark = pytest.mark.triton

TEXT = "Käse 🙂 日本語,  the User: said."
STANDIN = Path(__file__).parent / "engine_standin.py"


@dataclass(frozen=True)
class Running:
    """A client of the running repository, and what its engines wrote down."""

    client: Client
    journals: dict[str, Path]

    def lines(self, model: str) -> list[str]:
        path = self.journals[model]
        return path.read_text().splitlines() if path.exists() else []


def script_of(model: Model) -> list[int]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model.tokenizer / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(TEXT, add_special_tokens=False).ids
    return ids[-2:] + ids[:-2]  # prompts below have two tokens


def replace_backend(repository: Path, journals: dict[str, Path], script: list[int], **more: dict[str, str]) -> None:
    """Give every engine of a repository the stand-in; nothing else of its config changes."""
    for folder in repository.iterdir():
        config = read_config(folder / "config.pbtxt") if folder.is_dir() else None
        if config is None or config.backend != "tensorrtllm":
            continue
        config.backend = "python"
        values = {"script": ",".join(map(str, script)), "journal": str(journals[folder.name])}
        for key, value in {**values, **more.get(folder.name, {})}.items():
            config.parameters[key].string_value = value
        write_config(folder, config)
        shutil.copyfile(STANDIN, folder / "1" / "model.py")


def emit(root: Path, model: Model, *, release: str, decoupled: bool = True) -> Path:
    engine = write_engine(root / "engine", release=release, speculative_decoding_mode=2, max_draft_len=8)
    draft = write_engine(root / "draft", release=release)
    cache = KvCache(max_tokens=4096)  # both are on the first GPU
    settings = RepositorySettings(
        max_batch_size=4,
        max_seq_len=MAX_SEQ_LEN,
        target="engine",
        decoupled=decoupled,
        serving=EngineServing(bls=Bls(concurrency=8), kv_cache=cache),
    )
    drafting = EngineServing(kv_cache=cache)
    emit_engines(
        root / "repository", [EngineModel(engine, model.tokenizer, settings, draft=draft, draft_serving=drafting)]
    )
    return root / "repository"


@pytest.fixture(scope="module", params=["0.19.0", "1.2.1"])
def running(
    request: pytest.FixtureRequest,
    triton_install: TritonInstall,
    tiny_model: Model,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Running]:
    root = tmp_path_factory.mktemp("engine")
    repository = emit(root, tiny_model, release=request.param)
    assert [finding for finding in verify_repository(repository) if finding.severity == "error"] == []
    journals = {name: root / f"{name}.txt" for name in ("tensorrt_llm", "tensorrt_llm_draft")}
    changes = {"tensorrt_llm": {"delay_ms": "1"}, "tensorrt_llm_draft": {"wrong_every": "3"}}
    replace_backend(repository, journals, script_of(tiny_model), **changes)
    with TritonServer(repository, triton_install, log_path=root / "log.txt") as server:
        server.wait_ready(120)
        connected = Client(server.grpc_url)
        yield Running(connected, journals)
        connected.client.close()


def inputs(tokens: int = 40, **more: Any) -> dict[str, Any]:
    return {"text_input": ["the"], "max_tokens": [tokens], **more}


def texts(answer: Answer) -> list[str]:
    assert answer.error == ""
    return [response["text_output"][0][0].decode() for response in answer.responses if "text_output" in response]


def test_text_of_ensemble_and_text_model_is_the_same(running: Running) -> None:
    (plain,) = texts(running.client.ask("ensemble", inputs()))
    (own,) = texts(running.client.ask("tensorrt_llm_bls", inputs()))
    assert own == plain
    assert "🙂" in own


def test_ensemble_refuses_a_stream_by_name(running: Running) -> None:
    answer = running.client.ask("ensemble", inputs(stream=[True]))
    assert "unexpected inference input 'stream'" in answer.error


def test_stream_adds_up_and_cuts_no_character(running: Running, tiny_model: Model) -> None:
    tokens = len(script_of(tiny_model))
    parts = texts(running.client.ask("tensorrt_llm_bls", inputs(tokens, stream=[True])))
    assert "".join(parts) == TEXT
    assert not any("\ufffd" in part for part in parts)
    assert len(parts) > 10


def test_incomplete_character_at_the_end_is_the_same_in_a_stream(running: Running) -> None:
    for tokens in range(1, 12):
        (whole,) = texts(running.client.ask("tensorrt_llm_bls", inputs(tokens)))
        parts = texts(running.client.ask("tensorrt_llm_bls", inputs(tokens, stream=[True])))
        assert "".join(parts) == whole


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("drafts", [0, 4])
def test_stop_string_ends_the_text_and_no_part_of_it_is_shown(running: Running, stream: bool, drafts: int) -> None:
    (whole,) = texts(running.client.ask("tensorrt_llm_bls", inputs(80)))
    stop = "語,  the"
    asked = inputs(80, stop_words=[stop], stream=[stream], num_draft_tokens=[drafts])
    assert "".join(texts(running.client.ask("tensorrt_llm_bls", asked))) == whole[: whole.index(stop)]


@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize("stream", [False, True])
def test_draft_changes_nothing_but_the_number_of_calls(running: Running, count: int, stream: bool) -> None:
    (whole,) = texts(running.client.ask("tensorrt_llm_bls", inputs(30)))
    before = len(running.lines("tensorrt_llm"))
    answer = running.client.ask("tensorrt_llm_bls", inputs(30, num_draft_tokens=[count], stream=[stream]))
    assert "".join(texts(answer)) == whole
    last = [response for response in answer.responses if response][-1]
    assert last["total_draft_tokens"][0][0] > 0
    assert 0 < last["acceptance_rate"][0][0] < 1  # the draft is wrong at every third position
    calls = len(running.lines("tensorrt_llm")) - before
    assert calls < 30 if count > 1 else calls <= 30


def test_client_that_leaves_stops_the_engine(running: Running) -> None:
    stream = running.client.start("tensorrt_llm_bls", inputs(1500, stream=[True]))
    stream.next()
    stream.close(cancel=True)
    deadline = time.monotonic() + 10
    while not any(line.startswith("stopped") for line in running.lines("tensorrt_llm")):
        assert time.monotonic() < deadline, running.lines("tensorrt_llm")[-3:]
        time.sleep(0.02)


def test_requests_of_one_instance_run_side_by_side(running: Running) -> None:
    started = [running.client.start("tensorrt_llm_bls", inputs(60, stream=[True])) for _ in range(8)]
    answers = {"".join(texts(stream.rest())) for stream in started}
    assert len(answers) == 1


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"num_draft_tokens": [9]}, "num_draft_tokens is 9, the engine takes 8"),
        ({"num_draft_tokens": [-1]}, "num_draft_tokens is -1"),
        ({"num_draft_tokens": [2], "return_log_probs": [True]}, "return_log_probs is not possible with draft tokens"),
        ({"num_draft_tokens": [2], "num_return_sequences": [2]}, "several sequences or beams"),
        ({"embedding_bias_words": ["a"]}, "1 embedding_bias_words but 0 embedding_bias_weights"),
    ],
    ids=["too-many", "negative", "log-probs", "sequences", "of-another-model"],
)
def test_bad_request_is_refused_by_name(running: Running, more: dict[str, Any], text: str) -> None:
    assert text in running.client.ask("tensorrt_llm_bls", inputs(**more)).error
    assert texts(running.client.ask("tensorrt_llm_bls", inputs(2)))


def test_repository_without_decoupling_answers_whole_texts(
    triton_install: TritonInstall, tiny_model: Model, tmp_path: Path
) -> None:
    repository = emit(tmp_path, tiny_model, release="1.2.1", decoupled=False)
    journals = {name: tmp_path / f"{name}.txt" for name in ("tensorrt_llm", "tensorrt_llm_draft")}
    script = script_of(tiny_model)
    end = {name: {"end_at": "12"} for name in journals}
    replace_backend(repository, journals, script, **end)
    with TritonServer(repository, triton_install, log_path=tmp_path / "log.txt") as server:
        server.wait_ready(120)
        client = Client(server.grpc_url)
        answers = {
            "ensemble": client.ask("ensemble", inputs(end_id=[EOS])),
            "bls": client.ask("tensorrt_llm_bls", inputs(end_id=[EOS])),
            "drafted": client.ask("tensorrt_llm_bls", inputs(end_id=[EOS], num_draft_tokens=[3])),
        }
        assert len({texts(answer)[0] for answer in answers.values()}) == 1
        refused = client.ask("tensorrt_llm_bls", inputs(stream=[True]))
        assert "stream needs a model deployed using decoupled mode" in refused.error
        client.client.close()
