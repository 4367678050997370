"""Whether a ``tensorrt_llm`` config fits the engine beside it: used before emitting, and on what was emitted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from pipeline.errors import Finding, PipelineError
from pipeline.triton.engine_backend import engine_backend
from pipeline.triton.engine_facts import EngineFacts
from pipeline.triton.engine_models import instance_ids
from pipeline.triton.engine_serving import ENGINE_ONLY
from pipeline.triton.model_config import ModelConfig, datatype_name, parameters_of

Findings = Iterator[Finding]

# A decoding mode that the engine was not built for fails at load, or drafts are never used.
_MODES: Mapping[str, str] = {
    "medusa": "medusa",
    "lookahead_decoding": "lookahead",
    "explicit_draft_tokens": "redrafter",
    "eagle": "eagle",
}
_LOOKAHEAD = ("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size")
# What the emitter writes besides the backend's own.
_OWN = frozenset({"repository_layout"})


def engine_findings(config: ModelConfig, facts: EngineFacts, folder: Path) -> list[Finding]:
    """Return what does not fit.

    Args:
        config: Of the model.
        facts: Of the engine.
        folder: The engine's folder, whose files are counted.
    """
    found = [finding for check in _CHECKS for finding in check(config, facts)]
    return found + list(_check_files(config.name, facts, folder))


def draft_findings(target: EngineFacts, draft: EngineFacts, *, draft_tokens: int, use_logits: bool) -> list[Finding]:
    """Return what keeps two engines from working together."""
    wanted = "draft_tokens_external"
    checks = (
        (
            target.speculative == wanted,
            f"the engine was built for speculative decoding {target.speculative!r}, a draft engine needs {wanted!r}",
        ),
        (
            draft_tokens <= target.max_draft_len,
            f"{draft_tokens} draft tokens are asked for, the engine takes {target.max_draft_len}",
        ),
        (
            draft.vocab_size == target.vocab_size,
            f"the draft's vocabulary has {draft.vocab_size} ids, the engine's {target.vocab_size}",
        ),
        (
            draft.release == target.release,
            f"the draft was built by TensorRT-LLM {draft.release}, the engine by {target.release}",
        ),
        (
            draft.generation_logits or not use_logits,
            "use_draft_logits is set, but the draft engine was built without gather_generation_logits",
        ),
    )
    hint = "build the two engines as a pair"
    return [Finding("draft-engine", "error", "draft", problem, hint) for is_well, problem in checks if not is_well]


def sharing_findings(configs: Mapping[str, ModelConfig]) -> list[Finding]:
    """Return what is wrong where engines of one server share a GPU.

    Args:
        configs: Of all engine models of a repository by name.
    """
    users: dict[int, list[str]] = {}
    for name, config in configs.items():
        try:
            groups = instance_ids(config)
        except ValueError:  # a finding of the model itself
            continue
        for gpu in {gpu for group in groups for gpu in group}:
            users.setdefault(gpu, []).append(name)
    found = {}
    for gpu, names in users.items():
        unbounded = [name for name in names if "max_tokens_in_paged_kv_cache" not in parameters_of(configs[name])]
        if len(names) > 1 and unbounded:
            message = (
                f"{' and '.join(names)} share GPU {gpu} of the server, but the cache of {unbounded[0]} has no bound"
            )
            hint = "set kv_cache.max_tokens of each, or give them GPUs of their own"
            found[unbounded[0]] = Finding("shared-gpu", "error", unbounded[0], message, hint)
    return list(found.values())


def _check_limits(config: ModelConfig, facts: EngineFacts) -> Findings:
    parameters = parameters_of(config)
    limits = {
        "max_batch_size": (config.max_batch_size, facts.max_batch_size),
        "max_beam_width": (_number(parameters, "max_beam_width"), facts.max_beam_width),
    }
    for name, (served, built) in limits.items():
        if served is not None and served > built:
            yield _error("engine-limits", name, f"{name} is {served}, the engine was built for {built}")
    windows = parameters.get("max_attention_window_size", "")
    largest = max((int(part) for part in windows.split(",") if part.isdecimal()), default=0)
    if largest > facts.max_seq_len:
        message = f"max_attention_window_size is {largest}, the engine was built for max_seq_len {facts.max_seq_len}"
        yield _error("engine-limits", "max_attention_window_size", message)


def _check_abilities(config: ModelConfig, facts: EngineFacts) -> Findings:
    parameters = parameters_of(config)
    strategy = parameters.get("gpt_model_type", "")
    if strategy.startswith("inflight") and facts.kv_cache != "paged":
        message = f"gpt_model_type {strategy} needs a paged KV cache, the engine was built with {facts.kv_cache!r}"
        yield _error("engine-ability", "gpt_model_type", message)
    for name in ("enable_kv_cache_reuse", "enable_chunked_context"):
        if parameters.get(name) == "true" and not facts.paged_context_fmha:
            message = f"{name} is true, the engine was built without use_paged_context_fmha"
            yield _error("engine-ability", name, message)
    if "gpu_weights_percent" in parameters and not facts.weight_streaming:
        message = f"gpu_weights_percent is {parameters['gpu_weights_percent']}, the engine has no weight streaming"
        yield _error("engine-ability", "gpu_weights_percent", message)
    if parameters.get("lora_prefetch_dir") and not facts.lora:
        message = "lora_prefetch_dir is set, the engine was built without the LoRA plugin"
        yield _error("engine-ability", "lora_prefetch_dir", message)


def _check_decoding(config: ModelConfig, facts: EngineFacts) -> Findings:
    parameters = parameters_of(config)
    mode, needed = parameters.get("decoding_mode", ""), _MODES.get(facts.speculative)
    if needed is not None and mode != needed:
        message = f"decoding_mode is {mode!r}, the engine was built for {facts.speculative}: {needed!r}"
        yield _error("decoding-mode", "decoding_mode", message)
    elif needed is None and mode in _MODES.values():
        message = f"decoding_mode is {mode!r}, the engine was built for speculative decoding {facts.speculative!r}"
        yield _error("decoding-mode", "decoding_mode", message)
    if mode in ("top_k", "top_p"):
        message = f"decoding_mode is {mode!r}: requests that sample in the other way get nothing useful"
        yield Finding("decoding-mode", "warning", "decoding_mode", message, "leave it out, or use top_k_top_p")
    if mode == "lookahead":
        missing = [name for name in _LOOKAHEAD if name not in parameters]
        if missing:
            yield _error("decoding-mode", "decoding_mode", f"decoding_mode is 'lookahead', but {missing[0]} is not set")
    if parameters.get("speculative_decoding_fast_logits") == "true":
        message = (
            "speculative_decoding_fast_logits needs ranks that are started beforehand; the launch does not do that"
        )
        yield _error("decoding-mode", "speculative_decoding_fast_logits", message)


def _check_parameters(config: ModelConfig, facts: EngineFacts) -> Findings:
    try:
        backend = engine_backend(facts.release, logits=facts.logits, prompt_table=facts.dtype)
    except PipelineError as error:
        yield _error("engine-release", "version", error.message)
        return
    parameters = parameters_of(config)
    for name in sorted(parameters.keys() - backend.parameters - _OWN):
        if name in ENGINE_ONLY:
            message = f"{name} is a build-time option; here it has no effect"
            yield Finding("engine-only-option", "error", name, message, f"set {ENGINE_ONLY[name]} and build again")
        else:
            yield _error("unknown-parameter", name, f"the backend of {facts.release} has no parameter {name}")
    for name in sorted(backend.must_exist - parameters.keys()):
        yield _error("missing-parameter", name, f"the backend of {facts.release} does not load without the key {name}")
    yield from _check_tensors(config, facts)


def _check_tensors(config: ModelConfig, facts: EngineFacts) -> Findings:
    backend = engine_backend(facts.release, logits=facts.logits, prompt_table=facts.dtype)
    for kind, found, known in (("input", config.input, backend.inputs), ("output", config.output, backend.outputs)):
        types = {tensor.name: f"TYPE_{tensor.datatype}" for tensor in known}
        for tensor in found:
            wanted = types.get(tensor.name)
            if wanted is None:
                message = f"the backend of {facts.release} knows no {kind} {tensor.name}"
                yield _error("engine-tensor", tensor.name, message)
            elif wanted != datatype_name(tensor.data_type):
                is_type = datatype_name(tensor.data_type)
                yield _error(
                    "engine-tensor", tensor.name, f"{kind} {tensor.name} is {is_type}, the engine's is {wanted}"
                )
        missing = sorted({tensor.name for tensor in known if not tensor.optional} - {tensor.name for tensor in found})
        if kind == "input" and missing:
            yield _error("engine-tensor", missing[0], f"the required input {missing[0]} is missing")
    names = {tensor.name for tensor in config.input}
    if "return_context_logits" in names and not facts.context_logits:
        message = "clients may ask for return_context_logits, the engine was built without gather_context_logits"
        yield _error("engine-tensor", "return_context_logits", message)


def _check_placement(config: ModelConfig, facts: EngineFacts) -> Findings:
    if any(group.gpus for group in config.instance_group):
        message = "instance_group names GPUs, which this backend ignores; every instance would load on the first GPU"
        yield _error("placement", "instance_group", message)
    count = sum(group.count for group in config.instance_group)
    nodes = _number(parameters_of(config), "num_nodes") or 1
    try:
        groups = instance_ids(config)
    except ValueError:
        yield _error("placement", "gpu_device_ids", "gpu_device_ids is no list of numbers")
        return
    if groups and len(groups) != count:
        message = f"{count} instance(s), but gpu_device_ids has {len(groups)} group(s)"
        yield _error("placement", "gpu_device_ids", message)
    used = [gpu for group in groups for gpu in group]
    if len(set(used)) < len(used):
        yield _error("placement", "gpu_device_ids", "two instances share a GPU in gpu_device_ids")
    for group in groups:
        if len(group) * nodes != facts.world_size:
            message = f"gpu_device_ids gives {len(group)} GPU(s) to an engine of {facts.world_size} rank(s)"
            yield _error("world-size", "gpu_device_ids", message)


def _check_files(name: str, facts: EngineFacts, folder: Path) -> Findings:
    """Count the ranks. What the emitter makes itself is not there yet when it asks."""
    for rank in range(facts.world_size):
        path = folder / f"rank{rank}.engine"
        if not path.is_file():
            message = f"{path.name} is missing; the engine has {facts.world_size} rank(s)"
            yield _error("engine-files", f"{name}/1/{path.name}", message)
        elif path.stat().st_size == 0:
            yield _error("engine-files", f"{name}/1/{path.name}", f"{path.name} is empty")
    wanted = {f"rank{rank}.engine" for rank in range(facts.world_size)}
    for path in sorted(folder.glob("rank*.engine")):
        if path.name not in wanted:
            message = f"{path.name} belongs to no rank; the engine has {facts.world_size}"
            yield _error("engine-files", f"{name}/1/{path.name}", message)


_CHECKS: tuple[Callable[[ModelConfig, EngineFacts], Findings], ...] = (
    _check_limits,
    _check_abilities,
    _check_decoding,
    _check_parameters,
    _check_placement,
)


def _number(parameters: Mapping[str, str], name: str) -> int | None:
    value = parameters.get(name, "")
    return int(value) if value.isdecimal() else None


def _error(rule: str, path: str, message: str) -> Finding:
    return Finding(rule, "error", path, message, "lower the setting, or build the engine again")
