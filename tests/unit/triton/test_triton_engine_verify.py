"""Each test puts one fault into a good repository for engines; verify has to name it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_recipes import RECIPES
from test_triton_verify import append_text, decouple, edit, replace_by_link, set_parameter

from pipeline.triton.model_config import ModelConfig
from pipeline.triton.verify import verify_repository

LLM = "tensorrt_llm/config.pbtxt"


def edit_engine(root: Path, model: str = "tensorrt_llm", **changes: Any) -> None:
    """Change the builder's part of an engine's config, or its version and ranks."""
    path = root / model / "1" / "config.json"
    document = json.loads(path.read_text())
    document["version"] = changes.pop("version", document["version"])
    document["pretrained_config"]["mapping"]["world_size"] = changes.pop("world_size", 1)
    document["build_config"]["plugin_config"] |= changes.pop("plugins", {})
    document["build_config"] |= changes
    path.unlink()  # a hard link: the source must stay whole
    path.write_text(json.dumps(document))


def drop_parameter(root: Path, key: str) -> None:
    edit(root, "tensorrt_llm", lambda config: config.parameters.pop(key))


def rename_input(root: Path, old: str, new: str) -> None:
    def change(config: ModelConfig) -> None:
        next(tensor for tensor in config.input if tensor.name == old).name = new

    edit(root, "tensorrt_llm", change)


def add_gpus(root: Path) -> None:
    edit(root, "tensorrt_llm", lambda config: config.instance_group[0].gpus.append(0))


def add_instance(root: Path) -> None:
    edit(root, "tensorrt_llm", lambda config: setattr(config.instance_group[0], "count", 2))


def set_logits(root: Path) -> None:
    def change(config: ModelConfig) -> None:
        next(tensor for tensor in config.output if tensor.name == "generation_logits").data_type = 10  # TYPE_FP16

    edit(root, "tensorrt_llm", change)


def empty_file(path: Path) -> None:
    path.unlink()
    path.touch()


FAULTS: dict[str, tuple[Callable[[Path], object], str, str, str]] = {
    # known faults D1 to D5, C2, C6 and C8
    "placeholder": (
        lambda root: append_text(root / LLM, "max_batch_size: ${triton_max_batch_size}\n"),
        "config-parse",
        LLM,
        "does not parse",
    ),
    "placeholder-in-parameter": (
        lambda root: set_parameter(root, "tensorrt_llm", "lora_prefetch_dir", "${lora_prefetch_dir}"),
        "placeholder",
        LLM,
        "unfilled placeholder",
    ),
    "models-of-two-releases": (
        lambda root: set_parameter(root, "postprocessing", "repository_layout", "engine/1.0.0/2"),
        "mixed-versions",
        "config.pbtxt",
        "different emissions",
    ),
    "renamed-output": (
        lambda root: edit(root, "postprocessing", lambda config: setattr(config.output[0], "name", "TEXT")),
        "ensemble-tensor",
        "ensemble/config.pbtxt",
        "no output OUTPUT",
    ),
    "input-of-an-older-release": (
        lambda root: rename_input(root, "seed", "random_seed"),
        "engine-tensor",
        LLM,
        "random_seed",
    ),
    "bls-not-decoupled": (
        lambda root: decouple(root, "tensorrt_llm_bls", False),
        "decoupled",
        "config.pbtxt",
        "differs",
    ),
    "path-of-the-builder": (
        lambda root: set_parameter(root, "tensorrt_llm", "gpt_model_path", "/home/builder/engine"),
        "engine-path",
        LLM,
        "the engine will be at /models/tensorrt_llm/1",
    ),
    "tokenizer-path": (
        lambda root: set_parameter(root, "preprocessing", "tokenizer_dir", "/home/builder/tokenizer"),
        "absolute-path",
        "preprocessing/config.pbtxt",
        "a path of one machine",
    ),
    "gpus-in-instance-group": (add_gpus, "placement", LLM, "which this backend ignores"),
    "instances-without-gpus": (add_instance, "placement", LLM, r"2 instance\(s\), but gpu_device_ids has 1"),
    "two-instances-on-one-gpu": (
        lambda root: (add_instance(root), set_parameter(root, "tensorrt_llm", "gpu_device_ids", "0;0")),
        "placement",
        LLM,
        "share a GPU",
    ),
    "gpu-list-without-numbers": (
        lambda root: set_parameter(root, "tensorrt_llm", "gpu_device_ids", "all"),
        "placement",
        LLM,
        "no list of numbers",
    ),
    "engines-share-a-gpu": (
        lambda root: (
            set_parameter(root, "tensorrt_llm_draft", "gpu_device_ids", "0"),
            edit(root, "tensorrt_llm", lambda config: config.parameters.pop("max_tokens_in_paged_kv_cache")),
        ),
        "shared-gpu",
        LLM,
        "share GPU 0 of the server, but the cache of tensorrt_llm has no bound",
    ),
    "batch-above-the-engine": (
        lambda root: edit_engine(root, max_batch_size=2),
        "engine-limits",
        LLM,
        "max_batch_size is 8, the engine was built for 2",
    ),
    "build-option-in-serving": (
        lambda root: set_parameter(root, "tensorrt_llm", "max_num_tokens", "8192"),
        "engine-only-option",
        LLM,
        "build-time option",
    ),
    "unknown-parameter": (
        lambda root: set_parameter(root, "tensorrt_llm", "kv_cache_free_gpu_memory_fraction", "0.5"),
        "unknown-parameter",
        LLM,
        "has no parameter kv_cache_free_gpu_memory_fraction",
    ),
    "key-the-backend-needs": (
        lambda root: drop_parameter(root, "guided_decoding_backend"),
        "missing-parameter",
        LLM,
        "does not load without the key guided_decoding_backend",
    ),
    "world-size": (
        lambda root: edit_engine(root, world_size=2),
        "world-size",
        LLM,
        r"1 GPU\(s\) to an engine of 2 rank",
    ),
    "rank-missing": (
        lambda root: (root / "tensorrt_llm" / "1" / "rank0.engine").unlink(),
        "engine-files",
        "tensorrt_llm/1/rank0.engine",
        "is missing",
    ),
    "rank-empty": (
        lambda root: empty_file(root / "tensorrt_llm_draft" / "1" / "rank0.engine"),
        "engine-files",
        "tensorrt_llm_draft/1/rank0.engine",
        "is empty",
    ),
    "rank-too-many": (
        lambda root: (root / "tensorrt_llm" / "1" / "rank1.engine").write_bytes(b"engine"),
        "engine-files",
        "tensorrt_llm/1/rank1.engine",
        "belongs to no rank",
    ),
    "engine-without-config": (
        lambda root: (root / "tensorrt_llm" / "1" / "config.json").unlink(),
        "engine-files",
        "tensorrt_llm/1/config.json",
        "not the config of an engine",
    ),
    "engine-of-another-release": (
        lambda root: edit_engine(root, version="1.0.0"),
        "engine-release",
        LLM,
        "emitted for TensorRT-LLM 1.2.1, the engine was built by 1.0.0",
    ),
    "reuse-the-engine-cannot": (
        lambda root: edit_engine(root, plugins={"use_paged_context_fmha": False}),
        "engine-ability",
        LLM,
        "enable_kv_cache_reuse is true",
    ),
    "continuous-cache": (
        lambda root: edit_engine(root, kv_cache_type="CONTINUOUS"),
        "engine-ability",
        LLM,
        "needs a paged KV cache",
    ),
    "logits-of-another-type": (set_logits, "engine-tensor", LLM, "is TYPE_FP16, the engine's is TYPE_FP32"),
    "draft-of-another-kind": (
        lambda root: edit_engine(root, speculative_decoding_mode=1),
        "draft-engine",
        "tensorrt_llm_bls/config.pbtxt",
        "built for speculative decoding 'none'",
    ),
    "draft-model-gone": (
        lambda root: shutil.rmtree(root / "tensorrt_llm_draft"),
        "bls-model",
        "tensorrt_llm_bls/config.pbtxt",
        "'tensorrt_llm_draft', which has no model",
    ),
    "symlink": (
        lambda root: replace_by_link(root / "tensorrt_llm" / "1" / "rank0.engine"),
        "symlink",
        "tensorrt_llm/1/rank0.engine",
        "symbolic link",
    ),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Path:
    return RECIPES["draft"](tmp_path_factory.mktemp("good"), tokenizer, "1.2.1")


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found_and_placed(good: Path, tmp_path: Path, fault: str) -> None:
    inject, rule, path, text = FAULTS[fault]
    repository = tmp_path / "repository"
    shutil.copytree(good, repository)
    inject(repository)
    found = [item for item in verify_repository(repository) if item.severity == "error"]
    matching = [item for item in found if (item.rule, item.path) == (rule, path) and re.search(text, item.message)]
    assert matching, found
    assert all(item.message and item.hint for item in found)


def test_fixed_sampling_mode_is_a_warning(good: Path, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    shutil.copytree(good, repository)
    set_parameter(repository, "tensorrt_llm", "decoding_mode", "top_k")
    assert {(item.rule, item.severity) for item in verify_repository(repository)} == {("decoding-mode", "warning")}
