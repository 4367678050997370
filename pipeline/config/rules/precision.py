"""Rules about precision and KV cache: what a GPU can run, what the builder refuses or turns off."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.config.spec import Spec
from pipeline.errors import Finding
from pipeline.facts import precisions

# Option names by algorithm, for advice.
_OPTIONS = {
    "W8A16": "int8",
    "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN": "smoothquant",
    "FP8": "fp8",
    "W4A16_AWQ": "int4_awq",
    "W4A8_AWQ": "w4a8_awq",
    "NVFP4": "nvfp4",
}


def native_precision(spec: Spec) -> Iterator[Finding]:
    """The converter of this project quantizes some schemes for some families."""
    if spec.converter.resolved != "native":
        return
    precision, family = spec.precision, spec.model.family
    if precision.from_checkpoint:
        published = spec.model.quantization
        if published is not None and published.kind in precisions.UNREAD_SOURCES:
            message = f"precision=from_checkpoint: the native converter does not read {published.kind} sources"
            yield Finding("native-precision", "error", "precision", message, "start from the unquantized model")
        return
    wishes = [("precision", f"precision={precision.name}", precisions.native_families(precision.quant_algo))]
    if precision.kv_cache:
        name = precision.kv_cache.lower()
        wishes.append(("precision.kv_cache", f"precision.kv_cache={name}", precisions.NATIVE_KV_CACHE))
    for path, wish, families in wishes:
        if families and family and family not in families:
            message = f"the native converter does not do {wish} for {family} models; it does for {', '.join(families)}"
            yield Finding("native-precision", "error", path, message, "precision=bf16 precision.kv_cache=auto")
    if precision.quantize_lm_head:
        message = "the native converter leaves the head in 16 bits"
        yield Finding("native-precision", "error", "precision.quantize_lm_head", message, "quantize_lm_head=false")


def modelopt(spec: Spec) -> Iterator[Finding]:
    """ModelOpt quantizes Hugging Face folders, in an environment of its own."""
    if spec.converter.resolved != "modelopt":
        return
    problems = []
    if spec.precision.quant_algo not in precisions.MODELOPT or spec.precision.from_checkpoint:
        names = ", ".join(sorted(set(precisions.MODELOPT.values())))
        problems.append(("precision", f"converter=modelopt does not make precision={spec.precision.name}", names))
    if spec.precision.kv_cache == "INT8":
        problems.append(("precision.kv_cache", "converter=modelopt writes no INT8 cache", "precision.kv_cache=fp8"))
    if spec.source.kind == "wheel" or spec.source.path.endswith(".gguf"):
        problems.append(("converter", "converter=modelopt does not read GGUF", "converter=native"))
    if spec.calibration is not None and not spec.calibration.modelopt_python:
        message = "converter=modelopt needs calibration.modelopt_python, an interpreter that has ModelOpt"
        problems.append(("calibration.modelopt_python", message, "make modelopt, then .venv-modelopt/bin/python"))
    for path, message, hint in problems:
        yield Finding("modelopt", "error", path, message, hint)


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


RULES = (native_precision, modelopt, gpu_support, kv_cache_gpu)
