"""A command as data: what runs in the container, what it sees, what it may do.

Inputs stand at fixed container paths, so neither ``argv`` nor a key made from it holds a path of this machine. A mount
has a name; whoever runs the command says which folder the name stands for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

MODEL = "/in/model"
CHECKPOINT = "/in/checkpoint"
CALIBRATION = "/in/calibration"
MEDUSA = "/in/medusa"
TIMING_CACHE = "/in/timing_cache"
FILES = "/in/files"
LORA = "/in/lora"
OUT = "/out"

# SAFETY: the container runs as the caller's uid, which has no home and often no name in the image. Without these the
# tools write their caches to / or ask for the user's name and fail. Offline: nothing may be fetched behind the plan.
ENVIRONMENT: Mapping[str, str] = {
    "HOME": "/tmp/home",
    "USER": "pipeline",
    "LOGNAME": "pipeline",
    "XDG_CACHE_HOME": "/tmp/home/.cache",
    "HF_HOME": "/tmp/home/hf",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRITON_CACHE_DIR": "/tmp/home/triton",
    "TORCHINDUCTOR_CACHE_DIR": "/tmp/home/inductor",
}


@dataclass(frozen=True, slots=True)
class Mount:
    """A folder or file that the container sees.

    Attributes:
        name: What it holds: ``model``, ``checkpoint``, ``calibration``, ``out``, ``file:build_config`` …; the runner
            binds a host path to it.
        target: Absolute path inside the container.
        writable: Only the output is.
    """

    name: str
    target: str
    writable: bool = False


@dataclass(frozen=True, slots=True)
class Command:
    """One program run inside the release's build image.

    Attributes:
        stage: Stage that runs it, ``convert`` or ``build``.
        tool: Flag table that its arguments come from: ``trtllm-build``, ``quantize``, ``convert/llama`` …
        program: Leading words of ``argv`` that are not flags: the tool, or the interpreter and the script.
        flags: The rest of ``argv``.
        env: Environment variables added to the image's own. Never secrets.
        mounts: What the container sees.
        gpus: How many GPUs it needs.
        network: ``none``: everything is staged before.
        timeout_s: Time after which it is stopped, in seconds.
        workdir: Directory it starts in.
        description: One line for people.
    """

    stage: Literal["convert", "build"]
    tool: str
    program: tuple[str, ...]
    flags: tuple[str, ...]
    env: Mapping[str, str]
    mounts: tuple[Mount, ...]
    gpus: int
    timeout_s: float
    description: str
    network: Literal["none"] = "none"
    workdir: str = "/tmp"

    @property
    def argv(self) -> tuple[str, ...]:
        """The whole command line, as run inside the container."""
        return self.program + self.flags


def inputs(*mounts: tuple[str, str]) -> tuple[Mount, ...]:
    """Make read-only mounts from pairs of name and target."""
    return tuple(Mount(name, target) for name, target in mounts)


def out() -> Mount:
    """Make the mount of the output folder, the only writable one."""
    return Mount("out", OUT, writable=True)
