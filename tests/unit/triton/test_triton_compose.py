"""What compose.yaml says. Its shape was also checked with the JSON schema of the Compose specification."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from pipeline.triton.compose import FrontendService, compose_text
from pipeline.triton.placement import PlacedEngine, Placement, ServerPlan, plan_servers

FRONTEND = FrontendService(image="frontend:0.1.0", model="tensorrt_llm", tool_parser="llama3")
IMAGE = "nvcr.io/nvidia/tritonserver:25.10-trtllm-python-py3@sha256:" + "0" * 64


def services(plan: ServerPlan | None) -> dict[str, dict[str, Any]]:
    text = compose_text(name="Llama 2: fp8", serve_image=IMAGE, frontend=FRONTEND, plan=plan)
    document = yaml.safe_load(text)
    assert document["name"] == "llama-2--fp8"
    found: dict[str, dict[str, Any]] = document["services"]
    return found


def plan(world_size: int, **placement: Any) -> ServerPlan:
    return plan_servers([PlacedEngine("tensorrt_llm", world_size, Placement(**placement))])


def devices(service: dict[str, Any]) -> list[str]:
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    found: list[str] = device["device_ids"]
    return found


def test_repository_without_engines_needs_no_gpu() -> None:
    found = services(None)
    assert "deploy" not in found["triton"]
    assert found["triton"]["command"][0] == "tritonserver"


@pytest.mark.parametrize("plan_", [None, plan(1), plan(4), plan(2, replicas=2)], ids=["none", "one", "tp4", "replicas"])
def test_every_service_is_pinned_read_only_and_watched(plan_: ServerPlan | None) -> None:
    for name, service in services(plan_).items():
        assert service["image"] == (FRONTEND.image if name == "frontend" else IMAGE)
        assert all(volume.endswith(":ro") for volume in service["volumes"])
        assert service["healthcheck"]["test"][0] == "CMD-SHELL"
        assert all(isinstance(word, str) for word in service["command"])
        assert service["init"] is True


def test_engine_gets_its_gpus_and_shared_memory_for_each_rank() -> None:
    triton = services(plan(4, gpus=(4, 5, 6, 7)))["triton"]
    assert devices(triton) == ["4", "5", "6", "7"]
    assert triton["command"][0] == "mpirun"
    assert triton["shm_size"] == "4gb"
    assert triton["ulimits"]["memlock"] == -1
    assert "CUDA_VISIBLE_DEVICES" not in str(triton)  # inside, the reserved GPUs are 0 to 3


def test_copies_in_leader_mode_are_services_that_the_frontend_knows() -> None:
    found = services(plan(2, replicas=2, mode="leader"))
    assert [devices(found[name]) for name in ("triton-0", "triton-1")] == [["0", "1"], ["2", "3"]]
    assert "frontend.triton=[triton-0:8001,triton-1:8001]" in found["frontend"]["command"]
    assert set(found["frontend"]["depends_on"]) == {"triton-0", "triton-1"}
    assert all("--http-port=8000" in found[name]["command"] for name in ("triton-0", "triton-1"))


def test_orchestrator_is_told_by_the_environment() -> None:
    triton = services(plan(2, replicas=2))["triton"]
    assert triton["environment"] == {"TRTLLM_ORCHESTRATOR": "1", "TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES": "1"}
    assert devices(triton) == ["0", "1", "2", "3"]
