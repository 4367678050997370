"""How an engine is served: every parameter of the tensorrtllm backend as a typed setting.

A field names the backend's parameter in its metadata. None (or an empty value) leaves the choice to what the engine
was built with, or the parameter out, as the field says. Nothing here repeats what the engine fixes: limits, split.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.errors import ConfigError, Finding
from pipeline.triton.placement import Placement

WORKER = "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker"
STRATEGIES = ("inflight_fused_batching", "inflight_batching", "V1")
POLICIES = ("guaranteed_no_evict", "max_utilization")
DECODING_MODES = ("top_k", "top_p", "top_k_top_p", "beam_search", "medusa", "redrafter", "lookahead", "eagle")

# Options people look for here although the builder fixes them, and where they are set.
ENGINE_ONLY: Mapping[str, str] = {
    "max_num_tokens": "limits.max_num_tokens",
    "max_seq_len": "limits.max_seq_len",
    "max_input_len": "limits.max_input_len",
    "max_batch_size": "limits.max_batch_size",
    "kv_cache_type": "build.flags.kv_cache_type",
    "paged_kv_cache": "build.flags.kv_cache_type",
    "tokens_per_block": "build.flags.tokens_per_block",
    "use_paged_context_fmha": "build.kv_reuse",
    "gather_context_logits": "build.flags.gather_context_logits",
    "gather_generation_logits": "build.flags.gather_generation_logits",
    "gather_all_token_logits": "build.flags.gather_all_token_logits",
    "max_draft_len": "speculative.max_draft_len",
    "speculative_decoding_mode": "speculative",
    "weight_streaming": "build.weight_streaming",
    "lora_target_modules": "lora.target_modules",
    "max_lora_rank": "lora.max_rank",
    "tp": "parallel.tp",
    "tp_size": "parallel.tp",
    "pp": "parallel.pp",
    "pp_size": "parallel.pp",
    "world_size": "parallel.tp and parallel.pp",
    "dtype": "precision",
    "quantization": "precision",
}


def _parameter(
    name: str, default: Any, *, low: float | None = None, high: float | None = None, choices: tuple[str, ...] = ()
) -> Any:
    return field(default=default, metadata={"parameter": name, "low": low, "high": high, "choices": choices})


@dataclass(frozen=True, slots=True)
class Batching:
    """How requests become steps.

    Attributes:
        strategy: ``inflight_fused_batching``; its alias, and ``V1`` (static, being removed upstream).
        scheduler_policy: ``guaranteed_no_evict`` never pauses a running request; ``max_utilization`` fills the cache.
        chunked_context: Prompts longer than a step are split; None where the engine can.
        max_queue_size: Waiting requests before new ones are refused, in Triton and in the executor; 0 is no limit.
        max_queue_delay_us: Microseconds that Triton may hold a request so that others enter the same step.
    """

    strategy: str = _parameter("gpt_model_type", STRATEGIES[0], choices=STRATEGIES)
    scheduler_policy: str = _parameter("batch_scheduler_policy", POLICIES[0], choices=POLICIES)
    chunked_context: bool | None = _parameter("enable_chunked_context", None)
    max_queue_size: int = field(default=0, metadata={"low": 0})
    max_queue_delay_us: int = field(default=0, metadata={"low": 0})


@dataclass(frozen=True, slots=True)
class KvCache:
    """The cache of keys and values.

    Attributes:
        free_gpu_memory_fraction: Share of the memory that the loaded engine leaves free; above 0, below 1.
        max_tokens: Upper bound in tokens; the smaller of both wins. Needed where models share a GPU.
        reuse: Blocks serve other requests with the same beginning; None where the engine can.
        host_memory_bytes: Host memory for blocks that are not in use; 0 is none.
        onboard_blocks: Such blocks are copied back before they are used.
        attention_window: Tokens each layer looks back, repeated over the layers; empty is the whole sequence.
        sink_tokens: First tokens that always stay in the window.
    """

    free_gpu_memory_fraction: float = _parameter("kv_cache_free_gpu_mem_fraction", 0.9, low=0.0, high=1.0)
    max_tokens: int | None = _parameter("max_tokens_in_paged_kv_cache", None, low=1)
    reuse: bool | None = _parameter("enable_kv_cache_reuse", None)
    host_memory_bytes: int = _parameter("kv_cache_host_memory_bytes", 0, low=0)
    onboard_blocks: bool = _parameter("kv_cache_onboard_blocks", True)
    attention_window: tuple[int, ...] = _parameter("max_attention_window_size", ())
    sink_tokens: int | None = _parameter("sink_token_length", None, low=0)


@dataclass(frozen=True, slots=True)
class Decoding:
    """How tokens are chosen.

    Attributes:
        mode: None takes what fits the engine. A fixed ``top_k`` or ``top_p`` breaks requests that use the other.
        max_beam_width: Beams a request may ask for.
        normalize_log_probs: Cumulative log probabilities of beams are divided by their length.
        lookahead_window: W, for mode ``lookahead``; a request may ask for less.
        lookahead_ngram: N.
        lookahead_verification: G.
        medusa_choices: Tree, ``{0},{0,0},{1}``; empty takes the backend's.
        eagle_choices: Likewise.
        fast_logits: Draft logits go directly to the target; needs orchestrator mode with ranks started beforehand.
    """

    mode: str | None = _parameter("decoding_mode", None, choices=DECODING_MODES)
    max_beam_width: int = _parameter("max_beam_width", 1, low=1)
    normalize_log_probs: bool = _parameter("normalize_log_probs", True)
    lookahead_window: int | None = _parameter("lookahead_window_size", None, low=1)
    lookahead_ngram: int | None = _parameter("lookahead_ngram_size", None, low=1)
    lookahead_verification: int | None = _parameter("lookahead_verification_set_size", None, low=0)
    medusa_choices: str = _parameter("medusa_choices", "")
    eagle_choices: str = _parameter("eagle_choices", "")
    fast_logits: bool = _parameter("speculative_decoding_fast_logits", False)


@dataclass(frozen=True, slots=True)
class LoraCache:
    """Memory for LoRA adapters; without effect for engines without them.

    Attributes:
        optimal_rank: Rank that pages are sized for.
        max_rank: Largest rank that must fit.
        gpu_memory_fraction: Share of what engine and KV cache leave free.
        host_memory_bytes: Host cache.
        prefetch_dir: Folder below ``/models`` with adapters by number, loaded at the start; empty for none.
    """

    optimal_rank: int = _parameter("lora_cache_optimal_adapter_size", 8, low=1)
    max_rank: int = _parameter("lora_cache_max_adapter_size", 64, low=1)
    gpu_memory_fraction: float = _parameter("lora_cache_gpu_memory_fraction", 0.05, low=0.0, high=1.0)
    host_memory_bytes: int = _parameter("lora_cache_host_memory_bytes", 1 << 30, low=0)
    prefetch_dir: str = _parameter("lora_prefetch_dir", "")


@dataclass(frozen=True, slots=True)
class Guided:
    """Guided decoding. The keys exist even when it is off: newer backends do not load without them.

    Attributes:
        backend: ``xgrammar``, or empty for none.
        tokenizer_info_path: xgrammar's description of the tokenizer, below ``/models``; empty has it made.
        tokenizer_dir: Only NVIDIA's python runtime reads it.
    """

    backend: str = _parameter("guided_decoding_backend", "", choices=("", "xgrammar"))
    tokenizer_info_path: str = _parameter("xgrammar_tokenizer_info_path", "")
    tokenizer_dir: str = _parameter("tokenizer_dir", "")


@dataclass(frozen=True, slots=True)
class Execution:
    """Kernels and graphs.

    Attributes:
        context_fmha_fp32_acc: Prompt attention accumulates in float32.
        multi_block_mode: Long sequences are split over multiprocessors.
        cuda_graphs: Steps are replayed as graphs.
        cuda_graph_cache_size: Graphs that are kept.
        gpu_weights_fraction: Share of the weights on the GPU, for engines with weight streaming.
    """

    context_fmha_fp32_acc: bool = _parameter("enable_context_fmha_fp32_acc", False)
    multi_block_mode: bool = _parameter("multi_block_mode", True)
    cuda_graphs: bool = _parameter("cuda_graph_mode", False)
    cuda_graph_cache_size: int = _parameter("cuda_graph_cache_size", 0, low=0)
    gpu_weights_fraction: float | None = _parameter("gpu_weights_percent", None, low=0.0, high=1.0)


@dataclass(frozen=True, slots=True)
class Periods:
    """What the backend's threads do and how often.

    Attributes:
        cancellation_ms: Between looks for clients that have left.
        statistics_ms: Between updates of the metrics.
        receive_ms: Sleep of the orchestrator's receiver; None leaves the backend's 0, a busy loop.
        iteration_statistics: Steps whose statistics are kept.
        request_statistics: The same for requests.
    """

    cancellation_ms: int = _parameter("cancellation_check_period_ms", 100, low=1)
    statistics_ms: int = _parameter("stats_check_period_ms", 100, low=1)
    receive_ms: int | None = _parameter("recv_poll_period_ms", None, low=0)
    iteration_statistics: int = _parameter("iter_stats_max_iterations", 1000, low=0)
    request_statistics: int = _parameter("request_stats_max_iterations", 0, low=0)


@dataclass(frozen=True, slots=True)
class Bls:
    """The text model that is written in Python.

    Attributes:
        concurrency: Requests one instance works on at the same time.
        draft_tokens: Tokens drafted at a time where a request does not say; 0 drafts none. Needs a draft engine.
        use_draft_logits: The target judges the draft by its logits instead of by equality.
    """

    concurrency: int = field(default=64, metadata={"low": 1})
    draft_tokens: int = field(default=0, metadata={"low": 0})
    use_draft_logits: bool = False


@dataclass(frozen=True, slots=True)
class EngineServing:
    """Everything about serving an engine that its files do not say."""

    batching: Batching = Batching()
    kv_cache: KvCache = KvCache()
    decoding: Decoding = Decoding()
    lora: LoraCache = LoraCache()
    guided: Guided = Guided()
    execution: Execution = Execution()
    periods: Periods = Periods()
    bls: Bls = Bls()
    placement: Placement = field(default_factory=Placement)

    def settings(self) -> Iterator[tuple[str, Mapping[str, Any], Any]]:
        """Yield each setting: dotted name, metadata, value. The placement has rules of its own."""
        for group in dataclasses.fields(self):
            if group.name != "placement":
                values = getattr(self, group.name)
                for item in dataclasses.fields(values):
                    yield f"{group.name}.{item.name}", item.metadata, getattr(values, item.name)

    def findings(self) -> list[Finding]:
        """Return what is wrong with single values, whatever the engine."""
        found = [
            Finding("serving-value", "error", name, problem)
            for name, metadata, value in self.settings()
            if (problem := _problem(value, metadata))
        ]
        fraction = self.kv_cache.free_gpu_memory_fraction
        if not 0.0 < fraction < 1.0:
            message = f"is {fraction:g}, expected more than 0 and less than 1: kernels need some memory too"
            found.append(Finding("serving-value", "error", "kv_cache.free_gpu_memory_fraction", message))
        wrong = [window for window in self.kv_cache.attention_window if window < 1]
        if wrong:
            message = f"holds {wrong[0]}, expected tokens"
            found.append(Finding("serving-value", "error", "kv_cache.attention_window", message))
        return found


def parameter_text(value: Any) -> str:
    """Return a value as the backend reads it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def serving_from_options(options: Mapping[str, Any], *, placement: Placement | None = None) -> EngineServing:
    """Build the settings from dotted names, ``{"kv_cache.reuse": True}``.

    Raises:
        ConfigError: A name does not exist or belongs to the builder, or a value has the wrong type; one finding each.
    """
    serving = EngineServing()
    known = {name: value for name, _, value in serving.settings()}
    upstream = {metadata["parameter"]: name for name, metadata, _ in serving.settings() if "parameter" in metadata}
    changes: dict[str, dict[str, Any]] = {}
    found: list[Finding] = []
    for name, value in options.items():
        if name not in known:
            found.append(_unknown(name, known, upstream))
            continue
        group, _, item = name.partition(".")
        value = tuple(value) if isinstance(known[name], tuple) and isinstance(value, (list, tuple)) else value
        if not _has_type(value, _annotation(getattr(serving, group), item)):
            message = f"is {value!r}, expected {_annotation(getattr(serving, group), item)}"
            found.append(Finding("serving-type", "error", name, message))
        changes.setdefault(group, {})[item] = value
    if found:
        raise ConfigError("; ".join(f"{item.path} {item.message}" for item in found), findings=found)
    groups = {name: dataclasses.replace(getattr(serving, name), **values) for name, values in changes.items()}
    return dataclasses.replace(serving, placement=placement or serving.placement, **groups)


def _unknown(name: str, known: Mapping[str, Any], upstream: Mapping[str, str]) -> Finding:
    last = name.rpartition(".")[2]
    if last in ENGINE_ONLY:
        message = "is a build-time option: the engine fixes it, serving cannot change it"
        return Finding("engine-only-option", "error", name, message, f"set {ENGINE_ONLY[last]} and build again")
    if last in upstream:
        return Finding("unknown-setting", "error", name, f"is called {upstream[last]} here", f"set {upstream[last]}")
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return Finding("unknown-setting", "error", name, "does not exist", f"did you mean {near[0]}?" if near else "")


def _annotation(group: Any, item: str) -> str:
    return str(next(entry.type for entry in dataclasses.fields(group) if entry.name == item))


def _has_type(value: Any, annotation: str) -> bool:
    kinds: dict[str, type] = {"bool": bool, "int": int, "float": float, "str": str}
    for part in annotation.split(" | "):
        if part == "None" and value is None:
            return True
        if part == "tuple[int, ...]":
            return isinstance(value, tuple) and all(type(entry) is int for entry in value)
        if part in kinds and (type(value) is kinds[part] or (part == "float" and type(value) is int)):
            return True
    return False


def _problem(value: Any, metadata: Mapping[str, Any]) -> str:
    if value is None:
        return ""
    choices, low, high = metadata.get("choices"), metadata.get("low"), metadata.get("high")
    if choices and value not in choices:
        return f"is {value!r}, expected one of {', '.join(filter(None, choices))}"
    if low is not None and not value >= low:
        return f"is {value:g}, expected at least {low:g}"
    if high is not None and not value <= high:
        return f"is {value:g}, expected at most {high:g}"
    return ""
