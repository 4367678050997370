"""From a command to the job that a runner executes, and what its image must hold."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import ToolError
from pipeline.runners.job import Bind, ContainerJob, Secret
from pipeline.toolchains.command import Command
from pipeline.toolchains.release import Release, data

if TYPE_CHECKING:
    from pipeline.runners.probe import Expectation


def bind(
    command: Command,
    hosts: Mapping[str, Path],
    *,
    image: str,
    scratch: Path,
    name: str = "",
    secrets: Sequence[Secret] = (),
) -> ContainerJob:
    """Give a command its places on this machine.

    Args:
        command: What runs.
        hosts: Name of a mount (``model``, ``out``, ``file:build_config`` …) to a path of this machine.
        image: Image reference, best one that is pinned.
        scratch: Folder that belongs to this job alone.
        name: Name of the container; ``trtllm-pipeline-<stage>`` when empty.
        secrets: What it may read from files.

    Raises:
        ToolError: A mount has no path.
    """
    missing = [mount.name for mount in command.mounts if mount.name not in hosts]
    if missing:
        near = difflib.get_close_matches(missing[0], hosts, n=1)
        raise ToolError(
            f"{command.description}: nothing is given for {', '.join(missing)}",
            hint=f"did you mean {near[0]}?" if near else "",
        )
    return ContainerJob(
        name=name or f"trtllm-pipeline-{command.stage}",
        argv=command.argv,
        image=image,
        scratch=scratch,
        binds=tuple(Bind(hosts[mount.name].absolute(), mount.target, mount.writable) for mount in command.mounts),
        env=command.env,
        gpus=command.gpus,
        network=command.network,
        timeout_s=command.timeout_s,
        workdir=command.workdir,
        secrets=tuple(secrets),
    )


def expectation(release: Release, commands: Sequence[Command], *, compute_capability: str = "") -> Expectation:
    """Say what the image must hold for these commands.

    Args:
        release: The plan's release.
        commands: What will run in it.
        compute_capability: Of the GPU that was planned for, ``9.0``; empty: any.
    """
    from pipeline.runners.probe import Expectation

    python = str(release.document["paths"].get("python") or "python3")
    # A command is a tool on PATH, or the interpreter and a script.
    tools = dict.fromkeys(command.program[0] for command in commands)
    files = dict.fromkeys(command.program[1] for command in commands if len(command.program) > 1)
    facts = data("index")["engine"]
    pin = f"toolchain=trtllm_{facts['last'].replace('.', '_')}"
    return Expectation(
        release=release.version,
        tools=tuple(tools),
        files=tuple(files),
        versions={"tensorrt_llm": release.version},
        python=python,
        gpus=max((command.gpus for command in commands), default=0),
        compute_capability=compute_capability,
        driver_floor=str(release.document["driver"].get("floor") or ""),
        without_tools=f"{facts['reason']}; pin {pin} (the last release that builds engines) or use target=llmapi",
    )
