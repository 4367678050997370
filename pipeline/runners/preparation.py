"""What is made and checked on this machine before a job starts, and taken away after it."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.errors import StoreError, ToolError
from pipeline.logs import redact, register_secret
from pipeline.runners.job import Bind, Caller, ContainerJob

_SHOWN = 3


@contextlib.contextmanager
def prepared(
    job: ContainerJob, argv: Sequence[str], *, repeat: Sequence[str], caller: Caller, log_path: Path | None
) -> Iterator[None]:
    """Check what a job needs, make its scratch folders and secret files, and write down the exact line.

    Secret files are gone when the block ends, however it ends.

    Args:
        job: The job.
        argv: What is executed; goes to the log.
        repeat: What a person starts to do the same again; goes to ``repro.sh`` beside the log.
        caller: Owner of what the program may write.
        log_path: Log of the job.

    Raises:
        ToolError: A bind is missing, cannot be written, or has links that lead out of it; a secret is not set.
        StoreError: The scratch folder or the log cannot be written.
    """
    for bind in job.binds:
        _check(bind)
    _check_distinct(job)
    try:
        job.scratch.mkdir(parents=True, exist_ok=True)
        if job.home:
            job.home.mkdir(exist_ok=True)
            _give(job.home, caller)
        if log_path:
            _record(job, argv, repeat, log_path)
        _write_secrets(job, caller)
    except OSError as error:
        _forget_secrets(job)
        raise StoreError(f"cannot prepare {job.name} in {job.scratch}: {error.strerror}") from error
    try:
        yield
    finally:
        _forget_secrets(job)


def shell_line(argv: Sequence[str]) -> str:
    """Return ``argv`` as one line for a POSIX shell, without secrets."""
    return redact(shlex.join(argv))


def _check(bind: Bind) -> None:
    if not bind.host.exists():
        raise ToolError(f"{bind.host} does not exist; it is what the tool would see as {bind.target}")
    if bind.writable and not os.access(bind.host, os.W_OK | os.X_OK):
        raise ToolError(f"{bind.host} cannot be written by this user; it is the tool's {bind.target}")
    if not bind.writable and bind.host.is_dir():
        _check_links(bind)


def _check_links(bind: Bind) -> None:
    """Refuse links that lead out of the folder: inside the container their ends are missing."""
    root = bind.host.resolve()
    leading_out = []
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(folder, name)
            if path.is_symlink() and _leads_out(path, root):
                leading_out.append(path)
    if leading_out:
        shown = ", ".join(f"{path.relative_to(root)} → {path.readlink()}" for path in leading_out[:_SHOWN])
        more = f" and {len(leading_out) - _SHOWN} more" if len(leading_out) > _SHOWN else ""
        raise ToolError(
            f"{bind.host} has links that lead out of it and would be broken at {bind.target}: {shown}{more}",
            hint="Copy the files into the folder (cp -rL), or give the folder that holds both.",
        )


def _leads_out(link: Path, root: Path) -> bool:
    target = link.readlink()
    # An absolute path is another one inside the container, even if it ends in this folder.
    return target.is_absolute() or not link.resolve().is_relative_to(root)


def _check_distinct(job: ContainerJob) -> None:
    targets = [bind.target for bind in job.all_binds]
    twice = {target for target in targets if targets.count(target) > 1}
    if twice:
        raise ToolError(f"{job.name}: two binds have the same target: {', '.join(sorted(twice))}")


def _give(path: Path, caller: Caller) -> None:
    """Make ``path`` the caller's, where we act for another user."""
    if os.geteuid() == 0 and caller.uid != 0:
        os.chown(path, caller.uid, caller.gid)


def _record(job: ContainerJob, argv: Sequence[str], repeat: Sequence[str], log_path: Path) -> None:
    """Write the line to the log and, as a script that can be started, beside it."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("a", encoding="utf-8") as log:
        log.write(f"$ {shell_line(argv)}\n")
    notes = [f"# {job.name}: what was run for {log_path.name}."]
    notes += [
        f"# Needs a secret that is not kept: write ${secret.variable} to {job.secret_file(secret)} first."
        for secret in job.secrets
    ]
    made = [str(job.home)] if job.home else []
    made += sorted({str(job.secret_file(secret).parent) for secret in job.secrets})
    folders = [f"mkdir -p {shlex.join(made)}"] if made else []
    script = log_path.parent / "repro.sh"
    script.write_text("\n".join(["#!/bin/sh", *notes, *folders, f"exec {shell_line(repeat)}", ""]), encoding="utf-8")
    script.chmod(0o755)


def _write_secrets(job: ContainerJob, caller: Caller) -> None:
    for secret in job.secrets:
        value = os.environ.get(secret.variable, "")
        if not value:
            raise ToolError(
                f"{job.name} needs the secret {secret.variable}, which is not set",
                hint=f"Put it into the environment: export {secret.variable}=…",
            )
        register_secret(value)
        path = job.secret_file(secret)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        _give(path.parent, caller)
        # SAFETY: never readable by others, not even for the moment between making and changing its mode.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(value)
        _give(path, caller)


def _forget_secrets(job: ContainerJob) -> None:
    for folder in {job.secret_file(secret).parent for secret in job.secrets}:
        shutil.rmtree(folder, ignore_errors=True)
