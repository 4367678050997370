"""Between a command of the toolchain and a runner: the job, the image that identifies it, and failures as advice."""

from __future__ import annotations

import dataclasses
import shutil
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config.spec import Spec
from pipeline.errors import Finding, ToolError
from pipeline.runners.job import ContainerJob, Image, Options, Runner
from pipeline.stages.base import Planned, StageContext, Unresolved
from pipeline.toolchains.advice import advise
from pipeline.toolchains.command import Command
from pipeline.toolchains.container import bind, expectation
from pipeline.toolchains.release import load_release

if TYPE_CHECKING:
    from pipeline.runners.probe import Expectation, Probed

# Lines of output in which a cause is looked for; the message quotes the runner's last twenty.
_LOOKED_AT = 2000

# Arguments that say how fast, not what.
_UNJUDGED_FLAGS = ("--workers",)


class BuildImage:
    """The image that a job's commands run in, looked up once.

    Args:
        spec: The job.
        resolve: Whether the engine or a registry may be asked.
    """

    def __init__(self, spec: Spec, *, resolve: bool) -> None:
        self._spec, self._resolve = spec, resolve
        self._image: Image | None = None

    @property
    def reference(self) -> str:
        """What the configuration names."""
        return self._spec.toolchain.build_image

    def identity(self) -> dict[str, Any]:
        """Return what identifies the image's content.

        Raises:
            Unresolved: A tag can move, and nobody may be asked.
            ToolError: There is no such image.
        """
        if "@sha256:" in self.reference:
            return {"digest": self.reference.rpartition("@")[2]}
        if self._spec.runner.kind == "local":
            # Inside an image it cannot be asked for its digest; the probe compares versions.
            return {"reference": self.reference}
        if not self._resolve:
            raise Unresolved(
                f"the image tag {self.reference} can move; a run looks it up, "
                "toolchain.build_image=NAME@sha256:… pins it"
            )
        return {"digest": self._digest()}

    def found(self, runner: Runner, log_path: Path) -> Image:
        """Return the image as the engine has it, fetched if it was missing.

        Raises:
            ToolError: There is no such image.
        """
        self._image = runner.resolve(self.reference, log_path=log_path)
        return self._image

    def _digest(self) -> str:
        """Ask the engine; where it lacks the image, the registry, so that nothing is fetched just to look."""
        from pipeline.runners.registry import fetch_digest

        if self._image is None:
            options = dataclasses.replace(options_of(self._spec), pull="never")
            try:
                self._image = runner_of(self._spec, options).resolve(self.reference)
            except ToolError:
                self._image = Image(self.reference, digests=(fetch_digest(self.reference),))
        return self._image.digest


def options_of(spec: Spec) -> Options:
    """Return how the job wants its container engine called."""
    wish = spec.runner
    return Options(
        program=wish.program,
        ipc=wish.ipc,
        shm_size=wish.shm_size,
        ulimits=wish.ulimits,
        devices=wish.devices,
        host_paths=wish.host_paths,
        pull="never" if wish.pull == "never" else "missing",
        pull_timeout_s=wish.pull_timeout_s,
        grace_s=wish.grace_s,
        extra=wish.extra,
    )


def runner_of(spec: Spec, options: Options | None = None) -> Runner:
    """Return the runner that the job names."""
    from pipeline.runners.create import make_runner

    return make_runner(spec.runner.kind, options or options_of(spec), store=spec.store.root)


def container_job(spec: Spec, command: Command, image: str, hosts: Mapping[str, Path], scratch: Path) -> ContainerJob:
    """Bind a command's mounts to this machine.

    Args:
        spec: The job.
        command: What runs.
        image: Image reference.
        hosts: Host path by mount name.
        scratch: Folder that belongs to this run alone.
    """
    return bind(_rehearsed(spec, command), hosts, image=image, scratch=scratch, name=f"{spec.name}-{command.stage}")


def planned(spec: Spec, command: Command, inputs: Mapping[str, Path]) -> Planned:
    """Return a command and its container line before anything exists; what a run makes stands in angle brackets.

    Args:
        spec: The job.
        command: What would run.
        inputs: Host paths that are known.
    """
    root = Path(spec.store.root)
    hosts = {mount.name: inputs.get(mount.name, root / f"<{mount.name}>") for mount in command.mounts}
    job = container_job(spec, command, spec.toolchain.build_image, hosts, root / "<scratch>")
    return Planned(command.argv, tuple(runner_of(spec).command_line(job)))


def command_identity(command: Command) -> dict[str, Any]:
    """Return what a command decides of its output: arguments and variables, without those that only say how fast."""
    argv: list[str] = []
    words = iter(command.argv)
    for word in words:
        if word in _UNJUDGED_FLAGS:
            next(words, None)
        else:
            argv.append(word)
    return {"argv": argv, "env": dict(command.env)}


def run_command(
    context: StageContext, command: Command, image: BuildImage, hosts: Mapping[str, Path]
) -> tuple[str, ...]:
    """Probe the image, run the command in it, and record both in the stage's facts.

    Returns:
        The last lines of its output.

    Raises:
        PreflightError: The image is not what the plan counts on.
        ToolError: The command failed; with cause and advice where the failure is a known one.
    """
    from pipeline.runners.probe import probe

    spec, runner = context.spec, runner_of(context.spec)
    scratch = context.out / ".scratch"
    lines: deque[str] = deque(maxlen=_LOOKED_AT)

    def see(line: str) -> None:
        lines.append(line)
        context.progress(len(lines), None, "lines of output")

    try:
        found = image.found(runner, context.log_path)
        job = container_job(spec, command, found.pinned if found.digests else found.reference, hosts, scratch)
        seen = probe(runner, job, _expected(spec, command), log_path=context.log_path)
        for finding in seen.findings:
            context.log.warning("%s: %s", finding.path, finding.message)
        context.log.info("%s", command.description)
        runner.run(job, log_path=context.log_path, on_line=see)
    except ToolError as error:
        raise advised(error, lines, context.log_path) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    context.facts["tool"] = _facts(command, found, seen, spec)
    return tuple(lines)


def _rehearsed(spec: Spec, command: Command) -> Command:
    """A stand-in computes nothing, and rehearsals run on machines without a GPU."""
    return dataclasses.replace(command, gpus=0) if spec.toolchain.standin else command


def _expected(spec: Spec, command: Command) -> Expectation:
    """Say what the image must hold. Only the build is tied to the GPU of the plan."""
    sm = spec.hardware.sm if command.stage == "build" else None
    capability = f"{sm // 10}.{sm % 10}" if sm else ""
    release = load_release(spec.toolchain.release)
    return expectation(release, [_rehearsed(spec, command)], compute_capability=capability)


def advised(error: ToolError, lines: deque[str], log_path: Path) -> ToolError:
    """Turn a tool's failure into cause, config key and advice where it is a known one."""
    known = advise(list(lines))
    if known is None or type(error) is not _failure_type():
        return error
    message = f"{known.cause}\n{error.message}"
    hint = f"{known.action} (configuration: {known.config_key})" if known.config_key else known.action
    where = known.config_key or str(log_path)
    finding = Finding(f"tool-{known.id}", "error", where, f"{known.cause}: {known.matched}", known.action)
    return ToolError(message, hint=hint, findings=[finding])


def verified(tail: tuple[str, ...], complaints: list[str], log_path: Path) -> None:
    """Refuse a run that reported errors although it ended with exit code 0.

    Raises:
        ToolError: With cause and advice where one is known.
    """
    if not complaints:
        return
    known = advise(complaints) or advise(list(tail))
    shown = "\n".join(f"  | {line}" for line in complaints[:20])
    message = f"the tool ended with exit code 0 but reported errors (log: {log_path})\n{shown}"
    if known is None:
        raise ToolError(message, hint="read the log; nothing of this build is kept")
    finding = Finding(f"tool-{known.id}", "error", known.config_key or str(log_path), known.cause, known.action)
    raise ToolError(f"{known.cause}\n{message}", hint=known.action, findings=[finding])


def _failure_type() -> type[ToolError]:
    from pipeline.runners.process import ProcessFailed

    return ProcessFailed


def _facts(command: Command, image: Image, seen: Probed, spec: Spec) -> dict[str, Any]:
    """Return what ran where, for the manifest; no host path, no time."""
    return {
        "tool": command.tool,
        "argv": list(command.argv),
        "image": {"reference": image.reference, "digest": image.digest},
        "standin": spec.toolchain.standin,
        "python": seen.python,
        "versions": dict(seen.versions),
        "gpus": [
            {"name": gpu.name, "compute_capability": gpu.compute_capability, "driver": gpu.driver} for gpu in seen.gpus
        ],
    }
