"""Preflight rules about build options: what the builder or the run time would refuse.

Each rule is a pure function of a :class:`BuildView` that yields findings under one id or a few. Basis of every rule:
the builder of the 0.17 to 1.2 line and its documentation; where only an estimate exists the finding is a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pipeline.errors import Finding, Severity
from pipeline.toolchains.effective import attention_options
from pipeline.toolchains.options import BuildView

Rule = Callable[[BuildView], Iterator[Finding]]

SM100_REFUSED_PLUGINS = (
    "gemm_swiglu_plugin",
    "fp8_rowwise_gemm_plugin",
    "low_latency_gemm_plugin",
    "low_latency_gemm_swiglu_plugin",
    "bert_context_fmha_fp32_acc",
)
SWIGLU_PLUGINS = ("gemm_swiglu_plugin", "low_latency_gemm_swiglu_plugin")
WEIGHT_ONLY = frozenset({"W8A16", "W4A16", "W4A16_AWQ", "W4A8_AWQ", "W8A16_GPTQ", "W4A16_GPTQ"})
EAGLE_MAX_BATCH_SIZE = 512
EAGLE_MAX_DRAFT_LEN = 256
MEDUSA_FAMILIES = frozenset({"llama"})


def paged_context_needed(view: BuildView) -> Iterator[Finding]:
    """KV cache reuse and chunked context need paged context attention in the end."""
    final, changes = attention_options(view)
    if final["use_paged_context_fmha"] == "enable":
        return
    why = next((c.why for c in reversed(changes) if c.flag == "use_paged_context_fmha"), "it is disabled")
    wishes = {"KV cache reuse": view.job.reuse_kv, "chunked context": view.job.chunked_context}
    for wish in (name for name, wanted in wishes.items() if wanted):
        message = f"{wish} was asked for, but use_paged_context_fmha ends as disable: {why}"
        yield _error("paged-context-needed", view, "use_paged_context_fmha", message, "drop the wish or its cause")
    longest, tokens = view.number("max_input_len"), view.number("max_num_tokens")
    if longest > tokens:
        message = f"prompts above max_num_tokens={tokens} fail at run time (max_input_len is {longest}): {why}"
        yield _note("warning", "long-prompts-fail", view, "max_input_len", message, f"limits.max_input_len={tokens}")


def input_length(view: BuildView) -> Iterator[Finding]:
    """Without packed input or fused attention the prompt length sizes the engine."""
    off = [key for key in ("remove_input_padding", "context_fmha") if not view.is_on(key)]
    if "context_fmha" in off:
        message = "without context_fmha the attention workspace grows with the square of the prompt length"
        yield _note("warning", "attention-workspace", view, "context_fmha", message, "build.flags.context_fmha=enable")
    if off and not view.is_passed("max_input_len"):
        message = f"max_input_len must be given when {' and '.join(off)} is off: it sizes the engine then"
        yield _error("input-len-needed", view, "max_input_len", message, "set limits.max_input_len")


def cache_block(view: BuildView) -> Iterator[Finding]:
    """Cache blocks hold a power of two tokens."""
    block = view.number("tokens_per_block")
    if block < 1 or block & (block - 1):
        message = f"tokens_per_block={block} is no power of two (estimated to be refused)"
        yield _note("warning", "tokens-per-block", view, "tokens_per_block", message, "build.flags.tokens_per_block=32")


def experts(view: BuildView) -> Iterator[Finding]:
    """Expert sizes must multiply to tp, and experts must divide."""
    job = view.job
    if job.moe_tp <= 0 and job.moe_ep <= 0:
        return
    ep = job.moe_ep if job.moe_ep > 0 else job.tp // job.moe_tp
    tp = job.moe_tp if job.moe_tp > 0 else job.tp // ep
    if tp * ep != job.tp:
        message = f"moe_tp × moe_ep = {tp} × {ep}, expected parallel.tp={job.tp}"
        sizes = ", ".join(str(size) for size in range(1, job.tp + 1) if job.tp % size == 0)
        yield Finding("moe-sizes", "error", "parallel.moe_ep", message, f"valid sizes: {sizes}")
    if ep > 1 and job.cp > 1:
        message = f"expert parallelism (moe_ep={ep}) cannot be combined with context parallelism (cp={job.cp})"
        yield Finding("moe-with-cp", "error", "parallel.moe_ep", message, "parallel.cp=1")
    if ep > 1 and job.experts % ep:
        message = f"{job.experts} experts do not divide by moe_ep={ep} (estimated to fail)"
        yield Finding("moe-experts", "warning", "parallel.moe_ep", message, "choose a divisor of the experts")


def context_logits(view: BuildView) -> Iterator[Finding]:
    """Context logits exclude drafts and prevent KV cache reuse from saving prompt work."""
    for key in ("gather_context_logits", "gather_all_token_logits"):
        if not view.is_on(key):
            continue
        if view.max_draft_len > 0:
            message = f"{key} cannot be combined with max_draft_len={view.max_draft_len}: the builder refuses"
            yield _error("context-logits-with-drafts", view, key, message, f"drop {key} or speculative decoding")
        if view.job.vocab_size:
            size = view.number("max_num_tokens") * view.job.vocab_size * 4 / 2**30
            message = f"{key} keeps logits of a whole step in memory: {size:.1f} GiB on the last ranks (estimated)"
            yield _note("info", "context-logits-memory", view, key, message, "a smaller limits.max_num_tokens")
        if view.job.reuse_kv:
            message = f"{key} keeps KV cache reuse from skipping prompt work"
            yield _note("warning", "context-logits-kv-reuse", view, key, message, f"build.flags.{key}=false")


def generation_logits(view: BuildView) -> Iterator[Finding]:
    """Generation logits are a run-time choice now."""
    if view.is_on("gather_generation_logits"):
        message = "gather_generation_logits does nothing since generation logits became a run-time choice"
        yield _note("warning", "generation-logits-no-effect", view, "gather_generation_logits", message, "remove it")


def profiles(view: BuildView) -> Iterator[Finding]:
    """Several profiles cost build time and memory and exclude opt_num_tokens."""
    if not view.is_on("multiple_profiles"):
        return
    if view.is_passed("opt_num_tokens"):
        message = f"opt_num_tokens={view.value('opt_num_tokens')} and multiple_profiles exclude each other"
        yield _error("profiles-with-opt-num-tokens", view, "opt_num_tokens", message, "remove opt_num_tokens")
    message = "several profiles: longer build, more memory for kernels, small output differences between batch sizes"
    yield _note("info", "multiple-profiles-cost", view, "multiple_profiles", message)


def lora(view: BuildView) -> Iterator[Finding]:
    """LoRA flags work with the plugin only, and ranks must fit."""
    ignored = [key for key in ("lora_dir", "lora_target_modules", "max_lora_rank") if view.is_passed(key)]
    if ignored and not view.is_on("lora_plugin"):
        message = f"{', '.join(ignored)} {'is' if len(ignored) == 1 else 'are'} ignored: lora_plugin is off"
        yield _note("warning", "lora-plugin-off", view, ignored[0], message, "build.flags.lora_plugin=auto")
    job = view.job.lora
    if job is None:
        return
    if job.adapter_rank is not None and job.adapter_rank > view.number("max_lora_rank"):
        message = f"max_lora_rank={view.number('max_lora_rank')} is below the adapter's rank {job.adapter_rank}"
        yield _error("lora-rank-too-small", view, "max_lora_rank", message, f"lora.max_rank={job.adapter_rank}")
    if job.dora and not view.has("dora_plugin"):
        message = f"DoRA needs dora_plugin, which release {view.release.version} does not have: it came with 0.19.0"
        yield _error("dora-needs-0-19", view, "dora_plugin", message, "use a newer toolchain")
    if not job.target_modules and not job.adapters:
        message = "neither target modules nor an adapter folder: the builder cannot know which modules adapters change"
        hint = "lora.target_modules=[attn_q,attn_v]"
        yield _error("lora-modules-missing", view, "lora_target_modules", message, hint)


def draft_length(view: BuildView) -> Iterator[Finding]:
    """A draft length belongs to a mode, and two modes need one."""
    mode, draft = view.value("speculative_decoding_mode"), view.max_draft_len
    if mode is None:
        if draft > 0:
            message = f"max_draft_len={draft} without a speculative mode does not speculate"
            yield _error("draft-len-without-mode", view, "max_draft_len", message, "set speculative.mode")
        return
    if draft == 0 and mode in ("draft_tokens_external", "lookahead_decoding"):
        message = f"{mode} needs max_draft_len above 0: an ordinary checkpoint does not hold it"
        yield _error("draft-len-missing", view, "max_draft_len", message, "set speculative.max_draft_len")
    job = view.job.speculative
    if mode == "lookahead_decoding" and job and job.ngram and draft < job.lookahead_draft_len:
        message = (
            f"max_draft_len={draft} is too short for window {job.window}, n-gram {job.ngram}, "
            f"verification {job.verification}: they need {job.lookahead_draft_len} (estimated)"
        )
        hint = f"speculative.max_draft_len={job.lookahead_draft_len}"
        yield _note("warning", "lookahead-draft-len", view, "max_draft_len", message, hint)


def speculative_modes(view: BuildView) -> Iterator[Finding]:
    """Limits of the single modes."""
    mode = view.value("speculative_decoding_mode")
    if mode == "medusa":
        if view.number("max_beam_width") > 1:
            message = f"Medusa has no beam search: max_beam_width is {view.number('max_beam_width')}, expected 1"
            yield _error("medusa-beam", view, "max_beam_width", message, "limits.max_beam_width=1")
        if view.family.name not in MEDUSA_FAMILIES:
            message = f"Medusa is supported for Vicuna and Llama style models, not for {view.family.name}"
            yield _error("medusa-family", view, "speculative_decoding_mode", message, "use draft_tokens_external")
    if mode == "eagle":
        limits = (("max_batch_size", EAGLE_MAX_BATCH_SIZE), ("max_draft_len", EAGLE_MAX_DRAFT_LEN))
        for key, most in limits:
            if view.number(key) > most:
                message = f"EAGLE takes {key} up to {most}, got {view.number(key)}"
                yield _error("eagle-limits", view, key, message, f"{view.path(key)}={most}")
    if mode == "draft_tokens_external":
        if attention_options(view)[0]["use_paged_context_fmha"] == "disable":
            message = "use_paged_context_fmha ends as disable; target and draft engine both want it on (estimated)"
            yield _note("warning", "draft-paged-context", view, "use_paged_context_fmha", message)
        message = "this mode serves two engines: build the draft model with the same vocabulary and release as well"
        yield _note("info", "draft-two-engines", view, "speculative_decoding_mode", message)


def fusions(view: BuildView) -> Iterator[Finding]:
    """Fusions and plugins that stop the build."""
    if view.is_on("pp_reduce_scatter") and view.family.name != "mixtral":
        message = f"pp_reduce_scatter is for Mixtral only, the model is {view.family.name}"
        yield _error("pp-reduce-scatter-mixtral", view, "pp_reduce_scatter", message, "remove it")
    if view.is_on("streamingllm") and view.release.at_least("1.2.0"):
        message = f"streamingllm is refused by release {view.release.version}: no longer supported since 1.2"
        yield _error("streamingllm-removed", view, "streamingllm", message, "remove it, or toolchain=trtllm_1_1_0")
    for key in SWIGLU_PLUGINS:
        if not view.is_on(key):
            continue
        if not view.is_on("use_fused_mlp"):
            message = f"{key} needs use_fused_mlp, which is off"
            yield _error("swiglu-needs-fused-mlp", view, key, message, "build.flags.use_fused_mlp=enable")
        if view.algorithm != "FP8":
            message = f"{key} works with FP8 weights, these are {view.weights}"
            yield _error("swiglu-needs-fp8", view, key, message, "precision=fp8, or remove it")
    no_plugin = bool(view.job.converter_flags.get("disable_weight_only_quant_plugin"))
    if view.is_on("fast_build") and no_plugin and view.algorithm in WEIGHT_ONLY:
        message = "fast_build manages weight-only weights through the plugin only, and the plugin is disabled"
        yield _error("fast-build-weight-only", view, "fast_build", message, "remove disable_weight_only_quant_plugin")


def sm100_plugins(view: BuildView) -> Iterator[Finding]:
    """Plugins that SM 100 refuses. Upstream tests for the exact value, so 103 passes without being known to work."""
    if view.job.sm not in (100, 103):
        return
    for key in SM100_REFUSED_PLUGINS:
        if view.is_on(key) and view.is_passed(key):
            if view.job.sm == 100:
                yield _error("sm100-plugin", view, key, f"{key} is refused on SM 100", f"build.flags.{key}=disable")
            else:
                message = f"{key} is refused on SM 100 and not known to work on SM {view.job.sm}"
                yield _note("warning", "sm100-plugin", view, key, message, f"build.flags.{key}=disable")


def gemm(view: BuildView) -> Iterator[Finding]:
    """The GEMM plugin must fit the weights, and hides weights from streaming."""
    plugin = view.value("gemm_plugin")
    if view.is_on("weight_streaming") and plugin not in (None, "disable"):
        message = f"gemm_plugin={plugin} keeps weights inside the plugin, where they cannot be streamed"
        hint = "build.flags.gemm_plugin=disable"
        yield _note("warning", "weight-streaming-gemm-plugin", view, "gemm_plugin", message, hint)
    for word, algorithm in (("fp8", "FP8"), ("nvfp4", "NVFP4")):
        if plugin == word and view.algorithm != algorithm:
            message = f"gemm_plugin={word} needs an {algorithm} checkpoint, this one is {view.weights}"
            yield _error("gemm-plugin-weights", view, "gemm_plugin", message, "remove it")
    if view.algorithm == "FP8" and plugin is None:
        message = "gemm_plugin is unset, which suits large batches; fp8 is faster at small ones"
        yield _note("info", "gemm-plugin-fp8", view, "gemm_plugin", message, "build.flags.gemm_plugin=fp8")


def build_config_file(view: BuildView) -> Iterator[Finding]:
    """A build_config file replaces the sizing flags."""
    if not view.is_passed("build_config"):
        return
    message = "build_config replaces every sizing flag, so the limits shown here may not be the engine's"
    if view.release.at_least("1.2.0"):
        message += "; unknown keys in the file are refused since 1.2"
    yield _note("warning", "build-config-wins", view, "build_config", message, "use limits and build.flags instead")


RULES: tuple[Rule, ...] = (
    paged_context_needed,
    input_length,
    cache_block,
    experts,
    context_logits,
    generation_logits,
    profiles,
    lora,
    draft_length,
    speculative_modes,
    fusions,
    sm100_plugins,
    gemm,
    build_config_file,
)


def check(view: BuildView) -> list[Finding]:
    """Apply every rule and collect what they find."""
    return [finding for rule in RULES for finding in rule(view)]


def _error(rule: str, view: BuildView, key: str, message: str, hint: str) -> Finding:
    return Finding(rule, "error", view.path(key), message, hint)


def _note(severity: Severity, rule: str, view: BuildView, key: str, message: str, hint: str = "") -> Finding:
    return Finding(rule, severity, view.path(key), message, hint)
