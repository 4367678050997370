"""What an exit code or an engine's own message means, and what to do about it."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.runners.process import describe_exit

ENGINE_ERROR, CANNOT_START, NO_PROGRAM = 125, 126, 127

NESTED_HINT = (
    "The container engine sees other paths than this process: does it run outside the container that we are in? "
    "Set runner.host_paths to pairs of a path here and the same path on the engine's machine."
)


@dataclass(frozen=True, slots=True)
class _Known:
    pattern: str
    what: str
    hint: str


# Engines' own words; the first that matches counts. Source: docker 20.10 and 28, podman 4.3, Slurm 22.05, pyxis.
_KNOWN = (
    _Known(
        r"cannot connect to (the docker daemon|podman)|error during connect|is the docker daemon running",
        "the container engine does not answer",
        "Start the Docker daemon, or use runner=podman, which needs none.",
    ),
    _Known(
        r"permission denied while trying to connect to the docker",
        "this user may not use the Docker daemon",
        "Add the user to the group docker, or use runner=podman.",
    ),
    _Known(
        r"no such image|image not known|unable to find image|manifest unknown|failed to import docker image",
        "the image is not there",
        "Fetch it (runner.pull=missing), or check its name and tag.",
    ),
    _Known(
        r"unauthorized|authentication required|denied: requested access|error code: 40[13]",
        "the registry refuses access to the image",
        "Log in to the registry with the engine's own login command.",
    ),
    _Known(
        r"unresolvable cdi devices|cdi device injection failed|could not select device driver|"
        r"unknown runtime specified nvidia|\"nvidia\" not found|gres.*invalid|"
        r"invalid generic resource|nvidia-container-cli|libnvidia-ml",
        "the engine cannot give GPUs to a container",
        "Install the NVIDIA Container Toolkit (docker: nvidia-ctk runtime configure; podman: nvidia-ctk cdi generate), "
        "or run on a machine with a GPU.",
    ),
    _Known(
        r"setting rlimit type|rlimit.*operation not permitted|ulimit",
        "this user may not raise the limits that are asked for",
        "Lower runner.ulimits to what `ulimit -H -a` shows, or set runner.ulimits=[].",
    ),
    _Known(
        r"bind source path does not exist|statfs .*no such file|error mounting .*no such file",
        "the engine does not see a path that exists here",
        NESTED_HINT,
    ),
    _Known(
        r"already in use",
        "a container of that name exists",
        "Another run does the same at this moment; wait for it, or remove the container.",
    ),
    _Known(
        r"no space left on device",
        "a disk is full",
        "Free space where the engine keeps images and where the store is.",
    ),
    _Known(
        r"unrecognized option .*container-|unknown option .*container-",
        "this Slurm has no pyxis plugin",
        "Ask the cluster's administrators for pyxis and enroot, or use runner=podman inside the job.",
    ),
    _Known(
        r"invalid partition|invalid account|invalid qos|requested node configuration is not available",
        "Slurm refuses the job",
        "Check partition, account and GPU count in runner.extra.",
    ),
)

# Words of runc, env, and the first processes of docker (tini) and podman (catatonit, which exits with 1).
_NOT_FOUND = r"executable file .*not found|env: .*no such file|tini .*exec .*no such file|exec pid1: no such file"

_SIGNALS = {
    signal.SIGKILL: "It was killed from outside; most often memory ran out (see `dmesg`, and the limits of the job).",
    signal.SIGBUS: "Shared memory ran out: use runner.ipc=host or a larger runner.shm_size.",
    signal.SIGSEGV: "It crashed. Does the image's release fit the driver and the GPU?",
    signal.SIGABRT: "It gave up by itself; the reason is in its last lines.",
    signal.SIGTERM: "Somebody stopped it: a scheduler's time limit, or an administrator.",
    signal.SIGINT: "Somebody interrupted it.",
}


def explain(returncode: int, tail: Sequence[str], *, place: str, engine: str) -> tuple[str, str]:
    """Say in words how a program ended.

    Args:
        returncode: Exit code; negative: number of a signal.
        tail: Its last lines.
        place: Where it was looked for: an image, or this machine.
        engine: Container engine whose codes 125 and 126 are; empty for none.

    Returns:
        What happened, and what to do; the latter may be empty.
    """
    name = _signal(returncode)
    if name is not None:
        return f"ended with {name.name}", _SIGNALS.get(name, "")
    if returncode in (1, NO_PROGRAM) and tail and re.search(_NOT_FOUND, tail[-1], re.IGNORECASE):
        return f"was not found in {place}", "Is it the image of the release that the plan was made for?"
    if not engine or returncode not in (ENGINE_ERROR, CANNOT_START):
        return f"ended with {describe_exit(returncode)}", ""
    what, hint = engine_message(tail)
    prefix = "did not start" if returncode == CANNOT_START else "did not run"
    return f"{prefix}: {what or f'{engine} failed'} (exit code {returncode})", hint


def engine_message(tail: Sequence[str]) -> tuple[str, str]:
    """Recognise an engine's own failure; two empty strings when it is none that is known."""
    text = "\n".join(tail)
    for known in _KNOWN:
        if re.search(known.pattern, text, re.IGNORECASE):
            return known.what, known.hint
    return "", ""


def _signal(returncode: int) -> signal.Signals | None:
    number = -returncode if returncode < 0 else returncode - 128
    try:
        return signal.Signals(number) if number > 0 else None
    except ValueError:
        return None
