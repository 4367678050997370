"""Rules about memory: does it fit, and what would."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from pipeline.config.rules.parallel import valid_tp
from pipeline.config.sizing import budget_of, device_of, layout_of, load_of, longest_fitting
from pipeline.config.spec import Spec
from pipeline.errors import Finding, Severity
from pipeline.facts.memory import GIB, RankMemory


def fit(spec: Spec) -> Iterator[Finding]:
    """Weights, activations, logits, run time and the cache of one full sequence must fit every rank."""
    budget = budget_of(spec)
    if budget is None or budget.fits:
        return
    worst = max(budget.per_gpu, key=lambda rank: rank.total_bytes)
    place = "this machine" if spec.target.resolved == "reference" else spec.hardware.gpu
    # Streamed weights stay on the host; how much of them the GPU holds is a run-time setting.
    severity: Severity = "warning" if spec.build.weight_streaming else "error"
    yield Finding(
        "memory-fit",
        severity,
        "limits",
        f"rank {worst.rank} needs {_gib(worst.total_bytes)} with one sequence of {spec.limits.max_seq_len} tokens "
        f"({_parts(worst)}); {place} has {_gib(worst.capacity_bytes)}",
        "; or ".join(_ways_out(spec)) or "more or larger GPUs",
    )


def overcommit(spec: Spec) -> Iterator[Finding]:
    """More sequences than the cache holds at full length is usual, within reason."""
    budget, limits = budget_of(spec), spec.limits
    if budget is None or not budget.fits:
        return
    held = budget.max_concurrent_sequences
    if limits.max_batch_size <= held:
        return
    message = (
        f"limits.max_batch_size={limits.max_batch_size}, but the cache holds {held} at the full "
        f"limits.max_seq_len={limits.max_seq_len}"
    )
    most = max(1, int(held * limits.kv_overcommit))
    if limits.max_batch_size > most:
        hint = f"limits.max_batch_size={most}; or a smaller limits.max_seq_len; or a larger limits.kv_overcommit"
        yield Finding("kv-overcommit", "error", "limits.max_batch_size", message, hint)
    elif spec.target.resolved != "reference":
        note = "fine while few requests get that long; otherwise some wait"
        yield Finding("kv-overcommit", "info", "limits.max_batch_size", message, note)


def _ways_out(spec: Spec) -> Iterator[str]:
    """Yield overrides that make the job fit, computed, not guessed."""
    shape = spec.model.architecture
    if shape is None:
        return
    target, release = spec.target.resolved, spec.toolchain.release
    layout = layout_of(spec.precision, spec.parallel, target)
    device = device_of(spec.memory_bytes, target, release)
    load = load_of(spec.limits, spec.speculative)
    drafts = load.max_seq_len - spec.limits.max_seq_len
    seq_len = longest_fitting(shape, layout, load, device)
    if seq_len and seq_len > drafts:
        yield f"limits.max_seq_len={seq_len - drafts}"
    for name, value in _smaller_steps(spec):
        yield f"limits.{name}={value}"
    if target == "reference":
        return
    for tp in (size for size in (2, 4, 8, 16) if size > spec.parallel.tp and size in valid_tp(shape)):
        wider = dataclasses.replace(spec, parallel=dataclasses.replace(spec.parallel, tp=tp))
        budget = budget_of(wider)
        if budget is not None and budget.fits:
            yield f"parallel.tp={tp}"
            break
    sm = spec.hardware.sm or 0
    if spec.precision.quant_algo is None and sm >= 89:
        halved = dataclasses.replace(spec.precision, quant_algo="FP8", kv_cache="FP8")
        budget = budget_of(dataclasses.replace(spec, precision=halved))
        if budget is not None and budget.fits:
            yield "precision=fp8 precision.kv_cache=fp8"


def _smaller_steps(spec: Spec) -> Iterator[tuple[str, int]]:
    """Yield the largest smaller batch and the largest smaller step with which the job fits, each on its own."""
    for name, least in (("max_batch_size", 1), ("max_num_tokens", 256)):
        value = getattr(spec.limits, name) // 2
        while value >= least:
            limits = dataclasses.replace(spec.limits, **{name: value})
            budget = budget_of(dataclasses.replace(spec, limits=limits))
            if budget is not None and budget.fits:
                yield name, value
                break
            value //= 2


def _parts(rank: RankMemory) -> str:
    cache = rank.total_bytes - rank.weights_bytes - rank.activations_bytes - rank.logits_bytes - rank.runtime_bytes
    rest = rank.activations_bytes + rank.logits_bytes + rank.runtime_bytes
    return f"weights {_gib(rank.weights_bytes)}, cache {_gib(cache)}, rest {_gib(rest)}"


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


RULES = (fit, overcommit)
