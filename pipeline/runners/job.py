"""What a runner executes: a program inside an image, what it sees of this machine, and how the engine is called.

A job names container paths in ``argv`` and host paths in ``binds`` only, so that every runner can realise it in its own
way: as mounts of a container, or as paths written into the arguments.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal, Protocol

from pipeline.errors import ExitCode, ToolError
from pipeline.runners.process import Completed

SECRETS = "/run/secrets"

# Folder below a job's scratch that the program sees as its home.
_HOME_FOLDER = "home"
_SECRETS_FOLDER = "secrets"


class Cancelled(ToolError):
    """The job was stopped because its caller asked for it."""

    exit_code = ExitCode.INTERRUPTED


class Cancel(Protocol):
    """Tells that a job should stop; a :class:`threading.Event` is one."""

    def is_set(self) -> bool:
        """Say whether to stop now."""


class OnLine(Protocol):
    """Takes one redacted line of output without its end; called from another thread."""

    def __call__(self, line: str, /) -> None: ...


@dataclass(frozen=True, slots=True)
class Bind:
    """A folder or file of this machine and where the program finds it.

    Attributes:
        host: Path on this machine.
        target: Absolute path inside the container.
        writable: The program may change it.
    """

    host: Path
    target: str
    writable: bool = False


@dataclass(frozen=True, slots=True)
class Secret:
    """A secret that the program reads from a file.

    Attributes:
        variable: Our own environment variable that holds the value, ``HF_TOKEN``.
        pointer: Variable of the program that gets the path of the file, ``HF_TOKEN_PATH``.
    """

    variable: str
    pointer: str

    @property
    def target(self) -> str:
        """Path of the file inside the container."""
        return f"{SECRETS}/{self.variable}"


@dataclass(frozen=True, slots=True)
class ContainerJob:
    """One program run inside an image.

    Attributes:
        name: What it is called in lists of containers; letters, digits, ``_``, ``.``, ``-``.
        argv: Program and arguments with container paths. Never a secret.
        image: Image reference.
        scratch: Folder on this machine that belongs to this job alone: home and caches of the program, secret files.
        binds: What the program sees of this machine.
        env: Variables added to the image's own. Never a secret.
        gpus: How many GPUs it needs.
        network: ``none`` unless it has to fetch something.
        timeout_s: Seconds after which it is stopped; None: never.
        workdir: Directory it starts in.
        secrets: What it reads from files.
    """

    name: str
    argv: tuple[str, ...]
    image: str
    scratch: Path
    binds: tuple[Bind, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 0
    network: Literal["none", "host"] = "none"
    timeout_s: float | None = None
    workdir: str = "/tmp"
    secrets: tuple[Secret, ...] = ()

    @property
    def home(self) -> Path | None:
        """Host folder of the program's home; None when its home is the image's or inside one of the binds."""
        home = self.env.get("HOME", "")
        if not home or any(bind.writable and _is_below(home, bind.target) for bind in self.binds):
            return None
        return self.scratch / _HOME_FOLDER

    def secret_file(self, secret: Secret) -> Path:
        """Return the file of this machine that holds a secret while the job runs."""
        return self.scratch / _SECRETS_FOLDER / secret.variable

    @property
    def all_binds(self) -> tuple[Bind, ...]:
        """The binds, the program's home and the secret files."""
        home = (Bind(self.home, self.env["HOME"], writable=True),) if self.home else ()
        return (*self.binds, *home, *(Bind(self.secret_file(secret), secret.target) for secret in self.secrets))

    @property
    def all_env(self) -> Mapping[str, str]:
        """The variables, and those that point at secret files."""
        return {**self.env, **{secret.pointer: secret.target for secret in self.secrets}}


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose files the outputs become.

    Attributes:
        uid: User id.
        gid: Group id.
    """

    uid: int
    gid: int

    @staticmethod
    def current() -> Caller:
        """Return the user that runs this process."""
        return Caller(os.getuid(), os.getgid())


@dataclass(frozen=True, slots=True)
class Options:
    """How a runner calls its engine. The defaults are what NVIDIA recommends for its images.

    Attributes:
        program: Engine's program; empty: ``docker``, ``podman`` or ``srun`` from PATH.
        ipc: ``host`` shares this machine's shared memory, which NCCL and MPI need much of; empty: the engine's own.
        shm_size: Size of a private ``/dev/shm`` instead (``1g``); takes the place of ``ipc``.
        ulimits: ``name=soft[:hard]``. TensorRT and NCCL pin memory and use deep stacks.
        devices: GPUs to use, by index or UUID; empty: as many as the job needs, from the first on.
        caller: Owner of the outputs.
        rootless: The Docker daemon runs as this user (rootless mode). Podman needs no telling.
        host_paths: Pairs (path here, path on the engine's machine), for an engine that sees other paths than we do:
            a CI job in a container that talks to the engine outside.
        pull: ``missing`` fetches an image that is not there, ``never`` does not.
        pull_timeout_s: Seconds that fetching an image may take.
        grace_s: Seconds between asking a program to end and ending it.
        extra: Further arguments for the engine (``--partition=gpu``, ``--security-opt=label=disable``).
    """

    program: str = ""
    ipc: str = "host"
    shm_size: str = ""
    ulimits: tuple[str, ...] = ("memlock=-1", "stack=67108864")
    devices: tuple[str, ...] = ()
    caller: Caller = field(default_factory=Caller.current)
    rootless: bool = False
    host_paths: tuple[tuple[str, str], ...] = ()
    pull: Literal["missing", "never"] = "missing"
    pull_timeout_s: float = 3600.0
    grace_s: float = 10.0
    extra: tuple[str, ...] = ()

    def on_host(self, path: Path) -> str:
        """Return ``path`` as the engine's machine knows it; the longest matching pair of ``host_paths`` counts."""
        text = str(path)
        for here, there in sorted(self.host_paths, key=lambda pair: -len(pair[0])):
            if _is_below(text, here):
                return str(PurePosixPath(there, *PurePosixPath(text).relative_to(here).parts))
        return text


@dataclass(frozen=True, slots=True)
class Image:
    """An image as the engine has it.

    Attributes:
        reference: What was asked for.
        image_id: The engine's id of it; empty where the engine tells none.
        digests: Registry digests (``sha256:…``) it is known under; empty for an image that was made here.
    """

    reference: str
    image_id: str = ""
    digests: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """What identifies its content: the registry's digest, else the engine's id; empty when neither is known."""
        return self.digests[0] if self.digests else self.image_id

    @property
    def pinned(self) -> str:
        """Reference that can mean this image only; ``reference`` itself when nothing is known."""
        if self.digests:
            return f"{repository_of(self.reference)}@{self.digests[0]}"
        return self.image_id or self.reference


class Runner(Protocol):
    """Runs jobs. ``docker``, ``podman``, ``local`` and ``pyxis`` are the implementations."""

    @property
    def name(self) -> str:
        """``docker``, ``podman``, ``local`` or ``pyxis``."""

    def command_line(self, job: ContainerJob) -> list[str]:
        """Return what :meth:`run` executes. Pure: nothing is looked at or made."""

    def resolve(self, reference: str, *, log_path: Path | None = None, on_line: OnLine | None = None) -> Image:
        """Find the image, fetch it if it is missing and that is allowed, and say exactly which one it is.

        Raises:
            ToolError: There is no such image, or no engine.
        """

    def run(
        self,
        job: ContainerJob,
        *,
        log_path: Path | None = None,
        on_line: OnLine | None = None,
        cancel: Cancel | None = None,
    ) -> Completed:
        """Run a job to its end.

        The exact line goes to the log first, and as ``repro.sh`` beside it.

        Raises:
            ProcessFailed: It ended badly or took too long.
            Cancelled: ``cancel`` was set.
            ToolError: It cannot be started.
        """

    def sweep(self) -> tuple[str, ...]:
        """Stop what runs of ours that died have left behind; return the names of what was stopped."""


def repository_of(reference: str) -> str:
    """Return an image reference without tag and digest: ``host:5000/name`` of ``host:5000/name:tag@sha256:…``."""
    name = reference.partition("@")[0]
    head, colon, tail = name.rpartition(":")
    return head if colon and "/" not in tail else name


def by_digest(reference: str) -> str:
    """Leave the tag out of a reference that has a digest too: that decides, and not every engine takes both."""
    digest = reference.partition("@")[2]
    return f"{repository_of(reference)}@{digest}" if digest else reference


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")
