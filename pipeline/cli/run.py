"""The verb ``run``: the whole pipeline, once or for every point of a sweep."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.cli.output import Output, failure_document, findings_json, has_errors
from pipeline.cli.plan import availability, known_findings
from pipeline.cli.verbs import Request
from pipeline.config.overrides import SECRET_KEYS, expand_sweep
from pipeline.errors import ConfigError, ExitCode, Finding, PipelineError, PreflightError
from pipeline.graph.places import obstacles

if TYPE_CHECKING:
    from pipeline.config.spec import Spec
    from pipeline.graph.run import RunResult


@dataclass(frozen=True, slots=True)
class Made:
    """A finished run."""

    spec: Spec
    findings: tuple[Finding, ...]
    result: RunResult
    verdict: str


def main(request: Request) -> int:
    """Run the pipeline and say what was made.

    Raises:
        ConfigError: The configuration is wrong.
        PreflightError: A rule found an error; nothing was started.
        PipelineError: A stage failed.
    """
    if request.is_sweep:
        return _sweep(request)
    made = run_job(request.spec(), request.output)
    request.output.document(document(made))
    _show(made, request)
    return ExitCode.OK


def run_job(spec: Spec, output: Output) -> Made:
    """Check, run and export one job.

    Raises:
        PreflightError: With all findings, when one is an error.
        PipelineError: A stage failed, or the result could not be exported.
    """
    findings = known_findings(spec)
    if spec.target.resolved == "engine":
        findings += _machine(spec)
    else:
        findings += [replace(finding, severity="error") for finding in availability(spec)]
    findings += obstacles(Path(spec.output_dir), Path(spec.store.root))
    if has_errors(findings):
        count = sum(finding.severity == "error" for finding in findings)
        raise PreflightError(f"{count} finding{'s' if count > 1 else ''} in the way of {spec.name}", findings=findings)
    output.findings(findings)
    from pipeline.graph.console import console
    from pipeline.graph.export import export_tree
    from pipeline.graph.run import run
    from pipeline.stages import all_stages
    from pipeline.store.store import Store

    with console(output.stderr, quiet=output.mode == "quiet") as emit:
        result = run(spec, all_stages(spec, resolve=True), Store(Path(spec.store.root)), emit=emit)
    if "emit" not in result.stages:
        raise _unfinished(spec, result)
    export = export_tree(result.artefact("emit"), Path(spec.output_dir))
    loaded = result.stages["verify"].record.facts.get("loaded") if "verify" in result.stages else None
    if isinstance(loaded, dict) and loaded.get("by") is None:
        output.note(f"warning: not tried in a real server: {loaded.get('reason')}")
    if export.changed:
        output.note(f"put right in {export.path}, as changed by hand: {', '.join(export.changed)}")
    if export.moved:
        output.note(f"files of yours that lay in {export.path} are in {export.moved}")
    return Made(spec, tuple(findings), result, _verdict(export.path))


def _machine(spec: Spec) -> list[Finding]:
    """Ask what this machine lacks for NVIDIA's tools, unless what they make is there already."""
    from pipeline.graph.plan import plan
    from pipeline.stages import all_stages
    from pipeline.stages.engine.preflight import machine_findings
    from pipeline.store.store import Store

    try:
        entries = plan(spec, all_stages(spec, resolve=False), Store(Path(spec.store.root)))
    except PipelineError:
        return machine_findings(spec)  # the run itself says what is wrong with store or source
    return [] if all(entry.status == "hit" for entry in entries) else machine_findings(spec)


def _unfinished(spec: Spec, result: RunResult) -> PreflightError:
    """Return the error for a graph that ends before anything can be exported: engines that nobody has judged."""
    (finding,) = availability(spec)
    folder = result.artefact("build") / "engine"
    message = f"engines of {spec.name} are built, not judged and not emitted: {folder}"
    return PreflightError(message, hint=finding.message, findings=[replace(finding, severity="error")])


def document(made: Made) -> dict[str, Any]:
    """Return a finished run as JSON values."""
    return {
        "exit_code": int(ExitCode.OK),
        "name": made.spec.name,
        "target": made.spec.target.resolved,
        "output_dir": made.spec.output_dir,
        "verdict": made.verdict,
        "findings": findings_json(made.findings),
        "stages": [
            {
                "name": stage.name,
                "key": stage.key,
                "status": "hit" if stage.hit else "built",
                "reason": stage.reason,
                "artefact": stage.record.artefact,
            }
            for stage in made.result.stages.values()
        ],
        "seconds": round(made.result.seconds, 3),
    }


def _show(made: Made, request: Request) -> None:
    spec, output = made.spec, request.output
    rehearsal = " (a CPU rehearsal, not for production)" if spec.target.resolved == "reference" else ""
    output.line()
    output.table(
        [
            ["made", f"{spec.model.name} in {spec.precision.name} for target={spec.target.resolved}{rehearsal}"],
            ["where", _shown(spec.output_dir)],
            ["verdict", output.paint(made.verdict, "good")],
            ["next", _command("serve", request.arguments)],
        ]
    )
    served = spec.frontend.served_model or spec.model.name
    body = json.dumps({"model": served, "temperature": 0, "messages": [{"role": "user", "content": "Hello!"}]})
    url = f"http://{spec.frontend.host}:{spec.frontend.port}/v1"
    output.line(f"           curl {url}/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}")


def _verdict(output_dir: Path) -> str:
    """Read the gate's verdict from what was exported; it is what people will look at."""
    try:
        return str(json.loads((output_dir / "gate.json").read_text(encoding="utf-8"))["verdict"])
    except (OSError, ValueError, KeyError, TypeError):
        return "unknown: no gate.json was exported"


def _command(verb: str, arguments: Sequence[str]) -> str:
    """Return a command line for the same job that can be pasted into this shell."""
    python = Path(sys.executable)
    found = shutil.which("python")
    name = "python" if found and Path(found).parent == python.parent else _shown(str(python))
    safe = [word for word in arguments if word.partition("=")[0].lstrip("+") not in SECRET_KEYS]
    return shlex.join([name, "-m", "pipeline", verb, *safe])


def _shown(path: str) -> str:
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path


def _sweep(request: Request) -> int:
    """Run every point; one that fails lets the others finish. Returns 130, else 1, else the highest code."""
    points = [replace(request, arguments=tuple(point)) for point in expand_sweep(request.arguments)]
    specs = [point.spec() for point in points]
    _refuse_collisions(specs)
    output = request.output
    documents: list[dict[str, Any]] = []
    codes: list[int] = []
    for number, (point, spec) in enumerate(zip(points, specs, strict=True), start=1):
        output.note(f"[{number}/{len(points)}] {spec.name}: {shlex.join(point.arguments)}")
        outcome = _point(spec, output)
        documents.append({"overrides": list(point.arguments), "name": spec.name, **outcome})
        codes.append(outcome["exit_code"])
        if codes[-1] in (ExitCode.INTERRUPTED, ExitCode.TERMINATED):
            break
    output.document({"exit_code": _joined(codes), "runs": documents})
    output.line()
    rows = [["code", "name", "result"]]
    for entry in documents:
        text = entry["verdict"] if entry["exit_code"] == 0 else entry["error"]["message"]
        rows.append([str(entry["exit_code"]), entry["name"], str(text)])
    output.table(rows, header=True)
    if len(codes) < len(points):
        output.note(f"{len(points) - len(codes)} of {len(points)} were not started")
    return _joined(codes)


def _point(spec: Spec, output: Output) -> dict[str, Any]:
    try:
        return document(run_job(spec, output))
    except PipelineError as error:
        if output.mode != "json":
            output.failure(error)
        return failure_document(error)
    except KeyboardInterrupt as error:
        from pipeline.graph.interrupt import Terminated

        code = ExitCode.TERMINATED if isinstance(error, Terminated) else ExitCode.INTERRUPTED
        return {"exit_code": int(code), "error": {"message": code.name.lower()}, "findings": []}
    except Exception as error:
        from pipeline.cli.main import report_internal

        message = report_internal(error, output)
        return {"exit_code": int(ExitCode.INTERNAL), "error": {"message": message}, "findings": []}


def _joined(codes: Sequence[int]) -> int:
    for code in (ExitCode.INTERRUPTED, ExitCode.TERMINATED, ExitCode.INTERNAL):
        if code in codes:
            return int(code)
    return max(codes, default=0)


def _refuse_collisions(specs: Sequence[Spec]) -> None:
    folders = [spec.output_dir for spec in specs]
    twice = sorted({_shown(folder) for folder in folders if folders.count(folder) > 1})
    if twice:
        message = f"several runs of the sweep would write to {', '.join(twice)}"
        hint = "make the names differ: 'name=smollm2-${limits.max_batch_size}'"
        raise ConfigError(message, hint=hint, findings=[Finding("sweep-output", "error", "name", message, hint)])
