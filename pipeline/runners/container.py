"""Docker and Podman: one way of calling two engines that differ in a few flags only."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from pipeline.errors import ToolError
from pipeline.runners import process
from pipeline.runners.execution import Supervision, ended_by_itself, supervise
from pipeline.runners.exits import engine_message
from pipeline.runners.job import Bind, Cancel, ContainerJob, Image, OnLine, Options, by_digest, repository_of
from pipeline.runners.owner import OWNER_LABEL, STORE_LABEL, Owner
from pipeline.runners.preparation import prepared
from pipeline.runners.process import Completed, ProcessFailed

Engine = Literal["docker", "podman"]

# Questions to an engine; a busy daemon may need some seconds.
_QUERY_TIMEOUT_S = 60.0

_numbers = itertools.count(1)


class ContainerRunner:
    """Runs jobs with Docker or Podman.

    Args:
        engine: Which of the two.
        options: How it is called.
        store: Says which store the work is for; on the container as a label.
    """

    def __init__(self, engine: Engine, options: Options | None = None, *, store: str = "") -> None:
        self._engine: Engine = engine
        self._options = options or Options()
        self._program = self._options.program or engine
        self._store = store
        self._swept = False

    @property
    def name(self) -> str:
        """``docker`` or ``podman``."""
        return self._engine

    def command_line(self, job: ContainerJob) -> list[str]:
        """Return the engine's command. What :meth:`run` executes also has a number in its name and a label."""
        return self._line(job, ())

    def resolve(self, reference: str, *, log_path: Path | None = None, on_line: OnLine | None = None) -> Image:
        """See :meth:`pipeline.runners.job.Runner.resolve`."""
        asked = by_digest(reference)
        image = self._inspect_image(reference)
        if image is None and self._options.pull == "never":
            raise ToolError(
                f"{self._engine} has no image {reference}, and fetching is switched off (runner.pull=never)",
                hint=f"{self._program} pull {asked}",
            )
        if image is None:
            timeout_s = self._options.pull_timeout_s
            self._call("pull", "--quiet", asked, timeout_s=timeout_s, log_path=log_path, on_line=on_line)
            image = self._inspect_image(reference)
        if image is None:
            raise ToolError(f"{self._engine} fetched {reference} but does not have it")
        return image

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
        labels = [f"--label={OWNER_LABEL}={owner.label}"]
        if self._store:
            labels.append(f"--label={STORE_LABEL}={self._store}")
        argv = self._line(own, labels)
        repeat = self.command_line(job)
        how = Supervision(
            place=job.image,
            engine=self._engine,
            stop=lambda: self._stop(own.name),
            grace_s=self._options.grace_s,
        )
        with prepared(job, argv, repeat=repeat, caller=self._options.caller, log_path=log_path):
            try:
                return supervise(argv, own, how, log_path=log_path, on_line=on_line, cancel=cancel)
            except BaseException as error:
                # SAFETY: a client that was ended, or lost its daemon for a moment, may have left the container behind.
                if not ended_by_itself(error):
                    self._remove([own.name])
                raise

    def sweep(self) -> tuple[str, ...]:
        """See :meth:`pipeline.runners.job.Runner.sweep`."""
        listed = self._call("ps", "--all", "--quiet", "--no-trunc", f"--filter=label={OWNER_LABEL}")
        self._swept = True
        if not listed:
            return ()
        form = f'{{{{.Name}}}}\t{{{{index .Config.Labels "{OWNER_LABEL}"}}}}'
        # One that ends between the two questions makes the engine complain about that one only.
        _, found = self._query("inspect", "--type=container", f"--format={form}", *listed)
        orphans = []
        for line in found:
            name, _, label = line.partition("\t")
            owner = Owner.parse(label)
            if owner is not None and owner.is_dead():
                orphans.append(name.lstrip("/"))
        self._remove(orphans)
        return tuple(orphans)

    def _line(self, job: ContainerJob, labels: Sequence[str]) -> list[str]:
        options = self._options
        argv = [self._program, "run", "--rm", "--init", "--pull=never", f"--name={job.name}", *labels]
        # What the program prints is in our log, redacted; the engine's own copy would not be.
        argv += ["--log-driver=none", f"--network={job.network}", *self._user()]
        if options.shm_size:
            argv.append(f"--shm-size={options.shm_size}")
        elif options.ipc:
            argv.append(f"--ipc={options.ipc}")
        argv += [f"--ulimit={limit}" for limit in options.ulimits]
        if job.gpus > 0:
            argv += self._gpu_flags(job.gpus)
        argv.append(f"--workdir={job.workdir}")
        argv += [f"--mount={self._mount(bind)}" for bind in job.all_binds]
        argv += [f"--env={name}={value}" for name, value in job.all_env.items()]
        return [*argv, *options.extra, by_digest(job.image), *job.argv]

    def _user(self) -> list[str]:
        caller = self._options.caller
        if self._options.rootless and self._engine == "docker":
            # The user that is root inside is us outside.
            return ["--user=0:0"]
        flags = [f"--user={caller.uid}:{caller.gid}"]
        # Rootless Podman maps our uid to root inside unless told to keep it.
        return ["--userns=keep-id", *flags] if self._engine == "podman" and caller.uid != 0 and os.geteuid() else flags

    def _gpu_flags(self, count: int) -> list[str]:
        devices = self._options.devices or tuple(str(index) for index in range(count))
        if self._engine == "podman":
            # SAFETY: Podman accepts --gpus and, in many versions, ignores it: the container starts without a GPU.
            return [f"--device=nvidia.com/gpu={device}" for device in devices]
        # The value is read as CSV, so the comma needs quotes of its own.
        return [f'--gpus="device={",".join(devices)}"']

    def _mount(self, bind: Bind) -> str:
        # --volume splits at colons and lets Docker make missing folders as root; --mount does neither.
        fields = ["type=bind", f"source={self._options.on_host(bind.host)}", f"target={bind.target}"]
        text = io.StringIO()
        csv.writer(text, lineterminator="").writerow(fields if bind.writable else [*fields, "readonly"])
        return text.getvalue()

    def _inspect_image(self, reference: str) -> Image | None:
        code, lines = self._query("image", "inspect", "--format={{.Id}}\t{{json .RepoDigests}}", by_digest(reference))
        if code != 0:
            what, hint = engine_message(lines)
            if what in ("", "the image is not there"):
                return None
            raise ToolError(f"{self._engine}: {what}", hint=hint)
        image_id, _, digests = lines[-1].partition("\t")
        name = repository_of(reference)
        known = [entry.partition("@") for entry in json.loads(digests) or []]
        # Docker shortens docker.io/library/name to name.
        same = [digest for repository, _, digest in known if repository == name or repository.endswith(f"/{name}")]
        asked = reference.partition("@")[2]
        ordered = sorted(same, key=lambda digest: digest != asked)
        return Image(reference, f"sha256:{image_id.removeprefix('sha256:')}", tuple(dict.fromkeys(ordered)))

    def _stop(self, name: str) -> None:
        grace = max(1, round(self._options.grace_s))
        self._query("stop", f"--time={grace}", name, timeout_s=grace + _QUERY_TIMEOUT_S)

    def _remove(self, names: Sequence[str]) -> None:
        # One at a time: Podman removes none when one of several has gone already.
        for name in names:
            self._query("rm", "--force", name)

    def _call(
        self,
        *arguments: str,
        timeout_s: float = _QUERY_TIMEOUT_S,
        log_path: Path | None = None,
        on_line: OnLine | None = None,
    ) -> list[str]:
        """Ask the engine something that must succeed; an engine's own failure is explained."""
        lines: list[str] = []

        def take(line: str) -> None:
            lines.append(line)
            if on_line:
                on_line(line)

        try:
            process.run([self._program, *arguments], timeout_s=timeout_s, log_path=log_path, on_line=take)
        except ProcessFailed as error:
            what, hint = engine_message(error.tail)
            raise ToolError(f"{self._engine}: {what}\n{error.message}" if what else error.message, hint=hint) from error
        return lines

    def _query(self, *arguments: str, timeout_s: float = _QUERY_TIMEOUT_S) -> tuple[int, list[str]]:
        """Ask the engine something that may fail; return its exit code and what it said."""
        lines: list[str] = []
        done = process.run([self._program, *arguments], timeout_s=timeout_s, on_line=lines.append, check=False)
        return done.returncode, lines


def visible_devices(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPUs that a scheduler has given us, from ``CUDA_VISIBLE_DEVICES``; empty when it says nothing."""
    text = environment.get("CUDA_VISIBLE_DEVICES", "")
    return tuple(re.split(r"\s*,\s*", text.strip())) if text.strip() else ()
