"""``compose.yaml``: the servers of a repository and the OpenAI frontend in front of them, on pinned images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from pipeline.triton.launch import EXIT_TIMEOUT_S, Launch, launches
from pipeline.triton.layout import MOUNT_POINT
from pipeline.triton.placement import ServerPlan

HTTP_PORT, GRPC_PORT = 8000, 8001

# Python stubs and MPI exchange tensors through /dev/shm; each process of a server takes its part.
_SHM_GB_PER_RANK = 1
_PLAIN_COMMAND = ("tritonserver", f"--model-repository={MOUNT_POINT}", f"--exit-timeout-secs={EXIT_TIMEOUT_S}")
_HEADER = """\
# Triton and the OpenAI frontend for this model: `docker compose up`, then http://localhost:{port}/v1.
# The frontend image is built once from the project: docker build -f docker/frontend.Dockerfile -t {image} .
"""


@dataclass(frozen=True, slots=True)
class FrontendService:
    """What the frontend's service is told.

    Attributes:
        image: Built from ``docker/frontend.Dockerfile``.
        model: Name of the model it asks.
        tool_parser: How tool calls are read.
        port: Port on this machine.
    """

    image: str
    model: str
    tool_parser: str = "none"
    port: int = 8000


def compose_text(
    *, name: str, serve_image: str, frontend: FrontendService, plan: ServerPlan | None = None, start_s: int = 300
) -> str:
    """Return the text of ``compose.yaml``.

    Args:
        name: Project name.
        serve_image: Triton image of the engine's release, pinned.
        frontend: The OpenAI frontend.
        plan: Where the engines run; None for a repository without engines, which needs no GPU.
        start_s: Seconds that loading may take before a failed health check counts.
    """
    servers = _plain_servers(serve_image, start_s) if plan is None else _engine_servers(plan, serve_image, start_s)
    services = {**servers, "frontend": _frontend(frontend, tuple(servers))}
    document = {"name": _project_name(name), "services": services}
    body: str = yaml.safe_dump(document, sort_keys=False, width=120)
    return _HEADER.format(image=frontend.image, port=frontend.port) + body


def _plain_servers(image: str, start_s: int) -> dict[str, dict[str, Any]]:
    return {"triton": _server(image, _PLAIN_COMMAND, {}, start_s, ranks=1)}


def _engine_servers(plan: ServerPlan, image: str, start_s: int) -> dict[str, dict[str, Any]]:
    commands = launches(plan, separate_hosts=True)
    names = ["triton"] if len(commands) == 1 else [f"triton-{number}" for number in range(len(commands))]
    ranks = [max(server.ranks, len(server.gpus)) for server in plan.servers]
    return {
        name: {**_server(image, command.argv, command.env, start_s, ranks=count), **_gpus(command)}
        for name, command, count in zip(names, commands, ranks, strict=True)
    }


def _server(image: str, argv: Sequence[str], env: Mapping[str, str], start_s: int, *, ranks: int) -> dict[str, Any]:
    # Compose fills in $NAME; a doubled sign stays one.
    service: dict[str, Any] = {
        "image": image,
        "command": [word.replace("$", "$$") for word in argv],
        "volumes": [f"./model_repository:{MOUNT_POINT}:ro"],
        "shm_size": f"{_SHM_GB_PER_RANK * max(ranks, 1)}gb",
        "init": True,
        "stop_grace_period": f"{EXIT_TIMEOUT_S + 10}s",
        "healthcheck": _health("/v2/health/ready", start_s=start_s),
    }
    if ranks > 1:
        # Ranks lock memory for NCCL and each other's buffers.
        service["ulimits"] = {"memlock": -1, "stack": 67108864}
    return {**service, "environment": dict(env)} if env else service


def _gpus(command: Launch) -> dict[str, Any]:
    devices = [{"driver": "nvidia", "device_ids": [str(gpu) for gpu in command.gpus], "capabilities": ["gpu"]}]
    return {"deploy": {"resources": {"reservations": {"devices": devices}}}}


def _frontend(frontend: FrontendService, servers: Sequence[str]) -> dict[str, Any]:
    addresses = ",".join(f"{server}:{GRPC_PORT}" for server in servers)
    return {
        "image": frontend.image,
        "command": [
            "frontend",
            f"frontend.triton=[{addresses}]",
            "frontend.tokenizer=/tokenizer",
            f"frontend.model={frontend.model}",
            f"frontend.tool_parser={frontend.tool_parser}",
            "frontend.host=0.0.0.0",
            f"frontend.port={HTTP_PORT}",
        ],
        "volumes": ["./tokenizer:/tokenizer:ro"],
        "ports": [f"{frontend.port}:{HTTP_PORT}"],
        "read_only": True,
        "tmpfs": ["/tmp"],
        "init": True,
        "stop_grace_period": "40s",
        "depends_on": {server: {"condition": "service_healthy"} for server in servers},
        "healthcheck": _health("/health/ready", start_s=30),
    }


def _health(path: str, *, start_s: int) -> dict[str, object]:
    url = f"http://127.0.0.1:{HTTP_PORT}{path}"
    command = f"python3 -c \"import urllib.request as u; u.urlopen('{url}', timeout=4)\""
    return {
        "test": ["CMD-SHELL", command],
        "interval": "10s",
        "timeout": "5s",
        "retries": 3,
        "start_period": f"{start_s}s",
    }


def _project_name(name: str) -> str:
    """Return a name that compose takes: lower case, digits, ``-`` and ``_``, beginning with a letter or digit."""
    plain = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in name.lower()).strip("-")
    return plain or "model"
