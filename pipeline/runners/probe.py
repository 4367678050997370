"""Look into an image before the long work: are the tools there, of the right release, and does the GPU show?

The same job that is about to run is asked a few questions in its own container, with its own mounts and GPU flags.
Every answer that differs from the plan is a finding with both values.
"""

from __future__ import annotations

import dataclasses
import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.errors import Finding, PreflightError, ToolError
from pipeline.runners import inside
from pipeline.runners.exits import NESTED_HINT
from pipeline.runners.job import Bind, Cancel, ContainerJob, OnLine, Runner
from pipeline.runners.process import ProcessFailed

# A cold start of a 30 GB image from a network disk takes minutes.
TIMEOUT_S = 600.0

_FOLDER = "/run/probe"
_WRITTEN = ".probe"


@dataclass(frozen=True, slots=True)
class Expectation:
    """What the plan counts on.

    Attributes:
        release: The plan's release, for messages.
        tools: Programs that must be on PATH.
        files: Scripts that must exist, as container paths.
        versions: Package to version, ``tensorrt_llm`` to ``1.2.1``.
        python: Interpreter that the commands name.
        gpus: How many GPUs must show.
        compute_capability: ``9.0``; empty: any.
        driver_floor: Oldest driver that the release lists; empty: not known.
        without_tools: What to do when a tool is missing.
    """

    release: str
    tools: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    python: str = "python3"
    gpus: int = 0
    compute_capability: str = ""
    driver_floor: str = ""
    without_tools: str = ""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as the container sees it.

    Attributes:
        name: Product name.
        uuid: Identity.
        compute_capability: ``9.0``.
        memory_mib: Memory in MiB; 0 when not told.
        driver: Driver version.
    """

    name: str
    uuid: str
    compute_capability: str
    memory_mib: int
    driver: str


@dataclass(frozen=True, slots=True)
class Probed:
    """What an image and its container are.

    Attributes:
        python: Version of the interpreter.
        uid: Who the program runs as.
        tools: Program to its path; None when missing.
        files: Script to whether it exists.
        versions: Package to its version; None when missing.
        gpus: What shows.
        findings: What differs from the plan; warnings only, as errors are raised.
    """

    python: str
    uid: int
    tools: Mapping[str, str | None]
    files: Mapping[str, bool]
    versions: Mapping[str, str | None]
    gpus: tuple[Gpu, ...]
    findings: tuple[Finding, ...] = ()


def probe(
    runner: Runner,
    job: ContainerJob,
    expected: Expectation,
    *,
    log_path: Path | None = None,
    on_line: OnLine | None = None,
    cancel: Cancel | None = None,
) -> Probed:
    """Ask the container of ``job`` what it is.

    Args:
        runner: Where the job will run.
        job: The job; its binds, GPUs and user are what is looked at. Secrets are left out.
        expected: What the plan counts on.
        log_path: Log of the probe.
        on_line: Gets its lines.
        cancel: Stops it.

    Raises:
        PreflightError: Something differs; one finding each, with both values.
        ToolError: The container cannot be started.
    """
    folder = job.scratch / "probe"
    token = uuid.uuid4().hex
    questions = {
        "token": token,
        "tools": expected.tools,
        "files": expected.files,
        "versions": list(expected.versions),
        "mounts": [bind.target for bind in job.binds],
        "write": [f"{job.env['HOME']}/{_WRITTEN}"] if job.home else [],
    }
    folder.mkdir(parents=True, exist_ok=True)
    if job.home:
        (job.home / _WRITTEN).unlink(missing_ok=True)
    # A copy, because an engine outside of our own container sees the scratch folder, not this package.
    (folder / "inside.py").write_text(Path(inside.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "questions.json").write_text(json.dumps(questions), encoding="utf-8")
    asking = dataclasses.replace(
        job,
        name=f"{job.name}-probe",
        argv=(expected.python, f"{_FOLDER}/inside.py", f"{_FOLDER}/questions.json"),
        binds=(*job.binds, Bind(folder, _FOLDER)),
        secrets=(),
        timeout_s=TIMEOUT_S,
    )
    answers = _ask(runner, asking, token, log_path=log_path, on_line=on_line, cancel=cancel)
    seen = _probed(answers)
    findings = [
        *_mount_findings(job.binds, answers["mounts"]),
        *_owner_findings(job.home),
        *compare(seen, expected, runner=runner.name),
    ]
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        raise PreflightError(errors[0].message, hint=errors[0].hint, findings=findings)
    return dataclasses.replace(seen, findings=tuple(findings))


def compare(seen: Probed, expected: Expectation, *, runner: str) -> list[Finding]:
    """Compare what was seen with what was expected. Pure."""
    return [
        *_tool_findings(seen, expected),
        *_version_findings(seen, expected),
        *_gpu_findings(seen, expected, runner),
        *_driver_findings(seen, expected),
    ]


def _ask(
    runner: Runner,
    asking: ContainerJob,
    token: str,
    *,
    log_path: Path | None,
    on_line: OnLine | None,
    cancel: Cancel | None,
) -> dict[str, Any]:
    found: list[dict[str, Any]] = []

    def take(line: str) -> None:
        # An image's entry point may greet first.
        if line.startswith(inside.MARK):
            found.append(json.loads(line[len(inside.MARK) :]))
        elif on_line:
            on_line(line)

    try:
        runner.run(asking, log_path=log_path, on_line=take, cancel=cancel)
    except ProcessFailed as error:
        if any("can't open file" in line for line in error.tail):
            raise _nested(f"a file written to {asking.scratch} does not show inside the container") from error
        raise
    if not found:
        raise ToolError(
            f"{asking.image} ran the probe and its answer is missing",
            hint="Does its entry point swallow the program's output?",
        )
    if found[-1]["token"] != token:
        raise _nested(f"the container sees another folder where we see {asking.scratch}")
    return found[-1]


def _nested(message: str) -> PreflightError:
    finding = Finding("mount-not-visible", "error", "runner.host_paths", message, NESTED_HINT)
    return PreflightError(message, hint=NESTED_HINT, findings=[finding])


def _probed(answers: Mapping[str, Any]) -> Probed:
    cards = tuple(
        Gpu(
            name=facts.get("name", ""),
            uuid=facts.get("uuid", ""),
            compute_capability=facts.get("compute_cap", ""),
            memory_mib=int(facts["memory.total"]) if facts.get("memory.total", "").isdigit() else 0,
            driver=facts.get("driver_version", ""),
        )
        for facts in answers["gpus"]
    )
    return Probed(answers["python"], answers["uid"], answers["tools"], answers["files"], answers["versions"], cards)


def _mount_findings(binds: Sequence[Bind], seen: Mapping[str, Any]) -> list[Finding]:
    findings = []
    for bind in binds:
        # The output is empty before the work, here and there.
        if seen[bind.target] != inside.entries(bind.host):
            message = f"the container sees something else at {bind.target} than we see at {bind.host}"
            findings.append(Finding("mount-not-visible", "error", "runner.host_paths", message, NESTED_HINT))
    return findings


def _owner_findings(home: Path | None) -> list[Finding]:
    """Check that files made inside belong to the owner of the home folder, which is the caller."""
    if home is None:
        return []
    written, wanted = home / _WRITTEN, home.stat().st_uid
    if written.exists():
        found = written.stat().st_uid
        written.unlink()
        if found == wanted:
            return []
        message = f"files made inside the container belong to user {found}, not to {wanted}"
    else:
        message = f"the container cannot write to {home}, which belongs to user {wanted}"
    hint = "if the Docker daemon runs rootless, set runner.rootless=true"
    return [Finding("output-owner", "error", "runner", message, hint)]


def _tool_findings(seen: Probed, expected: Expectation) -> list[Finding]:
    missing = [tool for tool in expected.tools if not seen.tools.get(tool)]
    missing += [path for path in expected.files if not seen.files.get(path)]
    if not missing:
        return []
    message = f"the image has no {', no '.join(missing)}; the plan is for TensorRT-LLM {expected.release}"
    found = seen.versions.get("tensorrt_llm")
    if found:
        message += f" and the image holds {found}"
    return [Finding("image-without-tools", "error", "toolchain", message, expected.without_tools)]


def _version_findings(seen: Probed, expected: Expectation) -> list[Finding]:
    findings = []
    for package, wanted in expected.versions.items():
        found = seen.versions.get(package)
        if found != wanted:
            message = f"the image holds {package} {found or '(none)'}; the plan is for {wanted}"
            hint = "use the image of the plan's release, or the toolchain of the image"
            findings.append(Finding("image-version", "error", "toolchain", message, hint))
    return findings


def _gpu_findings(seen: Probed, expected: Expectation, runner: str) -> list[Finding]:
    findings = []
    if len(seen.gpus) < expected.gpus:
        message = f"the job needs {expected.gpus} GPU(s) and {len(seen.gpus)} show inside the container"
        hint = {
            "docker": "check with: docker run --rm --gpus all IMAGE nvidia-smi",
            "podman": "make the CDI file: nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml",
            "pyxis": "ask Slurm for them: runner.extra=[--gres=gpu:N]",
        }.get(runner, "start this job's own container with its GPUs")
        findings.append(Finding("gpu-not-visible", "error", "hardware", message, hint))
    others = {gpu.compute_capability for gpu in seen.gpus} - {expected.compute_capability}
    if expected.gpus and expected.compute_capability and others:
        names = ", ".join(sorted({gpu.name for gpu in seen.gpus}))
        message = (
            f"the plan is for compute capability {expected.compute_capability}; "
            f"the container sees {', '.join(sorted(others))} ({names})"
        )
        findings.append(Finding("gpu-other", "error", "hardware", message, "hardware=auto, or run where the GPU is"))
    return findings


def _driver_findings(seen: Probed, expected: Expectation) -> list[Finding]:
    drivers = sorted({gpu.driver for gpu in seen.gpus if gpu.driver})
    if not expected.gpus or not expected.driver_floor or not drivers:
        return []
    if _numbers(drivers[0]) >= _numbers(expected.driver_floor):
        return []
    # Data-centre GPUs may run a newer CUDA on an older branch (forward compatibility), so this is no error.
    message = f"driver {drivers[0]} is older than {expected.driver_floor}, which TensorRT-LLM {expected.release} lists"
    hint = "update the driver, or make sure that CUDA forward compatibility covers this GPU"
    return [Finding("driver-old", "warning", "hardware", message, hint)]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))
