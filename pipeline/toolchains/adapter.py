"""From a job to the exact commands of NVIDIA's tools, or to the findings that say why there are none."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from pipeline.errors import Finding
from pipeline.toolchains import command, effective, rules
from pipeline.toolchains.arguments import render
from pipeline.toolchains.checkpoint import checkpoint_command
from pipeline.toolchains.command import Command
from pipeline.toolchains.job import Family, ToolJob, family_names, find_family
from pipeline.toolchains.options import FILE_FLAGS, TOOL, BuildView, build_values, flag_paths
from pipeline.toolchains.release import Release, data, engine_findings
from pipeline.toolchains.routes import algorithm_of, choose_route
from pipeline.toolchains.support import check_support

BUILD_TIMEOUT_S = 12 * 3600.0

# Modes whose checkpoints only the examples' own converters write; no table of their flags exists.
_MODES_WITH_OWN_CONVERTER = {"eagle": "examples/eagle", "explicit_draft_tokens": "examples/redrafter"}


def commands_for(job: ToolJob, release: Release) -> tuple[list[Command], list[Finding]]:
    """Make the commands that turn a Hugging Face model into engines.

    Args:
        job: The job; see :func:`pipeline.toolchains.job.job_from_spec`.
        release: The release whose image runs them.

    Returns:
        One command that writes the checkpoint (unless something else does) and one that builds the engines, and every
        finding. No commands when a finding is an error.
    """
    findings = engine_findings(release.version)
    family = find_family(job.family)
    if family is None:
        findings.append(_unknown_family(job.family))
    if findings or family is None:
        return [], findings
    commands: list[Command] = []
    algorithm = algorithm_of(job.recipe)
    source_findings = _source(job)
    findings += [*source_findings, *_splits(job, family)]
    if job.converter == "nvidia" and not source_findings:
        route, route_findings = choose_route(job, family, release)
        findings += route_findings + _own_converter(job)
        if route is not None:
            algorithm = route.algorithm
            first, first_findings = checkpoint_command(job, route, release)
            findings += first_findings + _confidence(release, route.tool)
            commands += [first] if first else []
    last, last_findings = build_command(job, family, release, algorithm)
    findings += [*check_support(job, family, release, algorithm), *last_findings]
    commands += [last] if last else []
    if any(finding.severity == "error" for finding in findings):
        return [], findings
    return commands, findings


def without_known(findings: Iterable[Finding], known: Iterable[Finding]) -> list[Finding]:
    """Drop findings whose rule and path are among ``known``: the configuration's own rules see part of this as well."""
    seen = {(finding.rule.removesuffix("-unverified"), finding.path) for finding in known}
    return [finding for finding in findings if (finding.rule.removesuffix("-unverified"), finding.path) not in seen]


def build_command(
    job: ToolJob, family: Family, release: Release, algorithm: str
) -> tuple[Command | None, list[Finding]]:
    """Make the ``trtllm-build`` command.

    Returns:
        The command, or None when a flag is wrong; and the findings of every build rule.
    """
    values, findings = build_values(job, algorithm)
    table = release.table(TOOL)
    arguments, problems = render(table, values, prefix="build.flags", paths=flag_paths(job))
    findings += problems + _confidence(release, TOOL)
    view = BuildView(job, family, release, algorithm, values, table)
    # With a wrong flag the rules would judge values that no build can have.
    if not any(problem.severity == "error" for problem in problems):
        findings += rules.check(view) + effective.change_findings(view)
    if any(finding.severity == "error" for finding in findings):
        return None, findings
    files = [(f"file:{key}", f"{command.FILES}/{key}") for key in FILE_FLAGS if job.flags.get(key) is not None]
    adapters = range(job.lora.adapters if job.lora else 0)
    mounts = command.inputs(
        ("checkpoint", command.CHECKPOINT),
        *([("timing_cache", command.TIMING_CACHE)] if job.reuse_timing_cache else []),
        *[(f"lora:{index}", f"{command.LORA}/{index}") for index in adapters],
        *files,
    )
    workers = view.number("workers") or 1
    built = Command(
        stage="build",
        tool=TOOL,
        program=(TOOL,),
        flags=arguments,
        env=_build_environment(job),
        mounts=(*mounts, command.out()),
        gpus=workers,
        timeout_s=BUILD_TIMEOUT_S,
        description=f"build {job.world_size} engine(s): {job.family}, {job.recipe}, TensorRT-LLM {release.version}",
    )
    return built, findings


def _build_environment(job: ToolJob) -> dict[str, str]:
    environment = dict(command.ENVIRONMENT)
    if job.force_num_profiles is not None:
        environment["BUILDER_FORCE_NUM_PROFILES"] = str(job.force_num_profiles)
    return environment


def _unknown_family(name: str) -> Finding:
    none = data("families")["no_engine"]
    if name in none["architectures"]:
        message = f"{name} cannot become an engine: {none['note']}"
        return Finding("family-has-no-engine", "error", "model", message, "target=llmapi")
    near = difflib.get_close_matches(name, family_names(), n=1)
    message = f"model family {name!r} is not known to any tool of TensorRT-LLM here; known: {', '.join(family_names())}"
    return Finding("no-flag-table", "error", "model", message, f"did you mean {near[0]}?" if near else "target=llmapi")


def _source(job: ToolJob) -> list[Finding]:
    """Check that precision and source fit together."""
    source, path = job.source, "precision"
    if job.precision == "from_checkpoint":
        if source is None:
            message = (
                "precision=from_checkpoint keeps the source's quantization, and this source has none that is known"
            )
            hint = "precision=bf16; a quantized model: model=hf model.id=ORG/NAME, or model.quantization.kind=gptq"
            return [Finding("source-not-quantized", "error", path, message, hint)]
        if source.kind == "gptq" and source.desc_act:
            message = "the GPTQ source was made with activation order (desc_act=true), which the converters refuse"
            return [Finding("gptq-desc-act", "error", "model", message, "use a checkpoint made with desc_act=false")]
        if source.kind == "fp8_block":
            message = "the source has FP8 block scales (128 × 128), which engines cannot run"
            return [Finding("precision-not-for-engines", "error", path, message, "target=llmapi")]
    elif source is not None:
        message = f"the source is quantized already ({source.key}); quantizing it again to {job.precision} is refused"
        return [Finding("source-already-quantized", "error", path, message, "precision=from_checkpoint")]
    return []


def _splits(job: ToolJob, family: Family) -> list[Finding]:
    """Check that the family can be split the way the job asks for."""
    findings = []
    for noun, size in (("tp", job.tp), ("pp", job.pp), ("cp", job.cp)):
        if size > 1 and noun not in family.parallel:
            message = f"{noun}={size}: {family.name} can be split by {' and '.join(family.parallel)} only"
            hint = f"parallel.{noun}=1 parallel.tp={job.tp * size}"
            findings.append(Finding(f"{noun}-family", "error", f"parallel.{noun}", message, hint))
    return findings


def _own_converter(job: ToolJob) -> list[Finding]:
    mode = job.speculative.mode if job.speculative else ""
    folder = _MODES_WITH_OWN_CONVERTER.get(mode)
    if folder is None:
        return []
    message = f"{mode} needs a checkpoint from {folder}/convert_checkpoint.py, and no table of its flags exists"
    hint = "what works: draft_tokens_external, lookahead_decoding, or medusa"
    return [Finding("no-flag-table", "error", "speculative.mode", message, hint)]


def _confidence(release: Release, tool: str) -> list[Finding]:
    table = release.table(tool)
    if table.confidence == "high":
        return []
    message = f"flags of {tool} in release {release.version}: {table.confidence} confidence ({table.note})"
    return [Finding("flag-table-unverified", "warning", "toolchain", message)]
