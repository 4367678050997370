"""Rules about precision and KV cache: what a GPU can run, what the builder refuses or turns off."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.config.spec import Spec
from pipeline.errors import Finding
from pipeline.facts import precisions

# What the CPU engine computes from today.
REFERENCE_PRECISIONS = ("fp16", "bf16")
# Option names by algorithm, for advice.
_OPTIONS = {
    "W8A16": "int8",
    "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN": "smoothquant",
    "FP8": "fp8",
    "W4A16_AWQ": "int4_awq",
    "W4A8_AWQ": "w4a8_awq",
    "NVFP4": "nvfp4",
}


def reference_precision(spec: Spec) -> Iterator[Finding]:
    """The rehearsal runs unquantized checkpoints."""
    if spec.target.resolved != "reference":
        return
    precision = spec.precision
    if precision.quant_algo or precision.from_checkpoint or precision.kv_cache:
        wish = f"precision={precision.name}"
        wish += f" with precision.kv_cache={precision.kv_cache.lower()}" if precision.kv_cache else ""
        yield Finding(
            "reference-precision",
            "error",
            "precision",
            f"the reference target cannot run {wish} yet; it runs {' and '.join(REFERENCE_PRECISIONS)} with "
            "precision.kv_cache=auto",
            "precision=bf16, or plan for a GPU: hardware=h100_80g",
        )


def gpu_support(spec: Spec) -> Iterator[Finding]:
    """FP8 needs Ada, NVFP4 Blackwell; data-centre Blackwell refuses the integer methods."""
    algorithm, sm = spec.precision.quant_algo, spec.hardware.sm
    if spec.target.resolved == "reference" or algorithm is None or sm is None or precisions.generation(sm) is None:
        return
    verdict = precisions.support(algorithm, sm)
    if verdict == "yes":
        return
    working = [name for algo, name in _OPTIONS.items() if precisions.support(algo, sm) == "yes"]
    place = f"{spec.hardware.gpu} (SM {sm}, {precisions.generation(sm)})"
    if verdict == "no":
        needs = [
            name
            for name, answer in zip(precisions.GENERATIONS, precisions.ALGORITHMS[algorithm].support, strict=True)
            if answer == "yes"
        ]
        message = f"precision={spec.precision.name} does not run on {place}; it needs {' or '.join(needs)}"
        hint = f"works there: precision=bf16, fp16{''.join(', ' + name for name in working)}"
        yield Finding("precision-gpu", "error", "precision", message, hint)
    else:
        message = f"nothing is published about precision={spec.precision.name} on {place}"
        yield Finding("precision-gpu-unverified", "warning", "precision", message, "try it on one GPU first")


def kv_cache_gpu(spec: Spec) -> Iterator[Finding]:
    """INT8 caches are refused on data-centre Blackwell; some algorithms take only some caches."""
    kv, algorithm, sm = spec.precision.kv_cache, spec.precision.quant_algo, spec.hardware.sm
    if kv is None or spec.target.resolved == "reference":
        return
    if algorithm is not None and kv not in precisions.ALGORITHMS[algorithm].kv_cache:
        yield Finding(
            "kv-cache-precision",
            "error",
            "precision.kv_cache",
            f"precision={spec.precision.name} does not go with a {kv} cache",
            "precision.kv_cache=auto or fp8",
        )
    if kv == "INT8" and sm is not None and 100 <= sm < 120:
        yield Finding(
            "kv-cache-gpu",
            "error",
            "precision.kv_cache",
            f"the builder refuses an INT8 cache on {spec.hardware.gpu} (SM {sm})",
            "precision.kv_cache=fp8",
        )


def kv_cache_attention(spec: Spec) -> Iterator[Finding]:
    """Say what upstream changes silently: paged context attention, and with it cache reuse and chunked context."""
    kv, algorithm, sm = spec.precision.kv_cache, spec.precision.quant_algo, spec.hardware.sm
    if spec.target.resolved != "engine":
        return
    has_fp8_weights = algorithm in precisions.FP8_FAMILY
    if kv == "INT8" or (kv == "FP8" and (not has_fp8_weights or (sm is not None and sm < 89))):
        why = "an INT8 cache" if kv == "INT8" else "an FP8 cache without FP8 weights on SM 89 or newer"
        yield Finding(
            "paged-context-off",
            "warning",
            "precision.kv_cache",
            f"{why} makes the builder turn paged context attention off: no cache reuse, no chunked context",
            "precision.kv_cache=auto keeps both",
        )
    if algorithm == "FP8" and kv is None:
        yield Finding(
            "fp8-cache-unused",
            "info",
            "precision.kv_cache",
            "FP8 weights with a 16-bit cache: the builder turns FP8 context attention off",
            "precision.kv_cache=fp8 halves the cache and keeps it on",
        )


RULES = (reference_precision, gpu_support, kv_cache_gpu, kv_cache_attention)
