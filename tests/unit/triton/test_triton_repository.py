from __future__ import annotations

import ast
import json
import os
import sys
from pathlib import Path

import pytest
from triton_models import EOS, IM_END, MAX_SEQ_LEN, VOCAB_SIZE, write_tokenizer

from pipeline.errors import ConfigError, SourceError
from pipeline.triton import tensors
from pipeline.triton.model_config import parameters_of, read_config
from pipeline.triton.repository import RepositorySettings, emit_repository
from pipeline.triton.special_ids import SpecialIds, read_special_ids

SETTINGS = RepositorySettings(max_batch_size=4, max_seq_len=MAX_SEQ_LEN)


def test_repository_has_the_layout_triton_wants(repository: Path) -> None:
    assert {path.name for path in repository.iterdir()} == {
        "tensorrt_llm",
        "preprocessing",
        "postprocessing",
        "ensemble",
    }
    for model in repository.iterdir():
        assert read_config(model / "config.pbtxt").name == model.name
        assert (model / "1").is_dir()
    engine = repository / "tensorrt_llm" / "1"
    assert (engine / "reference" / "engine.py").is_file()
    assert (engine / "rank0.safetensors").is_file()
    assert (repository / "preprocessing" / "1" / "tokenizer" / "tokenizer.json").is_file()


def test_weights_are_linked_and_nothing_is_a_symlink(repository: Path, checkpoint: Path) -> None:
    emitted = repository / "tensorrt_llm" / "1" / "rank0.safetensors"
    assert emitted.stat().st_ino == (checkpoint / "rank0.safetensors").stat().st_ino
    assert not [path for path in repository.rglob("*") if path.is_symlink()]


def test_weights_are_copied_where_links_are_impossible(
    tmp_path: Path, checkpoint: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object) -> None:
        raise OSError("cross-device link")

    monkeypatch.setattr(os, "link", no_links)
    emit_repository(tmp_path / "out", checkpoint=checkpoint, tokenizer=tokenizer, settings=SETTINGS)
    emitted = tmp_path / "out" / "tensorrt_llm" / "1" / "rank0.safetensors"
    assert emitted.read_bytes() == (checkpoint / "rank0.safetensors").read_bytes()


def test_linked_source_becomes_a_real_file(tmp_path: Path, checkpoint: Path, tokenizer: Path) -> None:
    source = tmp_path / "links"
    source.mkdir()
    for path in checkpoint.iterdir():
        (source / path.name).symlink_to(path)
    emit_repository(tmp_path / "out", checkpoint=source, tokenizer=tokenizer, settings=SETTINGS)
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_symlink()]


def test_no_file_names_a_place_on_this_machine(repository: Path, checkpoint: Path, tokenizer: Path) -> None:
    for path in repository.rglob("*"):
        if path.suffix in (".pbtxt", ".json", ".py"):
            text = path.read_text(encoding="utf-8")
            assert str(checkpoint) not in text
            assert str(tokenizer) not in text
            assert str(repository) not in text


def test_shared_values_are_the_same_everywhere(repository: Path) -> None:
    configs = {path.name: read_config(path / "config.pbtxt") for path in repository.iterdir()}
    assert {config.max_batch_size for config in configs.values()} == {4}
    assert configs["tensorrt_llm"].model_transaction_policy.decoupled
    assert parameters_of(configs["preprocessing"])["end_ids"] == f"{EOS},{IM_END}"
    assert parameters_of(configs["postprocessing"])["end_ids"] == f"{EOS},{IM_END}"
    assert parameters_of(configs["tensorrt_llm"])["max_seq_len"] == str(MAX_SEQ_LEN)
    assert parameters_of(configs["preprocessing"])["vocab_size"] == str(VOCAB_SIZE)


def test_two_emissions_are_equal(tmp_path: Path, repository: Path, checkpoint: Path, tokenizer: Path) -> None:
    settings = RepositorySettings(max_batch_size=4, max_seq_len=MAX_SEQ_LEN, threads=1)
    emit_repository(tmp_path / "again", checkpoint=checkpoint, tokenizer=tokenizer, settings=settings)
    names = sorted(str(path.relative_to(repository)) for path in repository.rglob("*") if path.is_file())
    assert names == sorted(str(path.relative_to(tmp_path / "again")) for path in (tmp_path / "again").rglob("*.*"))
    assert all((repository / name).read_bytes() == (tmp_path / "again" / name).read_bytes() for name in names)


def test_llm_tensors_are_those_of_the_backend() -> None:
    # Names of tensorrt_llm in the 1.x templates; the older min_length and random_seed are gone.
    names = {tensor.name for tensor in tensors.LLM_INPUTS}
    assert {"input_ids", "input_lengths", "request_output_len", "min_tokens", "seed"} <= names
    assert not {"min_length", "random_seed"} & names
    assert [tensor.name for tensor in tensors.LLM_INPUTS if not tensor.optional] == [
        "input_lengths",
        "request_output_len",
    ]
    assert not names & {tensor.name for tensor in tensors.OWN_LLM_INPUTS}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"max_batch_size": 0}, "max_batch_size is 0"),
        ({"max_seq_len": 1}, "max_seq_len is 1"),
        ({"threads": 0}, "threads is 0"),
        ({"target": "rocket"}, "target is 'rocket'"),
    ],
)
def test_impossible_setting_is_refused(
    tmp_path: Path, checkpoint: Path, tokenizer: Path, changes: dict[str, int], text: str
) -> None:
    settings = RepositorySettings(**{"max_batch_size": 4, "max_seq_len": 64, **changes})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=text):
        emit_repository(tmp_path / "out", checkpoint=checkpoint, tokenizer=tokenizer, settings=settings)
    assert not (tmp_path / "out").exists()


def test_bad_source_is_refused_by_name(tmp_path: Path, checkpoint: Path, tokenizer: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(SourceError, match=r"has no tokenizer\.json"):
        emit_repository(tmp_path / "out", checkpoint=checkpoint, tokenizer=empty, settings=SETTINGS)
    with pytest.raises(SourceError, match="not the config of a TensorRT-LLM checkpoint"):
        emit_repository(tmp_path / "out", checkpoint=empty, tokenizer=tokenizer, settings=SETTINGS)
    with pytest.raises(SourceError, match="is not empty"):
        emit_repository(checkpoint, checkpoint=checkpoint, tokenizer=tokenizer, settings=SETTINGS)


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json"])
def test_special_ids_of_json_nested_without_end_name_the_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("[" * 100_000)
    with pytest.raises(SourceError, match=name):
        read_special_ids(tmp_path)


def test_special_ids_are_the_union_of_both_files(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    assert read_special_ids(folder) == SpecialIds((EOS, IM_END), EOS)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": IM_END, "pad_token_id": 0}))
    assert read_special_ids(folder) == SpecialIds((IM_END, EOS), 0)
    (folder / "generation_config.json").unlink()
    assert read_special_ids(folder) == SpecialIds((EOS,), EOS)


def test_token_that_the_tokenizer_lacks_is_named(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<gone>"}}))
    with pytest.raises(SourceError, match="names eos_token '<gone>'"):
        read_special_ids(folder)


def test_emitted_code_imports_nothing_of_this_package(repository: Path) -> None:
    # threadpoolctl is used when it is there; tokenizers by the two text models; llguidance by guided requests.
    allowed = {
        "llguidance",
        "numpy",
        "ml_dtypes",
        "safetensors",
        "threadpoolctl",
        "tokenizers",
        "triton_python_backend_utils",
    }
    for path in repository.rglob("*.py"):
        siblings = {other.stem for other in path.parent.iterdir()}
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                roots = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                roots = {str(node.module).split(".")[0]}
            else:
                continue
            assert roots <= allowed | siblings | sys.stdlib_module_names, path
