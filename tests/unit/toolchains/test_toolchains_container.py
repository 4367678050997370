"""Commands get their places on this machine, and say what their image must hold."""

from __future__ import annotations

from pathlib import Path

import pytest
from toolchain_jobs import run

from pipeline.errors import ToolError
from pipeline.runners.job import Bind
from pipeline.toolchains.container import bind, expectation
from pipeline.toolchains.release import load_release


def test_bind_puts_every_mount_at_its_host_path() -> None:
    (convert, _), _ = run(precision="fp8")
    hosts = {"model": Path("/models/m"), "calibration": Path("/data/c"), "out": Path("/store/o")}
    job = bind(convert, hosts, image="image", scratch=Path("/scratch"))
    assert job.binds == (
        Bind(Path("/models/m"), "/in/model"),
        Bind(Path("/data/c"), "/in/calibration"),
        Bind(Path("/store/o"), "/out", writable=True),
    )
    assert job.name == "trtllm-pipeline-convert"
    assert (job.argv, job.gpus, job.network) == (convert.argv, convert.gpus, "none")
    # Caches go to the job's scratch folder, not into the output.
    assert job.home == Path("/scratch/home")


def test_bind_says_which_mount_has_no_path() -> None:
    (convert, _), _ = run(precision="fp8")
    with pytest.raises(ToolError, match="nothing is given for calibration") as caught:
        bind(convert, {"model": Path("/m"), "out": Path("/o"), "calib": Path("/c")}, image="i", scratch=Path("/s"))
    assert caught.value.hint == "did you mean calib?"


def test_expectation_names_tools_scripts_release_and_driver() -> None:
    commands, _ = run(precision="fp16", tp=2)
    expected = expectation(load_release("1.2.1"), commands, compute_capability="9.0")
    assert expected.tools == ("python3", "trtllm-build")
    assert expected.files == ("/app/tensorrt_llm/examples/models/core/llama/convert_checkpoint.py",)
    assert expected.versions == {"tensorrt_llm": "1.2.1"}
    assert (expected.gpus, expected.compute_capability) == (2, "9.0")
    assert expected.driver_floor == load_release("1.2.1").document["driver"]["floor"]
    assert "toolchain=trtllm_1_2_1" in expected.without_tools
