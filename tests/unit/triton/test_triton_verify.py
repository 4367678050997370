"""Each test puts one fault into a good repository; verify has to name it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.triton.model_config import ModelConfig, read_config, write_config
from pipeline.triton.verify import verify_repository


def edit(root: Path, model: str, change: Callable[[ModelConfig], None]) -> None:
    config = read_config(root / model / "config.pbtxt")
    change(config)
    write_config(root / model, config)


def set_parameter(root: Path, model: str, key: str, value: str) -> None:
    edit(root, model, lambda config: setattr(config.parameters[key], "string_value", value))


def rename_output(root: Path) -> None:
    edit(root, "postprocessing", lambda config: setattr(config.output[0], "name", "TEXT"))


def change_datatype(root: Path) -> None:
    edit(root, "preprocessing", lambda config: setattr(config.output[0], "data_type", 9))  # TYPE_INT64


def change_dims(root: Path) -> None:
    edit(root, "preprocessing", lambda config: config.output[2].dims.append(1))


def drop_step_input(root: Path) -> None:
    edit(root, "ensemble", lambda config: config.ensemble_scheduling.step[1].input_map.pop("input_lengths"))


def append_text(path: Path, text: str) -> None:
    with path.open("a") as stream:
        stream.write(text)


def replace_by_link(path: Path) -> None:
    target = path.with_suffix(".real")
    path.rename(target)
    path.symlink_to(target)


def truncate(path: Path) -> None:
    data = path.read_bytes()
    path.unlink()  # a hard link: the source must stay whole
    path.write_bytes(data[:-10])


def write_pointer(path: Path) -> None:
    path.unlink()
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


def leak_path(root: Path) -> None:
    path = root / "preprocessing" / "1" / "tokenizer" / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "name_or_path": "/home/builder/model"}))


def change_end_ids(root: Path) -> None:
    for model in ("preprocessing", "postprocessing"):
        path = root / model / "1" / "tokenizer" / "generation_config.json"
        path.write_text(json.dumps({"eos_token_id": [1, 2, 3]}))


def decouple(root: Path, model: str, value: bool) -> None:
    edit(root, model, lambda config: setattr(config.model_transaction_policy, "decoupled", value))


FAULTS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "placeholder-outside-string": (
        lambda root: append_text(root / "preprocessing" / "config.pbtxt", "max_batch_size: ${triton_max_batch_size}\n"),
        "config-parse",
        "preprocessing/config.pbtxt",
    ),
    "placeholder-in-parameter": (
        lambda root: set_parameter(root, "tensorrt_llm", "decoding_mode", "${decoding_mode}"),
        "placeholder",
        "tensorrt_llm/config.pbtxt",
    ),
    "unknown-field": (
        lambda root: append_text(root / "ensemble" / "config.pbtxt", "max_bach_size: 3\n"),
        "config-parse",
        "ensemble/config.pbtxt",
    ),
    "renamed-output": (rename_output, "ensemble-tensor", "ensemble/config.pbtxt"),
    "other-datatype": (change_datatype, "ensemble-tensor", "ensemble/config.pbtxt"),
    "other-dims": (change_dims, "ensemble-tensor", "ensemble/config.pbtxt"),
    "required-input-open": (drop_step_input, "ensemble-tensor", "ensemble/config.pbtxt"),
    "model-of-another-release": (
        lambda root: set_parameter(root, "preprocessing", "repository_layout", "reference/0"),
        "mixed-versions",
        "config.pbtxt",
    ),
    "ensemble-not-decoupled": (lambda root: decouple(root, "ensemble", False), "decoupled", "config.pbtxt"),
    "preprocessing-decoupled": (
        lambda root: decouple(root, "preprocessing", True),
        "decoupled",
        "preprocessing/config.pbtxt",
    ),
    "batch-size": (
        lambda root: edit(root, "postprocessing", lambda config: setattr(config, "max_batch_size", 2)),
        "max-batch-size",
        "config.pbtxt",
    ),
    "engine-smaller-than-batch": (
        lambda root: set_parameter(root, "tensorrt_llm", "max_num_sequences", "2"),
        "engine-limits",
        "tensorrt_llm/config.pbtxt",
    ),
    "longer-than-the-model": (
        lambda root: set_parameter(root, "tensorrt_llm", "max_seq_len", "100000"),
        "engine-limits",
        "tensorrt_llm/config.pbtxt",
    ),
    "gpu-placement": (
        lambda root: edit(root, "tensorrt_llm", lambda config: config.instance_group[0].gpus.append(1)),
        "placement",
        "tensorrt_llm/config.pbtxt",
    ),
    "tokenizer-path-of-the-builder": (
        lambda root: set_parameter(root, "preprocessing", "tokenizer_dir", "/home/builder/tokenizer"),
        "absolute-path",
        "preprocessing/config.pbtxt",
    ),
    "path-in-tokenizer-config": (
        leak_path,
        "absolute-path",
        "preprocessing/1/tokenizer/tokenizer_config.json",
    ),
    "tokenizer-missing": (
        lambda root: (root / "postprocessing" / "1" / "tokenizer" / "tokenizer.json").unlink(),
        "tokenizer",
        "postprocessing/1/tokenizer",
    ),
    "tokenizers-differ": (
        lambda root: append_text(root / "postprocessing" / "1" / "tokenizer" / "tokenizer.json", "\n"),
        "tokenizer",
        "preprocessing",
    ),
    "end-ids-differ": (change_end_ids, "special-ids", "preprocessing/config.pbtxt"),
    "symlink": (
        lambda root: replace_by_link(root / "tensorrt_llm" / "1" / "config.json"),
        "symlink",
        "tensorrt_llm/1/config.json",
    ),
    "model-missing": (lambda root: shutil.rmtree(root / "postprocessing"), "model-missing", "postprocessing"),
    "name-differs": (
        lambda root: edit(root, "ensemble", lambda config: setattr(config, "name", "chat")),
        "model-name",
        "ensemble/config.pbtxt",
    ),
    "version-folder": (lambda root: shutil.rmtree(root / "ensemble" / "1"), "version-folder", "ensemble"),
    "code-missing": (
        lambda root: (root / "tensorrt_llm" / "1" / "model.py").unlink(),
        "model-code",
        "tensorrt_llm/1",
    ),
    "engine-code-missing": (
        lambda root: shutil.rmtree(root / "tensorrt_llm" / "1" / "reference"),
        "engine-code",
        "tensorrt_llm/1",
    ),
    "weights-missing": (
        lambda root: (root / "tensorrt_llm" / "1" / "rank0.safetensors").unlink(),
        "weights",
        "tensorrt_llm/1/rank0.safetensors",
    ),
    "weights-short": (
        lambda root: truncate(root / "tensorrt_llm" / "1" / "rank0.safetensors"),
        "weights",
        "tensorrt_llm/1/rank0.safetensors",
    ),
    "weights-are-a-pointer": (
        lambda root: write_pointer(root / "tensorrt_llm" / "1" / "rank0.safetensors"),
        "weights",
        "tensorrt_llm/1/rank0.safetensors",
    ),
}


def test_good_repository_has_no_findings(repository: Path) -> None:
    assert verify_repository(repository) == []


def test_moved_repository_has_no_findings(repository: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere" / "models"
    moved.parent.mkdir()
    repository.rename(moved)
    assert verify_repository(moved) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found_and_placed(repository: Path, fault: str) -> None:
    inject, rule, path = FAULTS[fault]
    inject(repository)
    found = [finding for finding in verify_repository(repository) if finding.severity == "error"]
    assert (rule, path) in {(finding.rule, finding.path) for finding in found}
    assert all(finding.message and finding.hint for finding in found)


def test_linear_rope_scaling_stretches_what_the_model_can_take(repository: Path) -> None:
    path = repository / "tensorrt_llm" / "1" / "config.json"
    checkpoint = json.loads(path.read_text())
    positions = checkpoint["max_position_embeddings"]
    path.unlink()  # a hard link: the source must stay whole
    path.write_text(json.dumps({**checkpoint, "rotary_scaling": {"type": "linear", "factor": 4.0}}))
    set_parameter(repository, "tensorrt_llm", "max_seq_len", str(4 * positions))
    assert verify_repository(repository) == []
    set_parameter(repository, "tensorrt_llm", "max_seq_len", str(4 * positions + 1))
    assert [finding.rule for finding in verify_repository(repository)] == ["engine-limits"]


def test_several_faults_are_all_listed(repository: Path) -> None:
    rename_output(repository)
    change_end_ids(repository)
    assert {"ensemble-tensor", "special-ids"} <= {finding.rule for finding in verify_repository(repository)}


def test_tokenizer_without_end_ids_is_a_warning(repository: Path) -> None:
    for model in ("preprocessing", "postprocessing"):
        folder = repository / model / "1" / "tokenizer"
        (folder / "generation_config.json").unlink()
        (folder / "tokenizer_config.json").write_text("{}")
        set_parameter(repository, model, "end_ids", "")
    set_parameter(repository, "preprocessing", "pad_id", "0")
    assert {(finding.rule, finding.severity) for finding in verify_repository(repository)} == {
        ("special-ids", "warning")
    }


def test_folder_that_is_not_there_is_a_finding(tmp_path: Path) -> None:
    (finding,) = verify_repository(tmp_path / "nowhere")
    assert finding.rule == "repository-missing"
