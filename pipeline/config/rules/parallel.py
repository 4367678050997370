"""Rules about splitting a model over ranks."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.config.spec import Spec
from pipeline.errors import Finding
from pipeline.facts import precisions, releases
from pipeline.facts.architecture import Architecture


def valid_tp(shape: Architecture) -> list[int]:
    """Return the tensor parallel sizes a shape allows: heads divide, key/value heads divide or are repeated."""
    return [tp for tp in range(1, shape.num_heads + 1) if not list(_tp_problems(shape, tp))]


def tensor_parallel(spec: Spec) -> Iterator[Finding]:
    """Heads, key/value heads, hidden size and MLP width must divide."""
    shape = spec.model.architecture
    if shape is None:
        return
    for rule, message in _tp_problems(shape, spec.parallel.tp, _mlp_split(spec)):
        sizes = ", ".join(str(tp) for tp in valid_tp(shape))
        yield Finding(rule, "error", "parallel.tp", message, f"valid sizes for {spec.model.name}: {sizes}")


def pipeline_parallel(spec: Spec) -> Iterator[Finding]:
    """Layers should divide; releases from 1.0 spread a remainder over the first ranks."""
    shape, pp = spec.model.architecture, spec.parallel.pp
    if pp > 1 and spec.model.family in ("phi", "phi3", "gemma", "gemma2", "gemma3"):
        message = f"{spec.model.family} models cannot be split into pipeline stages (parallel.pp={pp})"
        yield Finding("pp-family", "error", "parallel.pp", message, "parallel.pp=1 with a larger parallel.tp")
    if shape is None or shape.num_layers % pp == 0:
        return
    is_spread = releases.is_at_least(spec.toolchain.release, "1.0.0") and shape.num_layers >= pp
    yield Finding(
        "pp-layers",
        "warning" if is_spread else "error",
        "parallel.pp",
        f"{shape.num_layers} layers do not divide by parallel.pp={pp}"
        + ("; the first ranks get one more" if is_spread else ""),
        "choose a pp that divides the layers",
    )


def context_parallel(spec: Spec) -> Iterator[Finding]:
    """Ulysses splits heads over tp × cp."""
    shape, parallel = spec.model.architecture, spec.parallel
    if shape and parallel.cp > 1 and shape.num_heads % (parallel.tp * parallel.cp):
        product = parallel.tp * parallel.cp
        message = f"{shape.num_heads} heads do not divide by tp × cp = {product}"
        yield Finding("cp-heads", "error", "parallel.cp", message, "parallel.cp=1")


def quantized_widths(spec: Spec) -> Iterator[Finding]:
    """Scales in groups need per-rank input widths of whole groups; FP8 and FP4 kernels multiples of 16."""
    shape, algorithm, tp = spec.model.architecture, spec.precision.quant_algo, spec.parallel.tp
    if shape is None or algorithm is None or list(_tp_problems(shape, tp)):
        return
    widths = {**shape.rank_widths(tp), "MLP width": shape.intermediate_size // _mlp_split(spec)}
    is_grouped = algorithm in precisions.GROUPED and spec.precision.group_size > 0
    step = spec.precision.group_size if is_grouped else 16 if algorithm in precisions.FP8_FAMILY else 1
    for name, width in widths.items():
        if width % step:
            what = f"precision.group_size={step}" if is_grouped else f"{step}, as {algorithm} kernels want"
            good = [size for size in valid_tp(shape) if _divides(shape, size, step)]
            advice = f"parallel.tp of {', '.join(map(str, good))}" if good else "another precision"
            smaller = [s for s in precisions.GROUP_SIZES if is_grouped and not any(w % s for w in widths.values())]
            if smaller:
                advice = f"precision.group_size={smaller[0]}, or {advice}"
            yield Finding(
                "group-size" if is_grouped else "width-16",
                "error",
                "precision.group_size" if is_grouped else "parallel.tp",
                f"the {name} of a rank, {width}, does not divide by {what} at parallel.tp={tp}",
                advice,
            )


def gpu_count(spec: Spec) -> Iterator[Finding]:
    """More ranks than GPUs in a machine means several machines."""
    count, world = spec.hardware.count, spec.parallel.world_size
    if spec.target.resolved != "reference" and 0 < count < world:
        message = f"tp × pp × cp = {world} ranks, but a machine with {spec.hardware.name} has {count} GPUs"
        yield Finding("gpu-count", "warning", "parallel", message, "this needs several machines, or hardware.count=N")


def reference_ranks(spec: Spec) -> Iterator[Finding]:
    """The rehearsal joins the ranks of a checkpoint; it has no context parallelism and no experts dealt out whole."""
    parallel = spec.parallel
    if spec.target.resolved != "reference":
        return
    for name, value in (("cp", parallel.cp), ("moe_ep", parallel.moe_ep or 1)):
        if value > 1:
            message = f"the reference target joins tensor and pipeline parallel ranks, not parallel.{name}={value}"
            yield Finding("reference-ranks", "error", f"parallel.{name}", message, f"parallel.{name}=1")


def _mlp_split(spec: Spec) -> int:
    """Return over how many ranks one MLP lies: experts may be dealt out whole instead."""
    parallel = spec.parallel
    if parallel.moe_tp:
        return parallel.moe_tp
    return max(1, parallel.tp // parallel.moe_ep) if parallel.moe_ep else parallel.tp


def _tp_problems(shape: Architecture, tp: int, mlp_tp: int | None = None) -> Iterator[tuple[str, str]]:
    mlp_tp = mlp_tp or tp
    kv = shape.num_kv_heads
    if shape.num_heads % tp:
        yield "tp-heads", f"{shape.num_heads} attention heads do not divide by parallel.tp={tp}"
    if kv % tp and tp % kv:
        yield "tp-kv-heads", f"{kv} key/value heads neither divide by parallel.tp={tp} nor divide it"
    if shape.hidden_size % tp:
        yield "tp-hidden", f"hidden size {shape.hidden_size} does not divide by parallel.tp={tp}"
    if shape.intermediate_size % mlp_tp:
        split = f"parallel.tp={tp}" if mlp_tp == tp else f"the tensor parallel size inside experts, {mlp_tp}"
        yield "tp-mlp", f"MLP width {shape.intermediate_size} does not divide by {split}"


def _divides(shape: Architecture, tp: int, step: int) -> bool:
    widths = (shape.hidden_size, shape.num_heads * shape.head_size // tp, shape.intermediate_size // tp)
    return all(width % step == 0 for width in widths)


RULES = (tensor_parallel, pipeline_parallel, context_parallel, quantized_widths, gpu_count, reference_ranks)
