"""What must be there on this machine before NVIDIA's tools can run: asked by a run, not by a plan."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from pipeline.config import machine
from pipeline.config.sizing import budget_of, disk_of
from pipeline.config.spec import Spec
from pipeline.errors import Finding

_PROGRAMS = {"docker": "docker", "podman": "podman", "pyxis": "srun"}


def machine_findings(spec: Spec) -> list[Finding]:
    """Return an error for everything that this machine lacks to run the job's commands."""
    return [*_runner(spec), *_gpu(spec), *_disk(spec), *_host_memory(spec)]


def _disk(spec: Spec) -> Iterator[Finding]:
    """Ask for the space of source, checkpoint and engines where the store is."""
    needed = disk_of(spec)
    if needed is None or spec.toolchain.standin:
        return
    place = next(path for path in (Path(spec.store.root), *Path(spec.store.root).parents) if path.exists())
    free, total = shutil.disk_usage(place).free, sum(needed.values())
    if free < total:
        parts = ", ".join(f"{name} {size / 1e9:.0f}" for name, size in needed.items())
        message = f"store.root={spec.store.root} has {free / 1e9:.0f} GB free; about {total / 1e9:.0f} GB are needed "
        message += f"({parts}; estimated)"
        hint = "store.root=FOLDER on a larger disk, or `store gc`"
        yield Finding("disk-short", "warning", "store.root", message, hint)


def _host_memory(spec: Spec) -> Iterator[Finding]:
    """A builder process holds two to three times the weights of its rank; an estimate."""
    budget, there = budget_of(spec), spec.hardware.host_memory_bytes
    if budget is None or not there or spec.runner.kind == "pyxis" or spec.toolchain.standin:
        return
    workers = spec.build.workers or spec.parallel.world_size
    needed = 3 * workers * max(rank.weights_bytes for rank in budget.per_gpu)
    if needed > there:
        message = (
            f"{workers} builder process(es) may need {needed / 1e9:.0f} GB of host memory (three times the weights of "
            f"their ranks, estimated); this machine has {there / 1e9:.0f} GB"
        )
        yield Finding("host-memory", "warning", "build.workers", message, "build.workers=1")


def _runner(spec: Spec) -> Iterator[Finding]:
    kind = spec.runner.kind
    if kind == "local":
        if spec.toolchain.standin or shutil.which("trtllm-build"):
            return
        message = "runner=local runs NVIDIA's tools from PATH, and there is no trtllm-build: this is not their image"
        hint = f"start this inside {spec.toolchain.build_image}, or use runner=docker or runner=podman"
        yield Finding("runner-missing", "error", "runner", message, hint)
        return
    program = spec.runner.program or _PROGRAMS[kind]
    if shutil.which(program) is None:
        others = [name for name, other in _PROGRAMS.items() if name != kind and shutil.which(other)]
        message = f"runner={kind} needs {program}, which is not on PATH"
        hint = f"runner={others[0]}" if others else f"install {program}, or rehearse with target=reference"
        yield Finding("runner-missing", "error", "runner", message, hint)


def _gpu(spec: Spec) -> Iterator[Finding]:
    # With Slurm, and with an engine on another machine, the GPU is not here; the probe looks where it is.
    is_elsewhere = spec.runner.kind == "pyxis" or os.environ.get("DOCKER_HOST", "").startswith(("ssh:", "tcp:"))
    if is_elsewhere or spec.toolchain.standin:
        return
    found = machine.find_gpu()
    wanted = f"{spec.hardware.gpu} (SM {spec.hardware.sm})"
    if found is None:
        message = f"engines are built on the GPU type that serves, {wanted}; this machine has no GPU with a driver"
        hint = "run on a machine with the GPU, or rehearse with target=reference"
        yield Finding("gpu-missing", "error", "hardware", message, hint)
    elif found.sm != spec.hardware.sm:
        message = f"the job is for {wanted}; this machine has {found.name} (SM {found.sm})"
        yield Finding("gpu-other", "error", "hardware", message, "hardware=auto, or run where the GPU is")
    elif found.count < spec.parallel.world_size and spec.build.workers is None:
        message = f"{spec.parallel.world_size} ranks, and this machine has {found.count} GPU(s): they are built in turn"
        yield Finding("gpu-fewer", "info", "hardware", message)
