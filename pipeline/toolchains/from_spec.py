"""From a frozen Spec to NVIDIA's tools: the job, who converts, and the commands with every finding."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pipeline.config.spec import Spec
from pipeline.errors import Finding
from pipeline.toolchains.adapter import commands_for, without_known
from pipeline.toolchains.command import Command
from pipeline.toolchains.job import (
    SMOOTHQUANT,
    Calibration,
    Limits,
    Lora,
    Speculative,
    ToolJob,
    find_family,
)
from pipeline.toolchains.release import engine_findings, load_release
from pipeline.toolchains.routes import default_converter

# What upstream calls the modes.
_MODES: Mapping[str, str] = {
    "draft_target": "draft_tokens_external",
    "medusa": "medusa",
    "eagle": "eagle",
    "lookahead": "lookahead_decoding",
    "redrafter": "explicit_draft_tokens",
}


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """What NVIDIA's tools would be asked to do.

    Attributes:
        commands: By stage, ``convert`` and ``build``; empty when a finding is an error.
        findings: Of the toolchain; those of the configuration's own rules are left out.
    """

    commands: Mapping[str, Command]
    findings: tuple[Finding, ...]


def tool_plan(spec: Spec, known: Iterable[Finding] = ()) -> ToolPlan:
    """Make the commands of a job for ``target=engine``.

    Args:
        spec: The job.
        known: Findings of the configuration's rules, which see part of the same.
    """
    known = list(known)
    problems = engine_findings(spec.toolchain.release)
    if problems:
        return ToolPlan({}, tuple(without_known(problems, known)))
    commands, findings = commands_for(job_from_spec(spec), load_release(spec.toolchain.release))
    return ToolPlan({command.stage: command for command in commands}, tuple(without_known(findings, known)))


def settled(spec: Spec) -> Spec:
    """Decide ``converter=auto`` by the tables of the release; anything else stays as it is."""
    converter = spec.converter
    if converter.requested != "auto" or converter.resolved != "nvidia" or spec.target.resolved != "engine":
        return spec
    job = job_from_spec(spec)
    family = find_family(job.family)
    if family is None or engine_findings(spec.toolchain.release):
        return spec
    who, why = default_converter(job, family, load_release(spec.toolchain.release))
    release = spec.toolchain.release if who == "nvidia" else None
    return dataclasses.replace(
        spec, converter=dataclasses.replace(converter, resolved=who, reason=why, release=release)
    )


def job_from_spec(spec: Spec) -> ToolJob:
    """Make the job for NVIDIA's tools from a frozen Spec."""
    precision, parallel, build = spec.precision, spec.parallel, spec.build
    shape = spec.model.architecture
    algorithm = precision.quant_algo or ""
    is_smooth = algorithm.startswith("W8A8_SQ") and not precision.from_checkpoint
    return ToolJob(
        family=shape.architecture if shape else spec.model.family,
        precision="smoothquant" if is_smooth else precision.name,
        dtype=precision.dtype,
        kv_cache=(precision.kv_cache or "auto").lower(),
        sm=spec.hardware.sm,
        gpu_count=spec.hardware.count or None,
        gpu_memory_bytes=spec.hardware.memory_bytes or None,
        parameters=shape.parameters if shape else None,
        experts=shape.num_experts if shape else 0,
        vocab_size=shape.vocab_size if shape else 0,
        tp=parallel.tp,
        pp=parallel.pp,
        cp=parallel.cp,
        moe_tp=parallel.moe_tp or -1,
        moe_ep=parallel.moe_ep or -1,
        embedding_sharding=parallel.embedding_sharding,
        converter=spec.converter.resolved,
        limits=_limits(spec),
        flags=dict(build.flags),
        converter_flags=dict(build.converter_flags),
        smoothquant_algo=algorithm if is_smooth else SMOOTHQUANT[True, True],
        alpha=0.5 if precision.alpha is None else precision.alpha,
        group_size=precision.group_size or 128,
        quantize_lm_head=precision.quantize_lm_head,
        calibration=_calibration(spec),
        source=spec.model.quantization,
        speculative=_speculative(spec),
        lora=_lora(spec),
        workers=build.workers,
        multiple_profiles=build.multiple_profiles,
        force_num_profiles=build.force_num_profiles,
        weight_streaming=build.weight_streaming,
        reuse_kv=build.kv_reuse,
        chunked_context=build.chunked_context,
        reuse_timing_cache=bool(build.timing_cache),
    )


def _limits(spec: Spec) -> Limits:
    limits = spec.limits
    return Limits(
        limits.max_batch_size,
        limits.max_input_len,
        limits.max_seq_len,
        limits.max_num_tokens,
        limits.max_beam_width,
    )


def _calibration(spec: Spec) -> Calibration | None:
    data = spec.calibration
    return Calibration(data.samples, data.seq_len, data.batch_size) if data is not None else None


def _speculative(spec: Spec) -> Speculative | None:
    wish = spec.speculative
    if wish is None:
        return None
    return Speculative(
        mode=_MODES[wish.mode],
        max_draft_len=wish.max_draft_len,
        window=wish.window,
        ngram=wish.ngram,
        verification=wish.verification,
        medusa_heads=wish.medusa_heads,
        medusa_layers=wish.medusa_layers,
        eagle_layers=wish.eagle_layers,
    )


def _lora(spec: Spec) -> Lora | None:
    wish = spec.lora
    if wish is None:
        return None
    return Lora(wish.max_rank, wish.target_modules, len(wish.adapters), wish.adapter_rank, wish.dora)
