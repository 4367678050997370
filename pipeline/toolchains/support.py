"""What works where: precision × model family × GPU, from the published matrix and the builder's own guards."""

from __future__ import annotations

from pipeline.errors import Finding
from pipeline.toolchains.job import Family, ToolJob
from pipeline.toolchains.release import Release, data, version_key

OLDEST_SM = 80


def gpu_class(sm: int) -> str:
    """Return the GPU generation of a compute capability; empty when the matrix does not list it."""
    return next((name for name, listed in data("support")["gpus"].items() if sm in listed), "")


def algorithm_support(algorithm: str, sm: int) -> str:
    """Return ``yes``, ``no`` or ``unverified`` for a quantization algorithm on a GPU."""
    facts = data("support")["algorithms"].get(algorithm)
    return str(facts["gpus"].get(gpu_class(sm), "unverified")) if facts else "unverified"


def kv_cache_support(kv_cache: str, sm: int) -> str:
    """Return ``yes``, ``no`` or ``unverified`` for a KV cache type on a GPU."""
    if kv_cache == "auto":
        return "yes"
    return str(data("support")["kv_cache"][kv_cache]["gpus"].get(gpu_class(sm), "unverified"))


def is_ticked(family: Family, algorithm: str, dtype: str) -> bool:
    """Say whether the published matrix ticks a model at an algorithm.

    Algorithms without a column (row-wise FP8, W4A8) count as ticked, and so do 16-bit weights of models without a line.
    """
    matrix = data("support")["models"]
    column = data("support")["algorithms"].get(algorithm, {}).get("column", "")
    if algorithm == "none":
        column = {"float16": "FP16", "bfloat16": "BF16", "float32": "FP32"}.get(dtype, "FP16")
    if not column or (not family.row and algorithm == "none"):
        return True
    return column in matrix["rows"].get(family.row, ())


def check_support(job: ToolJob, family: Family, release: Release, algorithm: str) -> list[Finding]:
    """Collect what the matrix says about a job: errors for no, warnings for what nobody states."""
    return [
        *_family(family, release),
        *_transformers(family, release),
        *_algorithm(job, family, algorithm),
        *(_gpu(job, job.sm, release, algorithm) if job.sm is not None else []),
    ]


def _family(family: Family, release: Release) -> list[Finding]:
    if family.since and not release.at_least(family.since):
        message = f"{family.name} has no engine class in release {release.version}; it came with {family.since}"
        hint = f"use a toolchain from {family.since} on"
        return [Finding("family-newer-than-release", "error", "toolchain", message, hint)]
    if family.unverified_before and not release.at_least(family.unverified_before):
        message = f"{family.name}: nothing states that release {release.version} has it; {family.unverified_before} has"
        return [Finding("family-unverified", "warning", "toolchain", message)]
    return []


def _transformers(family: Family, release: Release) -> list[Finding]:
    """A bundled transformers that is older than the model fails while it loads the config."""
    bundled = release.document["versions"].get("transformers")
    if family.since and not release.at_least(family.since):
        return []  # an error says so already
    if not family.transformers or not bundled or version_key(bundled) >= version_key(family.transformers):
        return []
    message = f"release {release.version} bundles transformers {bundled}; {family.name} came with {family.transformers}"
    return [Finding("transformers-old", "warning", "toolchain", message, "use a newer toolchain, or target=llmapi")]


def _algorithm(job: ToolJob, family: Family, algorithm: str) -> list[Finding]:
    facts = data("support")["algorithms"].get(algorithm)
    if facts is None:
        return []
    if not facts["engine"]:
        message = f"{algorithm} ({facts['summary']}) does not exist for engines"
        return [Finding("precision-not-for-engines", "error", "precision", message, "target=llmapi")]
    findings = []
    only = facts.get("families")
    if only and family.name not in only:
        message = f"{algorithm} engines exist for {' and '.join(only)} only, the model is {family.name}"
        findings.append(Finding("precision-family", "error", "precision", message, "precision=fp8, or target=llmapi"))
    elif not is_ticked(family, algorithm, job.dtype):
        model = family.row or family.name
        message = f"upstream's matrix does not tick {algorithm} for {model}, though the tools take it"
        findings.append(Finding("precision-unverified", "warning", "precision", message, "let the gate decide"))
    kv = "none" if job.kv_cache == "auto" else job.kv_cache
    if kv not in facts["kv_cache"]:
        message = f"an {kv} KV cache is not listed for {algorithm}; listed: {', '.join(facts['kv_cache'])}"
        hint = "precision.kv_cache=auto"
        findings.append(Finding("kv-cache-precision", "error", "precision.kv_cache", message, hint))
    return findings


def _gpu(job: ToolJob, sm: int, release: Release, algorithm: str) -> list[Finding]:
    if sm < OLDEST_SM:
        message = f"SM {sm} is too old for TensorRT-LLM {release.version}: it needs SM {OLDEST_SM} or newer"
        hint = "use an Ampere or newer GPU, or target=reference"
        return [Finding("gpu-too-old", "error", "hardware", message, hint)]
    if not gpu_class(sm):
        message = f"SM {sm} is not in upstream's matrix; listed: {', '.join(str(s) for s in _listed())}"
        return [Finding("gpu-unlisted", "warning", "hardware", message)]
    since = data("support")["sm_since"].get(str(sm))
    findings = []
    if since and version_key(release.version) < version_key(since):
        message = f"release {release.version} does not know SM {sm}; support came with {since}"
        hint = f"use a toolchain from {since} on"
        findings.append(Finding("gpu-newer-than-release", "error", "toolchain", message, hint))
    for rule, path, what, answer in (
        ("precision-gpu", "precision", algorithm, algorithm_support(algorithm, sm)),
        ("kv-cache-gpu", "precision.kv_cache", f"an {job.kv_cache} KV cache", kv_cache_support(job.kv_cache, sm)),
    ):
        if answer == "no":
            works = f"what works on SM {sm}: {', '.join(_works(sm))}"
            hint = works if rule == "precision-gpu" else "precision.kv_cache=auto"
            message = f"{what} does not work on SM {sm} in the engine backend"
            findings.append(Finding(rule, "error", path, message, hint))
        elif answer == "unverified":
            message = f"nothing states whether {what} works on SM {sm}"
            findings.append(Finding(f"{rule}-unverified", "warning", path, message, "let the gate decide"))
    return findings


def _listed() -> list[int]:
    return sorted(sm for listed in data("support")["gpus"].values() for sm in listed)


def _works(sm: int) -> list[str]:
    names = {"fp16": "none", "int8": "W8A16", "int4_awq": "W4A16_AWQ", "fp8": "FP8", "nvfp4": "NVFP4"}
    return [name for name, algorithm in names.items() if algorithm_support(algorithm, sm) == "yes"]
