"""Slurm with pyxis and enroot: ``srun --container-image …``.

Two things differ from the other containers. Slurm has no switch for the network, so only the variables that keep the
tools offline are set. And mounts are written as ``source:target:flags,…`` and become lines of an fstab, so a host path
with a blank, a comma or a colon cannot be passed: it is refused.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import ToolError
from pipeline.runners import process
from pipeline.runners.execution import Supervision, ended_by_itself, supervise
from pipeline.runners.job import Bind, Cancel, ContainerJob, Image, OnLine, Options, by_digest
from pipeline.runners.owner import Owner
from pipeline.runners.preparation import prepared
from pipeline.runners.process import Completed

_QUERY_TIMEOUT_S = 60.0

# Ordinary variables that srun and enroot want (enroot's credentials are below HOME). Not ALL: that would take every
# secret of this shell along.
_EXPORTED = "PATH,HOME,USER,LANG"

# Marks jobs of ours in Slurm's comment field.
_COMMENT = "trtllm-pipeline"

_numbers = itertools.count(1)


class PyxisRunner:
    """Runs each job as one Slurm step on one node, in a container made by enroot.

    Args:
        options: ``extra`` takes partition, account and the like; ``ipc``, ``shm_size`` and ``ulimits`` are the site's
            configuration of enroot and Slurm and are not used.
    """

    name = "pyxis"

    def __init__(self, options: Options | None = None) -> None:
        self._options = options or Options()
        self._program = self._options.program or "srun"
        self._swept = False

    def command_line(self, job: ContainerJob) -> list[str]:
        """Return the ``srun`` command. What :meth:`run` executes has a name of its own and the owner as comment."""
        return self._line(job, ())

    def resolve(self, reference: str, *, log_path: Path | None = None, on_line: OnLine | None = None) -> Image:
        """Ask the registry for the digest; a squashfs file is itself.

        Raises:
            ToolError: No such file or image, or the registry cannot be asked.
        """
        if reference.startswith(("/", "./")):
            if not Path(reference).is_file():
                raise ToolError(f"no image file {reference}", hint="enroot import -o FILE docker://IMAGE")
            return Image(reference)
        from pipeline.runners.registry import fetch_digest

        return Image(reference, digests=(fetch_digest(reference),))

    def run(
        self,
        job: ContainerJob,
        *,
        log_path: Path | None = None,
        on_line: OnLine | None = None,
        cancel: Cancel | None = None,
    ) -> Completed:
        """See :meth:`pipeline.runners.job.Runner.run`."""
        if not self._swept:
            self.sweep()
        owner = Owner.current()
        own = dataclasses.replace(job, name=f"{job.name}-{owner.pid}-{next(_numbers)}")
        argv = self._line(own, [f"--comment={_COMMENT}:{owner.label}"])
        # Inside an allocation the step has no job of its own; srun ends it when it is ended itself.
        stop = None if "SLURM_JOB_ID" in os.environ else lambda: self._cancel_jobs(f"--name={own.name}")
        how = Supervision(place=job.image, stop=stop, grace_s=self._options.grace_s)
        repeat = self.command_line(job)
        with prepared(job, argv, repeat=repeat, caller=self._options.caller, log_path=log_path):
            try:
                return supervise(argv, own, how, log_path=log_path, on_line=on_line, cancel=cancel)
            except BaseException as error:
                # SAFETY: srun may have been ended while Slurm was still making the job.
                if stop and not ended_by_itself(error):
                    stop()
                raise

    def sweep(self) -> tuple[str, ...]:
        """Cancel jobs whose owner on this machine has died. A step inside an allocation ends with it."""
        lines: list[str] = []
        argv = ["squeue", "--me", "--noheader", "--format=%i|%j|%k"]
        done = process.run(argv, timeout_s=_QUERY_TIMEOUT_S, on_line=lines.append, check=False)
        if done.returncode != 0:
            raise ToolError("Slurm does not answer: " + " ".join(done.tail), hint="Does `squeue` work here?")
        self._swept = True
        orphans = {}
        for line in lines:
            number, name, comment = (*line.split("|", 2), "", "")[:3]
            marker, _, label = comment.strip().partition(":")
            owner = Owner.parse(label) if marker == _COMMENT else None
            if owner is not None and owner.is_dead():
                orphans[number] = name
        if orphans:
            self._cancel_jobs(*orphans)
        return tuple(orphans.values())

    def _line(self, job: ContainerJob, marks: Sequence[str]) -> list[str]:
        argv = [self._program, f"--job-name={job.name}", *marks, "--nodes=1", "--ntasks=1", "--input=none"]
        argv += ["--unbuffered", "--kill-on-bad-exit=1", f"--export={_EXPORTED}"]
        if job.timeout_s is not None:
            # Slurm's own limit ends what nobody watches any more; ours comes first.
            argv.append(f"--time={math.ceil(job.timeout_s / 60) + 1}")
        if job.gpus > 0:
            argv.append(f"--gpus-per-node={job.gpus}")
        argv.append(f"--container-image={_enroot_name(job.image)}")
        mounts = ",".join(self._mount(bind) for bind in job.all_binds)
        argv += [f"--container-mounts={mounts}"] if mounts else []
        argv += [f"--container-workdir={job.workdir}", "--container-readonly"]
        argv += ["--no-container-mount-home", "--no-container-remap-root", *self._options.extra]
        # Variables of the image win over exported ones, and --export splits values at commas: env inside does neither.
        variables = [f"{name}={value}" for name, value in job.all_env.items()]
        return [*argv, *(["env", *variables] if variables else []), *job.argv]

    def _mount(self, bind: Bind) -> str:
        source = self._options.on_host(bind.host.absolute())
        if any(character in source for character in ",: \t\n"):
            raise ToolError(
                f"pyxis cannot mount {source!r}: blanks, commas and colons separate mounts there",
                hint="Move it to a path without them, or use another runner.",
            )
        return f"{source}:{bind.target}" + ("" if bind.writable else ":ro")

    def _cancel_jobs(self, *which: str) -> None:
        process.run(["scancel", "--quiet", "--me", *which], timeout_s=_QUERY_TIMEOUT_S, check=False)


def _enroot_name(reference: str) -> str:
    """Write an image reference the way enroot wants it: ``registry#name:tag``, or ``registry#name@digest``."""
    if reference.startswith(("/", "./")) or "#" in reference:
        return reference
    name = by_digest(reference)
    host, slash, rest = name.partition("/")
    is_registry = slash and ("." in host or ":" in host or host == "localhost")
    return f"{host}#{rest}" if is_registry else name
