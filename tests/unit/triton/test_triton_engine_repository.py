"""What is emitted for engines: the configs of three recipes and three releases, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
from engine_files import write_engine
from engine_recipes import RECIPES, RELEASES, settings
from triton_models import EOS, IM_END, VOCAB_SIZE

from pipeline.errors import ConfigError, SourceError
from pipeline.triton.engine_backend import engine_backend
from pipeline.triton.engine_models import text_inputs
from pipeline.triton.engine_repository import EngineModel, emit_engines
from pipeline.triton.engine_serving import (
    Batching,
    Bls,
    Decoding,
    EngineServing,
    Execution,
    Guided,
    KvCache,
    LoraCache,
    serving_from_options,
)
from pipeline.triton.model_config import parameters_of, read_config
from pipeline.triton.placement import Placement
from pipeline.triton.repository import emit_repository
from pipeline.triton.verify import verify_repository

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "triton"
# The text models are alike in all recipes, so the draft's are enough; they name every tensor once more.
KEPT = {
    "plain": ("tensorrt_llm",),
    "replicas": ("tensorrt_llm",),
    "draft": ("tensorrt_llm", "tensorrt_llm_draft", "tensorrt_llm_bls", "ensemble"),
}


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_configs_are_the_recorded_ones(tmp_path: Path, tokenizer: Path, recipe: str, release: str) -> None:
    # UPDATE_GOLDEN=1 writes the files anew; look at the difference before it is committed.
    repository = RECIPES[recipe](tmp_path, tokenizer, release)
    assert verify_repository(repository) == []
    for model in KEPT[recipe]:
        text = (repository / model / "config.pbtxt").read_text()
        golden = GOLDEN / release / recipe / f"{model}.pbtxt"
        if os.environ.get("UPDATE_GOLDEN") == "1":
            golden.parent.mkdir(parents=True, exist_ok=True)
            golden.write_text(text)
        assert text == golden.read_text(), f"{golden} differs"
    script = (repository / "launch.sh").read_text()
    golden = GOLDEN / f"{recipe}.launch.sh"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        golden.write_text(script)
    assert script == golden.read_text()


# Inputs of tensorrt_llm in the template of the 1.0 line (triton_backend/all_models/inflight_batcher_llm, mid 2025).
TEMPLATE_1_0 = """
input_ids encoder_input_features encoder_output_lengths input_lengths request_output_len num_return_sequences
draft_input_ids decoder_input_ids decoder_input_lengths draft_logits draft_acceptance_threshold end_id pad_id
stop_words_list bad_words_list embedding_bias beam_width temperature runtime_top_k runtime_top_p runtime_top_p_min
runtime_top_p_decay runtime_top_p_reset_ids len_penalty early_stopping repetition_penalty min_tokens
beam_search_diversity_rate presence_penalty frequency_penalty seed return_log_probs return_context_logits
return_generation_logits return_perf_metrics return_num_input_tokens return_num_output_tokens exclude_input_in_output
stop streaming prompt_embedding_table prompt_table_extra_ids prompt_vocab_size cross_attention_mask
mrope_rotary_cos_sin mrope_position_deltas lora_task_id lora_weights lora_config context_phase_params
skip_cross_attn_blocks retention_token_range_starts retention_token_range_ends retention_token_range_priorities
retention_token_range_durations_ms retention_decode_priority retention_decode_duration_ms guided_decoding_guide_type
guided_decoding_guide lookahead_window_size lookahead_ngram_size lookahead_verification_set_size
"""


def test_inputs_of_the_1_0_line_are_those_of_its_template() -> None:
    inputs = {tensor.name for tensor in engine_backend("1.0.0").inputs}
    # no_repeat_ngram_size is read by the backend although its template does not declare it.
    assert inputs == {*TEMPLATE_1_0.split(), "no_repeat_ngram_size"}


def test_names_follow_the_release() -> None:
    old, new = ({tensor.name for tensor in engine_backend(release).inputs} for release in ("0.19.0", "0.20.0"))
    assert {"min_length", "random_seed"} <= old
    assert not {"min_tokens", "seed"} & old
    assert {"min_tokens", "seed"} <= new
    assert not {"min_length", "random_seed"} & new
    assert "return_kv_cache_reuse_stats" in {tensor.name for tensor in engine_backend("0.18.2").inputs}
    assert "guided_decoding_backend" not in engine_backend("0.18.2").parameters
    ours, _ = text_inputs(engine_backend("0.19.0"))
    assert ours["random_seed"] == "random_seed"
    assert "seed" not in ours


@pytest.mark.parametrize("release", ["1.3.0rc21", "0.9.0", "latest", ""])
def test_release_without_the_backend_is_refused(release: str) -> None:
    with pytest.raises(ConfigError, match=r"known from 0\.18\.2 to 1\.2\.1"):
        engine_backend(release)


def test_every_parameter_of_the_backend_is_set_derived_or_left_out_with_a_reason() -> None:
    backend = engine_backend("1.2.1")
    settable = {metadata["parameter"] for _, metadata, _ in EngineServing().settings() if "parameter" in metadata}
    derived = {
        "gpt_model_path",
        "exclude_input_in_output",
        "gpu_device_ids",
        "num_nodes",
        "executor_worker_path",
        "FORCE_CPU_ONLY_INPUT_TENSORS",
    }
    assert settable | derived | backend.left_out.keys() == backend.parameters
    assert all(backend.left_out.values())


def test_settings_reach_the_config(tmp_path: Path, tokenizer: Path) -> None:
    engine = write_engine(tmp_path / "engine", weight_streaming=True, plugins={"lora_plugin": "float16"})
    serving = EngineServing(
        batching=Batching(chunked_context=False, max_queue_size=7, max_queue_delay_us=20),
        kv_cache=KvCache(attention_window=(1024, 2048), sink_tokens=4, reuse=False),
        lora=LoraCache(prefetch_dir="/models/adapters"),
        guided=Guided(backend="xgrammar", tokenizer_info_path="/models/xgrammar.json"),
        execution=Execution(gpu_weights_fraction=0.5, cuda_graphs=True, cuda_graph_cache_size=16),
    )
    out = tmp_path / "repository"
    emit_repository(out, checkpoint=engine, tokenizer=tokenizer, settings=settings(serving))
    config = read_config(out / "tensorrt_llm" / "config.pbtxt")
    wanted = {
        "enable_chunked_context": "false",
        "enable_kv_cache_reuse": "false",
        "max_attention_window_size": "1024,2048",
        "sink_token_length": "4",
        "lora_prefetch_dir": "/models/adapters",
        "guided_decoding_backend": "xgrammar",
        "xgrammar_tokenizer_info_path": "/models/xgrammar.json",
        "gpu_weights_percent": "0.5",
        "cuda_graph_mode": "true",
        "cuda_graph_cache_size": "16",
        "gpt_model_path": "/models/tensorrt_llm/1",
    }
    assert wanted.items() <= parameters_of(config).items()
    assert config.dynamic_batching.default_queue_policy.max_queue_size == 7
    assert config.dynamic_batching.max_queue_delay_microseconds == 20
    assert list(config.dynamic_batching.preferred_batch_size) == [8]


def test_guided_decoding_gets_its_tokenizer(tmp_path: Path, tokenizer: Path) -> None:
    serving = EngineServing(guided=Guided(backend="xgrammar"))
    out = tmp_path / "repository"
    engine = write_engine(tmp_path / "engine")
    emit_repository(out, checkpoint=engine, tokenizer=tokenizer, settings=settings(serving))
    path = parameters_of(read_config(out / "tensorrt_llm" / "config.pbtxt"))["xgrammar_tokenizer_info_path"]
    info = json.loads((out / path.removeprefix("/models/")).read_text())
    assert len(info["encoded_vocab"]) == VOCAB_SIZE
    assert info["encoded_vocab"][EOS] == "</s>"
    assert info["stop_token_ids"] == [EOS, IM_END]
    assert json.loads(info["tokenizer_str"])["model"]["type"] == "BPE"
    assert verify_repository(out) == []
    (out / path.removeprefix("/models/")).unlink()
    assert [item.rule for item in verify_repository(out)] == ["guided-decoding"]


def test_what_follows_from_the_engine_is_filled_in(tmp_path: Path, tokenizer: Path) -> None:
    engine = write_engine(
        tmp_path / "engine",
        logits_dtype="float16",
        speculative_decoding_mode=4,
        max_draft_len=63,
        plugins={"use_paged_context_fmha": False},
    )
    out = tmp_path / "repository"
    emit_repository(out, checkpoint=engine, tokenizer=tokenizer, settings=settings())
    config = read_config(out / "tensorrt_llm" / "config.pbtxt")
    parameters = parameters_of(config)
    assert parameters["decoding_mode"] == "medusa"
    assert parameters["enable_kv_cache_reuse"] == "false"
    assert parameters["enable_chunked_context"] == "false"
    outputs = {tensor.name: tensor.data_type for tensor in config.output}
    assert outputs["generation_logits"] == 10  # TYPE_FP16 in model_config.proto
    # Without gathered logits nobody can score a prompt: clients see that the tensors are not there.
    assert "context_logits" not in outputs
    assert "return_context_logits" not in {tensor.name for tensor in config.input}


REFUSED: dict[str, tuple[dict[str, Any], EngineServing, dict[str, Any], str]] = {
    "batch-above-the-engine": (
        {},
        EngineServing(),
        {"max_batch_size": 64},
        "max_batch_size is 64, the engine was built for 8",
    ),
    "sequence-above-the-engine": (
        {},
        EngineServing(),
        {"max_seq_len": 4096},
        "max_seq_len is 4096, the engine was built for 2048",
    ),
    "beams-above-the-engine": (
        {},
        EngineServing(decoding=Decoding(max_beam_width=4)),
        {},
        "max_beam_width is 4, the engine was built for 1",
    ),
    "window-above-the-engine": (
        {},
        EngineServing(kv_cache=KvCache(attention_window=(4096,))),
        {},
        "max_attention_window_size is 4096, the engine was built for max_seq_len 2048",
    ),
    "reuse-without-paged-context": (
        {"plugins": {"use_paged_context_fmha": False}},
        EngineServing(kv_cache=KvCache(reuse=True)),
        {},
        "enable_kv_cache_reuse is true, the engine was built without use_paged_context_fmha",
    ),
    "continuous-cache": (
        {"kv_cache_type": "CONTINUOUS"},
        EngineServing(),
        {},
        "needs a paged KV cache, the engine was built with 'continuous'",
    ),
    "mode-of-another-engine": (
        {},
        EngineServing(decoding=Decoding(mode="medusa")),
        {},
        "decoding_mode is 'medusa', the engine was built for speculative decoding 'none'",
    ),
    "lookahead-without-window": (
        {"speculative_decoding_mode": 8},
        EngineServing(),
        {},
        "decoding_mode is 'lookahead', but lookahead_window_size is not set",
    ),
    "weights-without-streaming": (
        {},
        EngineServing(execution=Execution(gpu_weights_fraction=0.5)),
        {},
        "the engine has no weight streaming",
    ),
    "fast-logits": ({}, EngineServing(decoding=Decoding(fast_logits=True)), {}, "started beforehand"),
    "all-memory": (
        {},
        EngineServing(kv_cache=KvCache(free_gpu_memory_fraction=1.0)),
        {},
        "is 1, expected more than 0 and less than 1",
    ),
    "policy": (
        {},
        EngineServing(batching=Batching(scheduler_policy="fair")),
        {},
        "is 'fair', expected one of guaranteed_no_evict, max_utilization",
    ),
    "too-few-gpus": (
        {"tp": 2},
        EngineServing(placement=Placement(gpus=(0, 1, 2), replicas=2)),
        {},
        r"2 replica\(s\) of 2 rank\(s\) need 4 GPUs, 3 given",
    ),
    "other-release": (
        {"release": "1.0.0"},
        EngineServing(),
        {"release": "1.2.1"},
        "has TensorRT-LLM 1.2.1, the engine was built by 1.0.0",
    ),
    "unknown-release": ({"release": "1.3.0rc21"}, EngineServing(), {}, "known from 0.18.2 to 1.2.1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_impossible_setting_is_refused_with_both_values(tmp_path: Path, tokenizer: Path, case: str) -> None:
    build, serving, changes, text = REFUSED[case]
    engine = write_engine(tmp_path / "engine", **build)
    asked = dataclasses.replace(settings(serving), **changes)
    with pytest.raises(ConfigError, match=text):
        emit_repository(tmp_path / "out", checkpoint=engine, tokenizer=tokenizer, settings=asked)
    assert not (tmp_path / "out").exists()


def test_all_problems_are_listed_at_once(tmp_path: Path, tokenizer: Path) -> None:
    engine = write_engine(tmp_path / "engine")
    (engine / "rank0.engine").unlink()
    serving = EngineServing(decoding=Decoding(max_beam_width=3), execution=Execution(gpu_weights_fraction=0.1))
    with pytest.raises(ConfigError) as caught:
        emit_repository(tmp_path / "out", checkpoint=engine, tokenizer=tokenizer, settings=settings(serving))
    assert {"engine-limits", "engine-ability", "engine-files"} <= {item.rule for item in caught.value.findings}


@pytest.mark.parametrize(
    "content", ["", "{}", '{"version": "1.2.1", "pretrained_config": {}, "build_config": {}}', "[]"]
)
def test_folder_that_is_no_engine_is_named(tmp_path: Path, tokenizer: Path, content: str) -> None:
    engine = tmp_path / "engine"
    engine.mkdir()
    (engine / "config.json").write_text(content)
    with pytest.raises(SourceError, match="is not the config of an engine"):
        emit_repository(tmp_path / "out", checkpoint=engine, tokenizer=tokenizer, settings=settings())


@pytest.mark.parametrize(
    ("target", "draft", "bls", "text"),
    [
        ({}, {}, Bls(), "built for speculative decoding 'none'"),
        ({"speculative_decoding_mode": 2, "max_draft_len": 4}, {}, Bls(draft_tokens=8), "8 draft tokens .* takes 4"),
        (
            {"speculative_decoding_mode": 2, "max_draft_len": 8},
            {},
            Bls(use_draft_logits=True),
            "without gather_generation_logits",
        ),
        ({"speculative_decoding_mode": 2}, {"vocab_size": 9}, Bls(), "the draft's vocabulary has 9 ids"),
        ({"speculative_decoding_mode": 2}, {"release": "1.0.0"}, Bls(), "the draft was built by TensorRT-LLM 1.0.0"),
    ],
    ids=["mode", "length", "logits", "vocabulary", "release"],
)
def test_engines_that_cannot_draft_for_each_other_are_refused(
    tmp_path: Path, tokenizer: Path, target: dict[str, Any], draft: dict[str, Any], bls: Bls, text: str
) -> None:
    model = EngineModel(
        write_engine(tmp_path / "engine", **target),
        tokenizer,
        settings(EngineServing(bls=bls)),
        draft=write_engine(tmp_path / "draft", **draft),
    )
    with pytest.raises(ConfigError, match=text):
        emit_engines(tmp_path / "out", [model])


def test_several_engines_share_a_repository(tmp_path: Path, tokenizer: Path) -> None:
    serving = [EngineServing(placement=Placement(gpus=gpus)) for gpus in ((3,), (1, 2))]
    engines = [write_engine(tmp_path / "a"), write_engine(tmp_path / "b", tp=2)]
    models = [
        EngineModel(engine, tokenizer, settings(each), name=name)
        for engine, each, name in zip(engines, serving, ("", "large"), strict=True)
    ]
    out = tmp_path / "repository"
    plan = emit_engines(out, models)
    assert verify_repository(out) == []
    assert plan.mode == "orchestrator"
    assert plan.servers[0].gpus == (1, 2, 3)
    large = read_config(out / "tensorrt_llm_large" / "config.pbtxt")
    assert parameters_of(large)["gpu_device_ids"] == "0,1"
    assert parameters_of(large)["gpt_model_path"] == "/models/tensorrt_llm_large/1"
    assert parameters_of(read_config(out / "tensorrt_llm" / "config.pbtxt"))["gpu_device_ids"] == "2"
    steps = read_config(out / "ensemble_large" / "config.pbtxt").ensemble_scheduling.step
    assert [step.model_name for step in steps] == ["preprocessing_large", "tensorrt_llm_large", "postprocessing_large"]


def test_engines_on_one_gpu_need_bounded_caches(tmp_path: Path, tokenizer: Path) -> None:
    engine = write_engine(tmp_path / "engine")
    bounded = EngineServing(kv_cache=KvCache(max_tokens=4096))
    models = [EngineModel(engine, tokenizer, settings(bounded)), EngineModel(engine, tokenizer, settings(), name="b")]
    with pytest.raises(ConfigError, match="share GPU 0 of the server, but the cache of tensorrt_llm_b has no bound"):
        emit_engines(tmp_path / "out", models)
    emit_engines(tmp_path / "out", [models[0], EngineModel(engine, tokenizer, settings(bounded), name="b")])
    assert verify_repository(tmp_path / "out") == []


@pytest.mark.parametrize("names", [["bls"], ["draft_x"], ["a b"], ["a", "a"], []])
def test_names_that_would_be_taken_for_others_are_refused(tmp_path: Path, tokenizer: Path, names: list[str]) -> None:
    engine = write_engine(tmp_path / "engine")
    with pytest.raises(ConfigError, match="name"):
        emit_engines(tmp_path / "out", [EngineModel(engine, tokenizer, settings(), name=name) for name in names])


def test_moved_repository_stays_valid_and_names_no_place_of_this_machine(tmp_path: Path, tokenizer: Path) -> None:
    repository = RECIPES["draft"](tmp_path, tokenizer, "1.2.1")
    moved = repository.rename(tmp_path / "elsewhere")
    assert verify_repository(moved) == []
    for path in moved.rglob("*"):
        if path.suffix in (".pbtxt", ".json", ".py", ".sh"):
            assert str(tmp_path) not in path.read_text(encoding="utf-8")


def test_options_become_settings() -> None:
    serving = serving_from_options({"kv_cache.reuse": False, "kv_cache.attention_window": [512], "decoding.mode": None})
    assert serving.kv_cache == KvCache(reuse=False, attention_window=(512,))


@pytest.mark.parametrize(
    ("options", "rule", "text"),
    [
        ({"max_num_tokens": 8192}, "engine-only-option", "build-time option"),
        ({"batching.max_seq_len": 8192}, "engine-only-option", "build-time option"),
        ({"kv_cache.resue": True}, "unknown-setting", "does not exist"),
        ({"enable_kv_cache_reuse": True}, "unknown-setting", "is called kv_cache.reuse here"),
        ({"kv_cache.reuse": "yes"}, "serving-type", "'yes', expected bool"),
        ({"periods.cancellation_ms": True}, "serving-type", "True, expected int"),
    ],
)
def test_option_that_does_not_belong_here_is_refused(options: dict[str, Any], rule: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        serving_from_options(options)
    assert [item.rule for item in caught.value.findings] == [rule]
    assert rule == "serving-type" or caught.value.findings[0].hint
