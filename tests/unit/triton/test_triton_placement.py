"""Which GPUs, which servers, which commands."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from pipeline.errors import ConfigError
from pipeline.triton.launch import launch_script, launches
from pipeline.triton.placement import PlacedEngine, Placement, plan_servers


def engine(world_size: int = 1, name: str = "tensorrt_llm", **placement: object) -> PlacedEngine:
    return PlacedEngine(name, world_size, Placement(**placement))  # type: ignore[arg-type]


def test_replicas_get_gpus_of_their_own() -> None:
    # known fault D5: replicas=2, tp=2 on 4 devices
    plan = plan_servers([engine(2, replicas=2, gpus=(0, 1, 2, 3))])
    assert plan.device_ids == {"tensorrt_llm": "0,1;2,3"}
    assert plan.instances == {"tensorrt_llm": 2}
    assert plan.mode == "orchestrator"


def test_gpus_of_the_machine_become_positions() -> None:
    plan = plan_servers([engine(2, replicas=2, gpus=(7, 5, 4, 6))])
    assert plan.servers[0].gpus == (4, 5, 6, 7)
    assert plan.device_ids == {"tensorrt_llm": "3,1;0,2"}


def test_replicas_in_leader_mode_are_servers_with_the_same_repository() -> None:
    plan = plan_servers([engine(2, replicas=2, gpus=(0, 1, 2, 3), mode="leader")])
    assert [server.gpus for server in plan.servers] == [(0, 1), (2, 3)]
    assert plan.device_ids == {"tensorrt_llm": "0,1"}
    assert plan.instances == {"tensorrt_llm": 1}
    commands = launches(plan)
    assert [command.http_port for command in commands] == [8000, 8003]
    assert [command.http_port for command in launches(plan, separate_hosts=True)] == [8000, 8000]


@pytest.mark.parametrize(
    ("placed", "text"),
    [
        (engine(2, replicas=2, gpus=(0, 1, 2)), "need 4 GPUs, 3 given"),
        (engine(gpus=(1, 1)), r"\[1, 1\], expected different"),
        (engine(gpus=(-1,)), r"\[-1\], expected different numbers from 0"),
        (engine(replicas=0), "replicas: is 0"),
        (engine(mode="both"), "'both', expected one of auto, leader, orchestrator"),
        (engine(3, nodes=2), "does not divide 3 ranks"),
        (engine(4, nodes=2, mode="orchestrator"), "several machines serve one copy"),
        (engine(4, nodes=2, replicas=2), "several machines serve one copy"),
    ],
)
def test_placement_that_cannot_be_is_refused(placed: PlacedEngine, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        plan_servers([placed])


def test_engines_that_want_different_modes_are_refused() -> None:
    with pytest.raises(ConfigError, match="ask for leader and orchestrator"):
        plan_servers([engine(mode="leader"), engine(name="b", mode="orchestrator")])
    with pytest.raises(ConfigError, match="serves one engine per server"):
        plan_servers([engine(mode="leader"), engine(name="b")])


def test_one_rank_needs_no_mpi() -> None:
    (command,) = launches(plan_servers([engine()]))
    assert command.argv[0].endswith("/tritonserver")
    assert "mpirun" not in command.argv
    assert command.env == {}


def test_ranks_are_started_together_and_only_the_first_serves_text() -> None:
    (command,) = launches(plan_servers([engine(4)]))
    ranks = " ".join(command.argv).removeprefix("mpirun --allow-run-as-root ").split(" : ")
    assert len(ranks) == 4
    assert all(rank.startswith("-n 1 /opt/tritonserver/bin/tritonserver") for rank in ranks)
    assert "--load-model" not in ranks[0]
    assert all("--model-control-mode=explicit --load-model=tensorrt_llm" in rank for rank in ranks[1:])
    prefixes = {word for rank in ranks for word in rank.split() if word.startswith("--backend-config=python")}
    assert len(prefixes) == 4  # regions of shared memory would clash otherwise
    assert all("--disable-auto-complete-config" in rank for rank in ranks)


def test_orchestrator_starts_one_server_that_spawns_workers() -> None:
    (command,) = launches(plan_servers([engine(2), engine(name="b")]))
    assert command.env == {"TRTLLM_ORCHESTRATOR": "1", "TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES": "1"}
    assert command.argv[:4] == ("mpirun", "--allow-run-as-root", "-n", "1")
    assert ":" not in command.argv
    assert "--pinned-memory-pool-byte-size=0" in command.argv


def fake(folder: Path, name: str, body: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def run(script: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", **env}
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment, timeout=30)


def test_script_keeps_arguments_whole(tmp_path: Path) -> None:
    fake(tmp_path, "mpirun", 'echo "gpus $CUDA_VISIBLE_DEVICES"; for word in "$@"; do echo "<$word>"; done')
    script = launch_script(plan_servers([engine(2, gpus=(2, 3))]), repository="/models/a b/$(touch nasty)")
    said = run(script, tmp_path).stdout.splitlines()
    assert said[0] == "gpus 2,3"
    assert "<--model-repository=/models/a b/$(touch nasty)>" in said
    assert said.count("<:>") == 1
    assert run(script, tmp_path, CUDA_VISIBLE_DEVICES="0,1").stdout.startswith("gpus 0,1\n")


def test_script_ends_all_servers_when_one_ends(tmp_path: Path) -> None:
    # The second server ends with an error; the first would run for a minute.
    body = 'if [ "$CUDA_VISIBLE_DEVICES" = 1 ]; then exit 7; fi; exec sleep 60'
    server = fake(tmp_path, "tritonserver", body)
    script = launch_script(plan_servers([engine(replicas=2, mode="leader")]))
    done = run(script.replace("/opt/tritonserver/bin/tritonserver", str(server)), tmp_path)
    assert done.returncode == 7
