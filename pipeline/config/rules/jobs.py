"""Rules about the job as a whole: target, release, policy, source, ports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.config.spec import Spec
from pipeline.errors import Finding
from pipeline.facts import releases
from pipeline.logs import has_secret


def no_secrets(spec: Spec) -> Iterator[Finding]:
    """What is written here goes into manifests, records and the names of folders."""
    for path, text in _texts(spec.as_dict(), ""):
        if has_secret(text):
            yield Finding(
                "secret-in-configuration",
                "error",
                path,
                f"{path} holds what looks like a token or password; it would be kept in manifests and records",
                "give tokens by environment variable (HF_TOKEN), never as part of a name, path or URL",
            )


def _texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _texts(item, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item, path)
    elif isinstance(value, str):
        yield path, value


def engine_release(spec: Spec) -> Iterator[Finding]:
    """The engine builder was removed upstream; ``latest`` is whatever comes next."""
    chain = spec.toolchain
    if spec.target.resolved != "engine" or (chain.builds_engines and releases.has_engine_builder(chain.release)):
        if spec.target.resolved == "engine" and releases.is_at_least(chain.release, releases.FIRST_DEPRECATED):
            yield Finding(
                "release-deprecated",
                "warning",
                "toolchain",
                f"TensorRT-LLM {chain.release} announces the end of the engine builder",
                "toolchain=trtllm_1_2_1",
            )
        return
    yield Finding(
        "release-without-engines",
        "error",
        "toolchain",
        f"TensorRT-LLM {chain.release} cannot build engines: upstream removed the engine builder in "
        f"{releases.FIRST_WITHOUT_ENGINES}; the last stable release that has it is {releases.LAST_ENGINE_RELEASE}",
        "pin toolchain=trtllm_1_2_1, or use target=llmapi",
    )


def llmapi_release(spec: Spec) -> Iterator[Finding]:
    """The LLM API reads packaged checkpoints from 1.0 on."""
    if spec.target.resolved == "llmapi" and not releases.is_at_least(spec.toolchain.release, "1.0.0"):
        yield Finding(
            "release-without-llmapi",
            "error",
            "toolchain",
            f"target=llmapi needs TensorRT-LLM 1.0.0 or newer, not {spec.toolchain.release}",
            "toolchain=trtllm_1_2_1, or target=engine",
        )


def engine_hardware(spec: Spec) -> Iterator[Finding]:
    """An engine belongs to one GPU type, so that type must be known."""
    if spec.target.resolved == "reference" or spec.hardware.is_gpu:
        return
    why = "hardware=cpu" if spec.hardware.requested == "cpu" else "no GPU was found and none is named"
    yield Finding(
        "target-needs-gpu",
        "error",
        "hardware",
        f"target={spec.target.resolved} is made for one GPU type, but {why}",
        "name the GPU (hardware=h100_80g), or rehearse with target=reference",
    )


def gpu_generation(spec: Spec) -> Iterator[Finding]:
    """Releases since 0.16 support Ampere and newer."""
    sm = spec.hardware.sm
    if spec.target.resolved != "reference" and sm is not None and sm < 80:
        yield Finding(
            "gpu-too-old",
            "error",
            "hardware",
            f"{spec.hardware.gpu} is SM {sm}; TensorRT-LLM {spec.toolchain.release} needs SM 80 or newer",
            "use an Ampere or newer GPU, or target=reference",
        )


def driver_version(spec: Spec) -> Iterator[Finding]:
    """Data-centre GPUs may run older branches through CUDA forward compatibility, so this only warns."""
    found, least = _numbers(spec.hardware.driver), _numbers(spec.toolchain.driver_min)
    if spec.target.resolved != "reference" and found and least and found < least:
        yield Finding(
            "driver-old",
            "warning",
            "toolchain",
            f"driver {spec.hardware.driver} is older than {spec.toolchain.driver_min}, the oldest NVIDIA lists for "
            f"TensorRT-LLM {spec.toolchain.release} (CUDA {spec.toolchain.cuda})",
            "update the driver, rely on CUDA forward compatibility, or take toolchain=trtllm_1_0_0 (R575)",
        )


def policy(spec: Spec) -> Iterator[Finding]:
    """A team may want the target named, and no rehearsal shipped."""
    if spec.target.requested == "auto" and not spec.policy.allow_auto_target:
        yield Finding(
            "policy-auto-target",
            "error",
            "target",
            f"policy={spec.policy.name} wants the target named; auto came to {spec.target.resolved} "
            f"because {spec.target.reason}",
            "target=engine or target=llmapi",
        )
    if spec.target.resolved == "reference" and not spec.policy.allow_reference:
        yield Finding(
            "policy-reference",
            "error",
            "target",
            f"policy={spec.policy.name} refuses the CPU rehearsal (target=reference) as a result",
            "target=engine or target=llmapi with a GPU",
        )


def source(spec: Spec) -> Iterator[Finding]:
    """Weights have to come from somewhere."""
    where = spec.source
    if where.kind == "local" and not where.path:
        yield Finding("source-path", "error", "model.path", "source=local without a path", "model.path=/data/model")
    elif where.kind == "local":
        try:
            problem = "" if Path(where.path).exists() else "does not exist"
        except OSError as error:  # a folder above it that this user may not enter
            problem = f"cannot be looked at: {error.strerror}"
        if problem:
            yield Finding("source-path", "error", "model.path", f"{where.path} {problem}", "check model.path")
    if where.kind == "hub" and not where.id:
        hint = "model.id=org/name, or model.path=/data/model"
        yield Finding("source-id", "error", "model.id", "no model is named", hint)
    if where.kind == "wheel" and where.wheel is None:
        message = f"model={spec.model.name} does not come in a wheel"
        yield Finding("source-wheel", "error", "source", message, "source=hub, or model=smollm2")
    if where.kind == "hub" and spec.model.gated:
        yield Finding(
            "source-gated",
            "info",
            "model",
            f"the hub hands out {where.id} only to accounts that accepted its terms",
            f"accept them at https://huggingface.co/{where.id} and set HF_TOKEN",
        )


def shape(spec: Spec) -> Iterator[Finding]:
    """Without a shape most rules have nothing to check."""
    if spec.model.architecture is None and (spec.source.path or spec.source.id):
        origin = spec.source.path or spec.source.id
        yield Finding(
            "model-shape-unknown",
            "warning",
            "model",
            f"no config.json of {origin} could be read, so size, divisibility and memory are not checked",
            "the fetch stage reads it; or choose a model option that carries the shape",
        )


def converter(spec: Spec) -> Iterator[Finding]:
    """NVIDIA's scripts run in its container, for GPU targets, on Hugging Face checkpoints."""
    if spec.converter.resolved != "nvidia":
        return
    is_gguf = spec.source.kind == "wheel" or spec.source.path.endswith(".gguf")
    if spec.target.resolved == "reference" or is_gguf:
        why = "does not read GGUF" if is_gguf else "needs NVIDIA's container; the reference target runs without it"
        yield Finding("converter", "error", "converter", f"converter=nvidia {why}", "converter=native")


def ports(spec: Spec) -> Iterator[Finding]:
    """Two servers cannot share a port."""
    taken: dict[int, str] = {}
    for path, port in (
        ("frontend.port", spec.frontend.port),
        ("triton.http_port", spec.triton.http_port),
        ("triton.grpc_port", spec.triton.grpc_port),
        ("triton.metrics_port", spec.triton.metrics_port),
    ):
        if port in taken:
            message = f"{path}={port} is also {taken[port]}"
            yield Finding("port-twice", "error", path, message, f"give {path} a port of its own")
        taken.setdefault(port, path)


def gate(spec: Spec) -> Iterator[Finding]:
    """Windows must overlap or touch, and a window cannot be longer than a sequence may be."""
    if spec.gate.stride >= spec.gate.window:
        message = f"gate.stride={spec.gate.stride} must be below gate.window={spec.gate.window}"
        yield Finding("gate-stride", "error", "gate.stride", message, f"gate.stride={spec.gate.window // 2}")
    if spec.gate.window > spec.limits.max_seq_len:
        yield Finding(
            "gate-window",
            "error",
            "gate.window",
            f"gate.window={spec.gate.window} is longer than limits.max_seq_len={spec.limits.max_seq_len}",
            f"gate.window={spec.limits.max_seq_len} gate.stride={max(1, spec.limits.max_seq_len // 2)}",
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


RULES = (
    no_secrets,
    engine_release,
    llmapi_release,
    engine_hardware,
    gpu_generation,
    driver_version,
    policy,
    source,
    shape,
    converter,
    ports,
    gate,
)
