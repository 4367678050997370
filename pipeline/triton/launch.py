"""The commands that start a repository's servers, as argument lists and as a script."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.triton.layout import MOUNT_POINT
from pipeline.triton.placement import Server, ServerPlan

EXIT_TIMEOUT_S = 30
PORTS_PER_SERVER = 3

_TRITON = "/opt/tritonserver/bin/tritonserver"


@dataclass(frozen=True, slots=True)
class Launch:
    """One server to start inside the serve image.

    Attributes:
        argv: Program and arguments; a path with a blank stays one argument.
        env: Added to the environment.
        gpus: GPUs of the machine that it must see.
        http_port: HTTP and health endpoint; gRPC and metrics follow.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    gpus: tuple[int, ...]
    http_port: int


def launches(
    plan: ServerPlan,
    *,
    repository: str = MOUNT_POINT,
    http_port: int = 8000,
    separate_hosts: bool = False,
    triton: str = _TRITON,
) -> list[Launch]:
    """Return the command of each server.

    Args:
        plan: What runs where.
        repository: Model repository as the server sees it. Engines are looked for below ``/models`` all the same.
        http_port: Of the first server; each further one takes the next three numbers.
        separate_hosts: Each server has a network of its own (a container), so all use the same ports.
        triton: The server program.
    """
    result = []
    for number, server in enumerate(plan.servers):
        port = http_port + (0 if separate_hosts else PORTS_PER_SERVER * number)
        argv, env = _command(plan, server, triton, repository, port, f"server{number}_")
        result.append(Launch(tuple(argv), env, server.gpus, port))
    return result


def launch_script(plan: ServerPlan, *, repository: str = MOUNT_POINT, http_port: int = 8000) -> str:
    """Return a bash script that starts all servers and ends them together."""
    commands = launches(plan, repository=repository, http_port=http_port)
    lines = [
        "#!/usr/bin/env bash",
        "# Starts Triton for this repository, inside the serve image, with the repository mounted at /models.",
        "set -euo pipefail",
        "",
    ]
    if len(commands) == 1:
        gpus = ",".join(map(str, commands[0].gpus))
        export = f'export CUDA_VISIBLE_DEVICES="${{CUDA_VISIBLE_DEVICES-{gpus}}}"'
        note = "# In a container that has these GPUs only they are called 0, 1, …: set the variable before."
        return "\n".join([*lines, note, export, f"exec {_quoted(commands[0], {})}", ""])
    lines += ["pids=()", """trap 'kill "${pids[@]}" 2>/dev/null || true' TERM INT EXIT""", ""]
    lines += [line for command in commands for line in (_background(command), "pids+=($!)")]
    return "\n".join([*lines, *_UNTIL_ONE_ENDS, ""])


# Not `wait -n`: it never returns for a server that ended before it was reached.
_UNTIL_ONE_ENDS = (
    "",
    "# The first server that ends takes the others with it, and its exit code is ours.",
    "while :; do",
    '    for pid in "${pids[@]}"; do',
    '        kill -0 "$pid" 2>/dev/null || { wait "$pid"; exit; }',
    "    done",
    "    sleep 1",
    "done",
)


def _background(command: Launch) -> str:
    return _quoted(command, {"CUDA_VISIBLE_DEVICES": ",".join(map(str, command.gpus))}) + " &"


def _quoted(command: Launch, extra: Mapping[str, str]) -> str:
    env = {**command.env, **extra}
    return shlex.join([*(["env"] if env else []), *(f"{name}={env[name]}" for name in sorted(env)), *command.argv])


def _command(
    plan: ServerPlan, server: Server, triton: str, repository: str, port: int, prefix: str
) -> tuple[list[str], dict[str, str]]:
    if plan.mode == "orchestrator":
        # Workers are processes of their own: memory pools of the server would only take from them.
        pools = [f"--cuda-memory-pool-byte-size={gpu}:0" for gpu in range(len(server.gpus))]
        extra = ["--pinned-memory-pool-byte-size=0", "--enable-peer-access=false", *pools]
        argv = ["mpirun", "--allow-run-as-root", "-n", "1", *_server(triton, repository, port, prefix, 0), *extra]
        return argv, {"TRTLLM_ORCHESTRATOR": "1", "TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES": "1"}
    if server.ranks == 1:
        return _server(triton, repository, port, prefix, 0), {}
    argv = ["mpirun", "--allow-run-as-root"]
    for rank in range(server.ranks):
        # Only rank 0 has the text models and answers clients; the others wait inside the engine's load.
        only = ["--model-control-mode=explicit", *(f"--load-model={name}" for name in plan.engines)] if rank else []
        argv += [":"] if rank else []
        argv += ["-n", "1", *_server(triton, repository, port, prefix, rank), *only]
    return argv, {}


def _server(triton: str, repository: str, port: int, prefix: str, rank: int) -> list[str]:
    return [
        triton,
        f"--model-repository={repository}",
        f"--http-port={port}",
        f"--grpc-port={port + 1}",
        f"--metrics-port={port + 2}",
        "--disable-auto-complete-config",
        f"--backend-config=python,shm-region-prefix-name={prefix}rank{rank}_",
        f"--exit-timeout-secs={EXIT_TIMEOUT_S}",
    ]
