"""What this machine has: GPUs through NVIDIA's management library, memory, a way to run containers. Read only."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

# Device files of the Linux driver and of its WSL form. Without one there is no GPU to ask for, and the library stays
# unloaded, which keeps `plan` quick.
_DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg")


@dataclass(frozen=True, slots=True)
class FoundGpu:
    """The first visible GPU; a machine with several kinds is planned for the first.

    Attributes:
        name: As the driver gives it.
        sm: Compute capability, 90 for 9.0.
        memory_bytes: Total of one GPU.
        count: Visible GPUs of that name.
        driver: Driver version.
    """

    name: str
    sm: int
    memory_bytes: int
    count: int
    driver: str


def find_gpu() -> FoundGpu | None:
    """Return the GPU of this machine, or None when there is none or its driver does not answer."""
    if not any(Path(file).exists() for file in _DRIVER_FILES):
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # the library has one class per driver state; all mean that no GPU can be used
        return None
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        if not handles:
            return None
        names = [_text(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handles[0])
        return FoundGpu(
            name=names[0],
            sm=10 * int(major) + int(minor),
            memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handles[0]).total),
            count=names.count(names[0]),
            driver=_text(pynvml.nvmlSystemGetDriverVersion()),
        )
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def container_engine() -> str | None:
    """Return how NVIDIA's tools could be run here: ``docker``, ``podman``, ``image`` (we are in it), or None."""
    if shutil.which("trtllm-build"):
        return "image"
    return next((name for name in ("docker", "podman") if shutil.which(name)), None)


def memory_bytes() -> int:
    """Return the physical memory of this machine; 0 when the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
