"""Run jobs directly: we are inside NVIDIA's image already, as in a CI job with ``image:``.

There is no container to make, so three things differ from the others, and the plan shows the line as it is run:

* Container paths become host paths: an argument or a variable that is a bind's target, or starts with it and a slash,
  is rewritten. Nothing else is; a path in the middle of an argument stays what it is.
* Inputs cannot be mounted read-only. They are looked over before and after, and a job that changed one fails.
* The network cannot be taken away. The variables that keep the tools offline are set like everywhere.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.errors import ToolError
from pipeline.logs import redact
from pipeline.runners.execution import Supervision, supervise
from pipeline.runners.job import Bind, Cancel, ContainerJob, Image, OnLine, Options
from pipeline.runners.preparation import prepared
from pipeline.runners.process import Completed

# Says where Options.devices go; the names CUDA looks at.
_DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"


class LocalRunner:
    """Runs jobs as ordinary programs of this machine.

    Args:
        options: Only ``devices`` and ``caller`` mean something here.
    """

    name = "local"

    def __init__(self, options: Options | None = None) -> None:
        self._options = options or Options()

    def command_line(self, job: ContainerJob) -> list[str]:
        """Return variables and arguments, with container paths replaced by paths of this machine."""
        values = {name: relocated(value, job.all_binds) for name, value in job.all_env.items()}
        if self._options.devices:
            values[_DEVICES_VARIABLE] = ",".join(self._options.devices)
        variables = [f"{name}={value}" for name, value in values.items()]
        return ["env", *variables, *(relocated(argument, job.all_binds) for argument in job.argv)]

    def resolve(self, reference: str, *, log_path: Path | None = None, on_line: OnLine | None = None) -> Image:
        """Return the reference as it is: an image cannot be asked for its digest from inside."""
        return Image(reference)

    def run(
        self,
        job: ContainerJob,
        *,
        log_path: Path | None = None,
        on_line: OnLine | None = None,
        cancel: Cancel | None = None,
    ) -> Completed:
        """See :meth:`pipeline.runners.job.Runner.run`."""
        argv = self.command_line(job)
        with prepared(job, argv, repeat=argv, caller=self._options.caller, log_path=log_path):
            before = _states(job.binds)
            how = Supervision(place="this image", env=_harmless(os.environ), cwd=_workdir(job))
            done = supervise(argv, job, how, log_path=log_path, on_line=on_line, cancel=cancel)
            _check_unchanged(before, _states(job.binds), job)
            return done

    def sweep(self) -> tuple[str, ...]:
        """Nothing to do: programs started here end with us, however we end."""
        return ()


def relocated(text: str, binds: Sequence[Bind]) -> str:
    """Replace the target of a bind at the start of ``text`` by the host path; the longest target counts."""
    for bind in sorted(binds, key=lambda bind: -len(bind.target)):
        if text == bind.target:
            return str(bind.host)
        if text.startswith(bind.target.rstrip("/") + "/"):
            return str(bind.host) + text[len(bind.target.rstrip("/")) :]
    return text


def _workdir(job: ContainerJob) -> Path:
    """Return where the program starts. What it drops into a container's ``/tmp`` goes with the container."""
    inside = relocated(job.workdir, job.all_binds)
    if inside != job.workdir:
        return Path(inside)
    folder = job.scratch / "work"
    folder.mkdir(exist_ok=True)
    return folder


def _harmless(environment: Mapping[str, str]) -> dict[str, str]:
    """Leave out variables that hold secrets: a container would not see them either."""
    return {name: value for name, value in environment.items() if redact(value, {name: value}) == value}


def _states(binds: Sequence[Bind]) -> dict[str, tuple[int, int, int]]:
    """Return inode, size and time of change of everything that must not change."""
    inputs = [bind.host for bind in binds if not bind.writable]
    paths = [str(path) for path in inputs]
    for path in inputs:
        for folder, folders, files in os.walk(path):
            paths += [f"{folder}/{name}" for name in (*folders, *files)]
    facts = {path: os.lstat(path) for path in paths}
    return {path: (fact.st_ino, fact.st_size, fact.st_mtime_ns) for path, fact in facts.items()}


def _check_unchanged(
    before: Mapping[str, tuple[int, int, int]], after: Mapping[str, tuple[int, int, int]], job: ContainerJob
) -> None:
    changed = sorted(path for path in {*before, *after} if before.get(path) != after.get(path))
    if changed:
        raise ToolError(
            f"{job.name} changed what it may only read: {changed[0]}"
            + (f" and {len(changed) - 1} more" if len(changed) > 1 else ""),
            hint="The input can no longer be trusted; make it again.",
        )
