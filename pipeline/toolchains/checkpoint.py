"""The command that writes the checkpoint: ``convert_checkpoint.py`` of the family, or ``quantize.py``."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.errors import Finding
from pipeline.toolchains import command
from pipeline.toolchains.arguments import render
from pipeline.toolchains.command import Command
from pipeline.toolchains.job import Calibration, FlagValue, ToolJob
from pipeline.toolchains.release import Release
from pipeline.toolchains.routes import Route

CONVERT_TIMEOUT_S = 4 * 3600.0
CALIBRATE_TIMEOUT_S = 12 * 3600.0

# Calibration wants the 16-bit weights and a fifth on top; an estimate.
CALIBRATION_SLACK = 1.2

# Tokens that quantize.py's tokenizer keeps unless told otherwise.
TOKENIZER_LENGTH = 2048

# Config path of each noun, for findings.
_PATHS: Mapping[str, str] = {
    "dtype": "precision",
    "tp": "parallel.tp",
    "pp": "parallel.pp",
    "cp": "parallel.cp",
    "moe_tp": "parallel.moe_tp",
    "moe_ep": "parallel.moe_ep",
    "calibration_samples": "calibration.samples",
    "calibration_length": "calibration.seq_len",
    "calibration_batch": "calibration.batch_size",
    "embedding_sharding": "parallel.embedding_sharding",
    "workers": "build.workers",
    "medusa_heads": "speculative.medusa_heads",
    "medusa_layers": "speculative.medusa_layers",
    "draft_len": "speculative.max_draft_len",
    "quantize_lm_head": "precision.quantize_lm_head",
}


def checkpoint_command(job: ToolJob, route: Route, release: Release) -> tuple[Command | None, list[Finding]]:
    """Make the command of a route.

    Returns:
        The command, or None when a finding is an error.
    """
    findings = _calibration_findings(job, route)
    nouns = {noun: value for noun, value in _nouns(job, route).items() if value is not None}
    unheard = {noun: value for noun, value in nouns.items() if noun not in route.nouns}
    findings += [_ignored(noun, value, route) for noun, value in unheard.items() if _matters(noun, job)]
    values: dict[str, FlagValue] = dict(route.facts.get("fixed", {}))
    values |= {route.nouns[noun]: value for noun, value in nouns.items() if noun in route.nouns}
    if route.calibrates:
        values |= route.facts.get("calibrating", {})
    values |= {name: _filled(value, job) for name, value in route.makes.get("flags", {}).items()}
    values |= route.kv.get("flags", {})
    findings += _free_flags(job, values)
    values |= {f"--{key.lstrip('-')}": value for key, value in job.converter_flags.items()}
    table = release.table(route.tool)
    paths = {flag.lstrip("-"): _PATHS[noun] for noun, flag in route.nouns.items() if noun in _PATHS}
    arguments, problems = render(table, values, prefix="build.converter_flags", paths=paths)
    findings += problems
    if any(finding.severity == "error" for finding in findings):
        return None, findings
    return _command(job, route, release, arguments), findings


def _command(job: ToolJob, route: Route, release: Release, arguments: tuple[str, ...]) -> Command:
    medusa = "medusa" in route.nouns and job.speculative is not None and job.speculative.mode == "medusa"
    mounts = command.inputs(
        ("model", command.MODEL),
        *([("calibration", command.CALIBRATION)] if route.calibrates else []),
        *([("medusa", command.MEDUSA)] if medusa else []),
    )
    verb = "quantize" if route.tool == "quantize" else "convert"
    return Command(
        stage="convert",
        tool=route.tool,
        program=(str(release.document["paths"]["python"]), release.script(route.tool)),
        flags=arguments,
        env=command.ENVIRONMENT,
        mounts=(*mounts, command.out()),
        # quantize.py and calibration spread the full model over every GPU; the rest needs one for the library.
        gpus=(job.gpu_count or job.world_size) if route.calibrates or route.tool == "quantize" else 1,
        timeout_s=CALIBRATE_TIMEOUT_S if route.calibrates else CONVERT_TIMEOUT_S,
        description=f"{verb} {job.family} to {job.recipe}, {job.world_size} rank(s), TensorRT-LLM {release.version}",
    )


def _nouns(job: ToolJob, route: Route) -> dict[str, FlagValue]:
    """Return what every tool knows under some name; None where there is nothing to say."""
    splits = {"tp": job.tp, "pp": job.pp, "cp": job.cp}
    values: dict[str, FlagValue] = {
        "model": command.MODEL,
        "out": command.OUT,
        "dtype": route.makes.get("dtype", job.dtype),
        **{noun: size if size > 1 or noun != "cp" else None for noun, size in splits.items()},
        "moe_tp": job.moe_tp if job.moe_tp > 0 else None,
        "moe_ep": job.moe_ep if job.moe_ep > 0 else None,
        "workers": job.workers or (job.world_size if job.world_size > 1 else None),
        "quantize_lm_head": True if job.quantize_lm_head else None,
    }
    if job.embedding_sharding != "none":
        values["embedding_sharding"] = True
        values["embedding_dim"] = 0 if job.embedding_sharding == "vocab" else 1
    if route.calibrates and job.calibration is not None:
        values["calibration"] = command.CALIBRATION
        values["calibration_samples"] = job.calibration.samples
        values["calibration_length"] = job.calibration.seq_len
        values["calibration_batch"] = job.calibration.batch_size
        if job.calibration.seq_len > TOKENIZER_LENGTH:
            values["tokenizer_length"] = job.calibration.seq_len
    if job.speculative is not None and job.speculative.mode == "medusa":
        values["medusa"] = command.MEDUSA
        values["medusa_heads"] = job.speculative.medusa_heads
        values["medusa_layers"] = job.speculative.medusa_layers
        values["draft_len"] = job.speculative.max_draft_len or None
    return values


def _filled(value: FlagValue, job: ToolJob) -> FlagValue:
    """Replace ``$alpha`` and ``$group_size`` by the job's values."""
    if value == "$alpha":
        return job.alpha
    if value == "$group_size":
        return job.source.group_size if job.source and job.precision == "from_checkpoint" else job.group_size
    return value


def _matters(noun: str, job: ToolJob) -> bool:
    """Say whether leaving a noun out changes what the user asked for, rather than how it is done."""
    # The scripts' own values are the defaults, so only another wish is lost.
    wished, default = job.calibration or Calibration(), Calibration()
    if noun == "calibration_samples":
        return wished.samples != default.samples
    if noun == "calibration_length":
        return wished.seq_len != default.seq_len
    return noun in ("embedding_sharding", "quantize_lm_head")


def _ignored(noun: str, value: FlagValue, route: Route) -> Finding:
    path = _PATHS.get(noun, noun)
    message = f"{path}={value!r} has no effect: {route.tool} has no flag for it and uses its own value"
    return Finding("converter-option-ignored", "warning", path, message)


def _calibration_findings(job: ToolJob, route: Route) -> list[Finding]:
    if not route.calibrates:
        return []
    if job.calibration is None:
        message = (
            f"{route.tool} calibrates {job.recipe} (KV cache {job.kv_cache}) "
            "and no data was given; its own default would be downloaded, and containers run without a network"
        )
        hint = "give calibration a local folder with a train split and a text column"
        return [Finding("calibration-missing", "error", "calibration", message, hint)]
    findings = _calibration_memory(job, route)
    most = route.makes.get("samples_at_most")
    if most and job.calibration.samples > most:
        message = f"calibration.samples={job.calibration.samples} ends as {most}: quantize.py caps it for AWQ"
        findings.append(Finding("calibration-samples-capped", "info", "calibration.samples", message))
    return findings


def _calibration_memory(job: ToolJob, route: Route) -> list[Finding]:
    """Calibration holds the full-precision model on the GPUs it sees."""
    gpus = job.gpu_count or job.world_size
    if not job.parameters or not job.gpu_memory_bytes:
        return []
    needed, there = job.parameters * 2 * CALIBRATION_SLACK, gpus * job.gpu_memory_bytes
    if needed <= there:
        return []
    message = (
        f"{route.tool} calibrates the 16-bit model: about {needed / 1e9:.0f} GB (estimated), "
        f"and {gpus} GPU(s) hold {there / 1e9:.0f} GB"
    )
    hint = "quantize on larger or more GPUs, or start from a published quantized checkpoint (precision=from_checkpoint)"
    return [Finding("calibration-memory", "warning", "hardware", message, hint)]


def _free_flags(job: ToolJob, values: Mapping[str, FlagValue]) -> list[Finding]:
    """Refuse free flags that would replace what the pipeline sets."""
    findings = []
    for key, value in job.converter_flags.items():
        name = f"--{key.lstrip('-')}"
        if name in values and values[name] != value:
            message = f"{name} is set to {values[name]!r} by the pipeline, {value!r} was given here"
            findings.append(Finding("flag-set-twice", "error", f"build.converter_flags.{key}", message, "remove it"))
        elif isinstance(value, str) and value.startswith(("/", "~", "./")) and not value.startswith("/in/"):
            message = f"{name}={value!r} is a path of this machine, which the container does not see"
            findings.append(Finding("flag-host-path", "error", f"build.converter_flags.{key}", message, "remove it"))
    return findings
