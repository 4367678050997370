"""From a composed configuration to the frozen job: every ``auto`` decided, every default filled in.

Nothing is judged here; whether the result can work is for ``rules.py``. Only contradictions and values that no Spec can
hold are errors.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.config import engine_parts, machine, resolve_engine, schema, serving_parts, sizing, spec
from pipeline.config.compose import Composed, config_error
from pipeline.errors import ConfigError, Finding, SourceError
from pipeline.facts import hfconfig, memory
from pipeline.facts.architecture import Architecture
from pipeline.facts.published import SourceQuantization, source_quantization

# Most sequences that a derived batch size allows for; more is a decision.
GPU_BATCH_MAX = 64
REFERENCE_BATCH = 16
# As trtllm-build when a model does not say.
FALLBACK_CONTEXT = 2048


def resolve(composed: Composed) -> spec.Spec:
    """Return the frozen job.

    Raises:
        ConfigError: The configuration contradicts itself.
        SourceError: The hub refuses the model.
    """
    config = composed.config
    source = _source(config)
    shape, family, published = _shape(config, source)
    hardware = _hardware(composed)
    target = _target(config, hardware)
    parallel = spec.Parallel(**_values(config.parallel))
    precision_name = composed.choices["precision"]
    precision = resolve_engine.precision(config.precision, precision_name, published, shape, parallel.tp)
    speculative = resolve_engine.speculative(config.speculative)
    model_name = _model_name(composed, source)
    name = config.name or f"{model_name}-{precision.name}-{target.resolved}"
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        message = f"name={name!r} must be one word of letters, digits, '.', '_' and '-', of 100 characters at most"
        raise _contradiction("name", message)
    if not config.store.root.strip():
        raise _contradiction("store.root", "store.root is empty; expected a folder")
    if not config.frontend.host.strip():
        raise _contradiction("frontend.host", "frontend.host is empty; 0.0.0.0 listens to everybody")
    return spec.Spec(
        name=name,
        output_dir=str(_absolute(config.output_dir or f"dist/{name}")),
        model=spec.Model(model_name, family, shape, config.model.license, config.model.gated, published),
        source=source,
        precision=precision,
        limits=_limits(config, shape, precision, parallel, target, hardware, speculative),
        parallel=parallel,
        target=target,
        converter=_converter(config, source, target),
        calibration=resolve_engine.calibration(config.calibration, precision),
        build=resolve_engine.build(config.build),
        speculative=speculative,
        lora=resolve_engine.lora(config.lora),
        hardware=hardware,
        toolchain=_toolchain(composed),
        gate=spec.Gate(name=composed.choices["gate"], **_values(config.gate)),
        frontend=_frontend(config.frontend),
        triton=serving_parts.Triton(**_values(config.triton)),
        runner=_runner(config.runner, target),
        store=spec.Store(str(_absolute(config.store.root))),
        policy=spec.Policy(name=composed.choices["policy"], **_values(config.policy)),
    )


def _frontend(config: schema.FrontendConfig) -> serving_parts.Frontend:
    values = {**_values(config), "triton": tuple(config.triton), "aliases": tuple(config.aliases)}
    for name, task_id in config.lora.items():
        if isinstance(task_id, bool) or not isinstance(task_id, int) or task_id < 0:
            raise _contradiction(
                f"frontend.lora.{name}", f"frontend.lora.{name}={task_id!r} must be a task id, 0 or more"
            )
    values["lora"] = dict(config.lora)
    values["lora_weights"] = {name: str(_absolute(str(folder))) for name, folder in config.lora_weights.items()}
    for name in ("chat_template", "api_keys_file"):
        values[name] = str(_absolute(values[name])) if values[name] else ""
    return serving_parts.Frontend(**values)


def _source(config: schema.Config) -> spec.Source:
    model, kind = config.model, config.source.kind
    path = model.path or (model.id if _names_a_file(model.id) else "")
    if kind == "auto":
        kind = "local" if path else "wheel" if model.wheel else "hub"
    if kind != "local" and path:
        raise _contradiction("source", f"source={kind} and the local path {path!r} exclude each other")
    wheel = spec.Wheel(**_values(model.wheel)) if kind == "wheel" and model.wheel else None
    return spec.Source(
        kind=kind,
        id="" if kind == "local" else model.id,
        revision=model.revision if kind == "hub" else "",
        path=str(_absolute(path)) if path else "",
        wheel=wheel,
    )


def _names_a_file(model_id: str) -> bool:
    return model_id.startswith(("/", "./", "../", "~")) or (model_id.endswith(".gguf") and Path(model_id).is_file())


def _shape(config: schema.Config, source: spec.Source) -> tuple[Architecture | None, str, SourceQuantization | None]:
    """Return shape, family and how the weights are quantized.

    A local source is asked first, then the model's option, then the hub.
    """
    document: Mapping[str, Any] | None = None
    published = resolve_engine.published_quantization(config.model)
    if source.kind == "local":
        document = _local_config(Path(source.path))
    elif source.kind == "hub" and config.model.architecture is None and source.id:
        from pipeline.config.hub import read_hub_config

        document = read_hub_config(source.id, source.revision)
    if document is not None:
        try:
            shape = hfconfig.architecture_of(document)
        except hfconfig.NotADecoder as error:
            raise SourceError(f"config.json of {source.id or source.path}: {error}") from error
        family = config.model.family or hfconfig.FAMILIES.get(shape.architecture, "")
        return shape, family, published or source_quantization(document)
    if config.model.architecture is None:
        return None, config.model.family, published
    return Architecture(**_values(config.model.architecture)), config.model.family, published


def _local_config(path: Path) -> Mapping[str, Any] | None:
    file = path / "config.json"
    try:
        if not file.is_file():  # opening a pipe would wait for its other end
            return None
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None  # no folder, or a GGUF file; the fetch stage looks closer and says what is wrong
    return content if isinstance(content, dict) else None


def _model_name(composed: Composed, source: spec.Source) -> str:
    model, choice = composed.config.model, composed.choices["model"]
    if model.name:
        return model.name
    if choice != "hf":
        return choice.rpartition("/")[2]
    origin = Path(source.path).stem if source.kind == "local" else source.id.rpartition("/")[2]
    return re.sub(r"[^a-z0-9._]+", "-", origin.lower()).strip("-._") or "hf"


def _hardware(composed: Composed) -> spec.Hardware:
    config, name = composed.config.hardware, composed.choices["hardware"]
    host = machine.memory_bytes()
    if config.kind == "gpu":
        missing = [key for key in ("gpu", "sm", "memory_bytes") if not getattr(config, key)]
        if missing:
            raise _contradiction(f"hardware.{missing[0]}", f"hardware={name} is a GPU without {', '.join(missing)}")
        values = {key: value for key, value in _values(config).items() if key != "kind"}
        return spec.Hardware(requested=name, name=name, host_memory_bytes=host, driver="", **values)
    found = machine.find_gpu() if config.kind == "auto" else None
    if found is None:
        return spec.Hardware(name, "cpu", "", None, 0, host, 0, 0, "")
    option = _hardware_option(composed, found.name)
    return spec.Hardware(
        requested=name,
        name=option or re.sub(r"[^a-z0-9]+", "_", found.name.lower()).strip("_"),
        gpu=found.name,
        sm=found.sm,
        memory_bytes=found.memory_bytes,
        host_memory_bytes=host,
        count=found.count,
        bandwidth_bytes_per_s=0,
        driver=found.driver,
    )


def _hardware_option(composed: Composed, gpu: str) -> str | None:
    """Return the option that describes a GPU with this name."""
    for folder in composed.search_path:
        for file in sorted(folder.glob("hardware/*.yaml")):
            if f"gpu: {gpu}" in file.read_text(encoding="utf-8").splitlines():
                return file.stem
    return None


def _target(config: schema.Config, hardware: spec.Hardware) -> spec.Target:
    requested = config.target.kind
    resolved, reason = requested, f"target={requested} was asked for"
    if requested == "auto":
        resolved, reason = _automatic_target(hardware)
    tie = None
    if resolved == "engine":
        chain = config.toolchain
        tie = engine_parts.EngineTie(chain.release, chain.build_image, hardware.gpu, hardware.sm)
    return spec.Target(requested, resolved, reason, tie)


def _automatic_target(hardware: spec.Hardware) -> tuple[str, str]:
    if hardware.requested != "auto":
        if hardware.is_gpu:
            return "engine", f"hardware={hardware.requested} names a GPU"
        return "reference", f"hardware={hardware.requested} names no GPU"
    if not hardware.is_gpu:
        return "reference", "no GPU with a working driver was found"
    if hardware.sm is not None and hardware.sm < 80:
        return "reference", f"{hardware.gpu} (SM {hardware.sm}) is older than what TensorRT-LLM supports (SM 80)"
    engine = machine.container_engine()
    if engine is None:
        return "reference", f"{hardware.gpu} was found, but neither docker nor podman to run NVIDIA's container"
    return "engine", f"{hardware.gpu} and " + ("NVIDIA's image around us" if engine == "image" else engine)


def _converter(config: schema.Config, source: spec.Source, target: spec.Target) -> spec.Converter:
    requested = config.converter
    resolved, reason = requested, f"converter={requested} was asked for"
    if requested == "auto":
        if target.resolved == "reference":
            resolved, reason = "native", "the reference target converts on this machine"
        elif source.kind == "wheel" or source.path.endswith(".gguf"):
            resolved, reason = "native", "NVIDIA's scripts do not read GGUF"
        else:
            resolved, reason = "nvidia", "the release's own scripts, in its container"
    return spec.Converter(requested, resolved, reason, config.toolchain.release if resolved == "nvidia" else None)


def _toolchain(composed: Composed) -> spec.Toolchain:
    unused = ("tensorrt", "python")
    values = {key: value for key, value in _values(composed.config.toolchain).items() if key not in unused}
    return spec.Toolchain(name=composed.choices["toolchain"], **values)


def _runner(config: schema.RunnerConfig, target: spec.Target) -> spec.Runner:
    """Choose how commands run: the rehearsal needs no container, NVIDIA's tools do unless we are in their image."""
    kind = config.kind
    if kind == "auto":
        found = machine.container_engine() if target.resolved != "reference" else "image"
        kind = "local" if found == "image" else found or "docker"
    pairs = []
    for text in config.host_paths:
        here, equals, there = text.partition("=")
        if not (equals and here.startswith("/") and there.startswith("/")):
            message = f"runner.host_paths: {text!r} is no pair of absolute paths; expected /here=/there"
            raise _contradiction("runner.host_paths", message)
        pairs.append((here, there))
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in _values(config).items()}
    return spec.Runner(**{**values, "kind": kind, "host_paths": tuple(pairs)})


def _limits(
    config: schema.Config,
    shape: Architecture | None,
    precision: spec.Precision,
    parallel: spec.Parallel,
    target: spec.Target,
    hardware: spec.Hardware,
    speculative: engine_parts.Speculative | None,
) -> spec.Limits:
    """Fill in limits: the model's context, or what memory leaves of it; as many sequences as may be admitted.

    For the reference target they do not depend on the machine's memory, so that its keys are the same everywhere.
    """
    asked = config.limits
    context = shape.context if shape else FALLBACK_CONTEXT
    on_reference = target.resolved == "reference"
    seq_len = asked.max_seq_len or context
    batch = asked.max_batch_size or (REFERENCE_BATCH if on_reference else GPU_BATCH_MAX)
    if shape is not None and not on_reference and hardware.memory_bytes:
        layout = sizing.layout_of(precision, parallel, target.resolved)
        device = sizing.device_of(hardware.memory_bytes, target.resolved, config.toolchain.release)
        load = memory.Load(batch, seq_len, asked.max_num_tokens, asked.max_beam_width)
        if asked.max_seq_len is None:
            enlarged = sizing.speculated(load, speculative)
            extra = enlarged.max_seq_len - load.max_seq_len
            fitting = sizing.longest_fitting(shape, layout, enlarged, device)
            seq_len = fitting - extra if fitting and fitting > extra else seq_len
            load = dataclasses.replace(load, max_seq_len=seq_len)
        if asked.max_batch_size is None:
            enlarged = sizing.speculated(load, speculative)
            held = memory.budget(shape, layout, enlarged, device).max_concurrent_sequences
            batch = max(1, min(GPU_BATCH_MAX, int(held * asked.kv_overcommit)))
    return spec.Limits(
        max_batch_size=batch,
        max_input_len=asked.max_input_len or max(1, seq_len - 1),
        max_seq_len=seq_len,
        max_num_tokens=asked.max_num_tokens,
        max_beam_width=asked.max_beam_width,
        kv_overcommit=asked.kv_overcommit,
    )


def _values(part: Any) -> dict[str, Any]:
    return {item.name: getattr(part, item.name) for item in dataclasses.fields(part)}


def _absolute(path: str) -> Path:
    return Path(path).expanduser().absolute()


def _contradiction(path: str, message: str) -> ConfigError:
    return config_error([Finding("config-contradiction", "error", path, message)])
