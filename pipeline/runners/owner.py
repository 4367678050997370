"""Who started a container: written on it as a label, so that a later run can tell whether its owner is still alive."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

OWNER_LABEL = "trtllm-pipeline.owner"
STORE_LABEL = "trtllm-pipeline.store"


@dataclass(frozen=True, slots=True)
class Owner:
    """A process of some machine, named so that no other process is ever mistaken for it.

    Attributes:
        host: Name of the machine.
        boot: Id of the boot; another one means that every process of before is gone.
        namespace: Process id namespace; ids of another one (a CI job in its own container) cannot be judged here.
        pid: Process id.
        start: Start time of the process in clock ticks since boot; tells apart two users of one id.
    """

    host: str
    boot: str
    namespace: str
    pid: int
    start: int

    @staticmethod
    def current() -> Owner:
        """Return this process."""
        pid = os.getpid()
        return Owner(socket.gethostname(), _boot(), _namespace(), pid, _start_time(pid) or 0)

    @property
    def label(self) -> str:
        """The owner as one word."""
        return f"{self.host}/{self.boot}/{self.namespace}/{self.pid}/{self.start}"

    @staticmethod
    def parse(label: str) -> Owner | None:
        """Read :attr:`label` back; None when it is not one."""
        parts = label.strip().split("/")
        if len(parts) != 5 or not (parts[3].isdigit() and parts[4].isdigit()):
            return None
        return Owner(parts[0], parts[1], parts[2], int(parts[3]), int(parts[4]))

    def is_dead(self) -> bool:
        """Say whether the owner is certainly gone. One that cannot be judged from here counts as alive."""
        if self.host != socket.gethostname():
            return False
        if self.boot != _boot():
            return True
        return self.namespace == _namespace() and _start_time(self.pid) != self.start


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def _namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").stat().st_ino)
    except OSError:
        return "unknown"


def _start_time(pid: int) -> int | None:
    """Return field 22 of ``/proc/<pid>/stat``; None when there is no such process or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
