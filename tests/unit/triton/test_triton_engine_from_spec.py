"""What a job's configuration says about serving its engine."""

from __future__ import annotations

import pytest
import yaml

from pipeline.config.compose import compose
from pipeline.stages.compose import compose_file
from pipeline.triton.engine_from_spec import serving_from_spec
from pipeline.triton.placement import Placement

JOB = ["model=llama2", "target=engine", "hardware=h100_80g"]


def test_lookahead_window_of_the_build_is_the_one_that_is_served() -> None:
    spec = compose([*JOB, "speculative=lookahead", "speculative.window=5", "speculative.ngram=4"])
    serving = serving_from_spec(spec)
    assert spec.speculative is not None
    assert (serving.decoding.lookahead_window, serving.decoding.lookahead_ngram) == (5, 4)
    assert serving.decoding.lookahead_verification == spec.speculative.verification


def test_options_win_over_what_is_derived() -> None:
    serving = serving_from_spec(compose(JOB), {"kv_cache.free_gpu_memory_fraction": 0.8, "decoding.max_beam_width": 1})
    assert serving.kv_cache.free_gpu_memory_fraction == 0.8


@pytest.mark.parametrize(("parallel", "gpus"), [("single", ["0"]), ("tp4", ["0", "1", "2", "3"])])
def test_compose_file_of_an_engine_reserves_its_gpus(parallel: str, gpus: list[str]) -> None:
    spec = compose([*JOB, f"parallel={parallel}"])
    triton = yaml.safe_load(compose_file(spec))["services"]["triton"]
    assert triton["image"] == spec.toolchain.serve_image
    (device,) = triton["deploy"]["resources"]["reservations"]["devices"]
    assert device["device_ids"] == gpus


def test_compose_file_takes_a_placement() -> None:
    text = compose_file(compose(JOB), Placement(gpus=(6, 7), replicas=2))
    assert yaml.safe_load(text)["services"]["triton"]["environment"]["TRTLLM_ORCHESTRATOR"] == "1"


def test_compose_file_of_the_reference_needs_no_gpu() -> None:
    assert "deploy" not in yaml.safe_load(compose_file(compose(["target=reference"])))["services"]["triton"]
