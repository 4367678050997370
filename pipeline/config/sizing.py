"""The memory budget of a job: from a Spec's words to the numbers of ``facts.memory``."""

from __future__ import annotations

from dataclasses import replace

from pipeline.config.engine_parts import Speculative
from pipeline.config.spec import Limits, Parallel, Precision, Spec
from pipeline.facts import memory, precisions, releases
from pipeline.facts.architecture import Architecture
from pipeline.facts.memory import Budget, Device, Layout, Load


def layout_of(precision: Precision, parallel: Parallel, target: str) -> Layout:
    """Say how weights and cache lie in memory. The reference engine computes from and caches in float32."""
    split = parallel.embedding_sharding != "none"
    if target == "reference":
        return Layout(4, 4, 4, parallel.tp, parallel.pp, parallel.cp, split)
    return Layout(
        weight_bytes=precisions.weight_bytes(precision.quant_algo, precision.dtype),
        dtype_bytes=precisions.DTYPE_BYTES[precision.dtype],
        kv_bytes=precisions.kv_bytes(precision.kv_cache, precision.dtype),
        tp=parallel.tp,
        pp=parallel.pp,
        cp=parallel.cp,
        is_embedding_split=split,
    )


def device_of(capacity_bytes: int, target: str, release: str) -> Device:
    """Say what one rank has. Blocks of 64 tokens up to release 0.18, 32 from 0.19. Source: builder defaults."""
    block = 32 if releases.is_at_least(release, "0.19") else 64
    return Device(capacity_bytes, is_gpu=target != "reference", tokens_per_block=block)


def load_of(limits: Limits, speculative: Speculative | None = None) -> Load:
    """Say what has to be served."""
    load = Load(limits.max_batch_size, limits.max_seq_len, limits.max_num_tokens, limits.max_beam_width)
    return speculated(load, speculative)


def speculated(load: Load, speculative: Speculative | None) -> Load:
    """Enlarge a load as the builder does for draft tokens: longer sequences, and a step that holds every draft."""
    if speculative is None or not speculative.draft_len:
        return load
    draft = speculative.draft_len
    return replace(
        load,
        max_seq_len=load.max_seq_len + draft + speculative.eagle_layers,
        max_num_tokens=max(load.max_num_tokens, load.max_batch_size * (draft + 1)),
    )


def budget_of(spec: Spec) -> Budget | None:
    """Return the memory budget, or None when the model's shape or the memory is not known."""
    shape = spec.model.architecture
    if shape is None or not spec.memory_bytes:
        return None
    target = spec.target.resolved
    return memory.budget(
        shape,
        layout_of(spec.precision, spec.parallel, target),
        load_of(spec.limits, spec.speculative),
        device_of(spec.memory_bytes, target, spec.toolchain.release),
    )


def disk_of(spec: Spec) -> dict[str, int] | None:
    """Return about how many bytes source, checkpoint and engines take; None when the shape is not known.

    The source is counted at 16 bits, checkpoint and engines as the weights of all ranks. An estimate.
    """
    shape, budget = spec.model.architecture, budget_of(spec)
    if shape is None or budget is None:
        return None
    weights = sum(rank.weights_bytes for rank in budget.per_gpu)
    return {"source": 2 * shape.parameters, "checkpoint": weights, "engines": weights}


def longest_fitting(shape: Architecture, layout: Layout, load: Load, device: Device) -> int | None:
    """Return the longest sequence, up to ``load.max_seq_len``, of which one fits; a multiple of 256 when shortened."""
    if memory.budget(shape, layout, load, device).fits:
        return load.max_seq_len
    low, high = 0, load.max_seq_len // 256
    while low < high:
        middle = (low + high + 1) // 2
        if memory.budget(shape, layout, replace(load, max_seq_len=middle * 256), device).fits:
            low = middle
        else:
            high = middle - 1
    return low * 256 or None
