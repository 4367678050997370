"""What upstream makes of the build options by itself.

The builder changes options without failing: some with a line in its log, some without. Every function here computes the
final values from the wished ones and says what changed. Read in the builder of the 0.17 to 1.2 line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pipeline.errors import Finding, Severity
from pipeline.toolchains.options import BuildView

FP8_ATTENTION_ALGORITHMS = frozenset({"FP8", "W4A8_AWQ", "NVFP4"})
REDUCE_FUSION_FAMILIES = frozenset({"llama", "gemma2"})


@dataclass(frozen=True, slots=True)
class Change:
    """One option that ends up as something else than it was set to.

    Attributes:
        rule: Stable id.
        flag: Name without dashes.
        final: What upstream makes of it.
        why: The reason, as half a sentence.
        hint: What to set instead; may be empty.
    """

    rule: str
    flag: str
    final: Any
    why: str
    hint: str = ""


@dataclass(slots=True)
class _Attention:
    """The two attention options while the builder works on them."""

    paged: bool
    fp8: bool


def attention_options(view: BuildView) -> tuple[dict[str, str], list[Change]]:
    """Compute what becomes of ``use_paged_context_fmha`` and ``use_fp8_context_fmha``.

    Returns:
        Final values (``enable`` or ``disable``), and the changes in the order in which upstream makes them.
    """
    state = _Attention(view.is_on("use_paged_context_fmha"), view.is_on("use_fp8_context_fmha"))
    changes = list(_by_weights(view, state))
    if state.paged and view.kv_algorithm == "int8":
        state.paged = False
        why = "it does not work with an INT8 KV cache"
        changes.append(_paged("paged-context-fmha-int8-kv", why, "precision.kv_cache=auto"))
    if view.value("speculative_decoding_mode") == "eagle" and not state.paged:
        state.paged = True
        changes.append(Change("paged-context-fmha-eagle", "use_paged_context_fmha", "enable", "EAGLE needs it"))
    final = {"use_paged_context_fmha": _word(state.paged), "use_fp8_context_fmha": _word(state.fp8)}
    return final, changes


def _by_weights(view: BuildView, state: _Attention) -> Iterator[Change]:
    """Apply the part of the rules that depends on context attention, weights, KV cache and GPU."""
    kv_is_fp8 = view.kv_algorithm == "fp8"
    if not view.is_on("context_fmha"):
        why = "context_fmha is off"
        if state.fp8:
            yield _fp8_off("fp8-context-fmha-needs-context-fmha", why, "build.flags.context_fmha=enable")
        if state.paged:
            yield _paged("paged-context-fmha-needs-context-fmha", why, "build.flags.context_fmha=enable")
        state.fp8 = state.paged = False
    elif view.algorithm not in FP8_ATTENTION_ALGORITHMS:
        if state.fp8:
            why = f"weights are {view.weights}, not FP8, W4A8_AWQ or NVFP4"
            yield _fp8_off("fp8-context-fmha-needs-fp8-weights", why)
        if state.paged and kv_is_fp8:
            why = f"the KV cache is FP8 and the weights are {view.weights}"
            yield _paged("paged-context-fmha-needs-fp8-weights", why, "precision.kv_cache=auto")
            state.paged = False
        state.fp8 = False
    elif view.job.sm is not None and view.job.sm < 89:
        if state.fp8:
            yield _fp8_off("fp8-context-fmha-needs-sm89", f"the GPU has SM {view.job.sm}, FP8 attention needs 89")
        if state.paged and kv_is_fp8:
            why = f"the KV cache is FP8 and the GPU has SM {view.job.sm}"
            yield _paged("paged-context-fmha-needs-sm89", why, "precision.kv_cache=auto")
            state.paged = False
        state.fp8 = False
    elif state.paged and state.fp8 != kv_is_fp8:
        if state.fp8:
            why = "with paged context attention it needs an FP8 KV cache"
            yield _fp8_off("fp8-context-fmha-needs-fp8-kv", why, "precision.kv_cache=fp8")
        else:
            why = "paged context attention over an FP8 KV cache needs it"
            yield Change("fp8-context-fmha-turned-on", "use_fp8_context_fmha", "enable", why)
        state.fp8 = kv_is_fp8


def fusion_options(view: BuildView) -> list[Change]:
    """Say which fusions and plugins upstream turns off or sets without failing."""
    changes = []
    reduce_fusion = view.is_on("reduce_fusion")
    if reduce_fusion:
        medusa = view.value("speculative_decoding_mode") == "medusa"
        if view.job.tp == 1:
            changes.append(_off("reduce-fusion-off", "reduce_fusion", "it fuses into AllReduce, and tp is 1"))
            reduce_fusion = False
        elif view.family.name not in REDUCE_FUSION_FAMILIES and not medusa:
            why = f"{view.family.name} is not Llama, Gemma 2 or Medusa"
            changes.append(_off("reduce-fusion-off", "reduce_fusion", why))
            reduce_fusion = False
    if view.is_on("user_buffer") and not reduce_fusion:
        changes.append(_off("user-buffer-off", "user_buffer", "it needs reduce_fusion"))
    if view.is_on("norm_quant_fusion"):
        why = "reduce_fusion is on" if reduce_fusion else ""
        why = why or ("" if view.family.name == "llama" else f"{view.family.name} is not Llama")
        why = why or ("" if view.algorithm == "NVFP4" else f"weights are {view.weights}, not NVFP4")
        if why:
            changes.append(_off("norm-quant-fusion-off", "norm_quant_fusion", why))
    if view.is_on("use_fused_mlp"):
        if view.algorithm not in ("none", "FP8", "MIXED_PRECISION"):
            why = f"weights are {view.weights}, neither FP8 nor mixed"
            changes.append(_off("fused-mlp-off", "use_fused_mlp", why))
        elif view.family.name == "recurrentgemma" and view.algorithm == "FP8":
            changes.append(_off("fused-mlp-off", "use_fused_mlp", "RecurrentGemma does not take it with FP8"))
    return changes + _nccl(view)


def _nccl(view: BuildView) -> list[Change]:
    """The NCCL plugin follows the world size, whatever was passed."""
    if not view.is_passed("nccl_plugin") or view.value("nccl_plugin") == "auto":
        return []
    if view.job.world_size == 1 and view.is_on("nccl_plugin"):
        return [_off("nccl-plugin-set", "nccl_plugin", "there is one rank")]
    if view.job.world_size > 1 and not view.is_on("nccl_plugin"):
        why = f"{view.job.world_size} ranks need it"
        return [Change("nccl-plugin-set", "nccl_plugin", view.job.dtype, why)]
    return []


def speculative_sizes(view: BuildView) -> list[Change]:
    """Compute how drafts enlarge ``max_seq_len`` and ``max_num_tokens``; memory must be sized with these values."""
    draft = view.max_draft_len
    if not draft or view.value("speculative_decoding_mode") is None:
        return []
    changes = []
    extra = draft + (view.job.speculative.eagle_layers if view.job.speculative else 0)
    length, batch, tokens = view.number("max_seq_len"), view.number("max_batch_size"), view.number("max_num_tokens")
    if length:
        why = f"it grows by the {extra} draft tokens of a step"
        changes.append(Change("sequence-grows-with-drafts", "max_seq_len", length + extra, why))
    if tokens < batch * (draft + 1):
        why = f"{batch} sequences × ({draft} drafts + 1) do not fit into {tokens}"
        changes.append(Change("num-tokens-raised-for-drafts", "max_num_tokens", batch * (draft + 1), why))
    return changes


def token_sizes(view: BuildView) -> list[Change]:
    """Compute what other options make of ``max_num_tokens`` and ``opt_num_tokens``."""
    tokens, block = view.number("max_num_tokens"), view.number("tokens_per_block")
    longest, optimum = view.number("max_input_len"), view.number("opt_num_tokens")
    changes = []
    if not view.is_on("remove_input_padding") and view.number("max_seq_len"):
        padded = view.number("max_batch_size") * view.number("max_seq_len")
        why = "without remove_input_padding it is max_batch_size × max_seq_len"
        return [Change("num-tokens-ignored", "max_num_tokens", padded, why, "build.flags.remove_input_padding=enable")]
    if not view.is_on("context_fmha") and tokens < longest:
        why = f"without context_fmha a step must hold a whole prompt of max_input_len={longest}"
        changes.append(Change("num-tokens-raised-to-input", "max_num_tokens", longest, why))
    if view.is_on("context_fmha") and view.is_passed("tokens_per_block") and tokens < block:
        why = f"a step must hold one cache block of {block} tokens, and chunked context becomes mandatory"
        changes.append(Change("num-tokens-raised-to-block", "max_num_tokens", block, why))
    if optimum > tokens:
        why = "it cannot exceed max_num_tokens"
        changes.append(Change("opt-num-tokens-capped", "opt_num_tokens", tokens, why))
    return changes


def gemm_plugin(view: BuildView) -> list[Change]:
    """NVFP4 builds turn their GEMM plugin on unless it is disabled in so many words."""
    if view.algorithm == "NVFP4" and view.value("gemm_plugin") not in ("disable", "nvfp4"):
        hint = "build.flags.gemm_plugin=disable to keep it off"
        return [Change("gemm-plugin-nvfp4", "gemm_plugin", "nvfp4", "weights are NVFP4", hint)]
    return []


def silent_changes(view: BuildView) -> list[Change]:
    """Return everything that upstream changes by itself in this build."""
    parts: tuple[Callable[[BuildView], list[Change]], ...] = (
        lambda v: attention_options(v)[1],
        fusion_options,
        speculative_sizes,
        token_sizes,
        gemm_plugin,
    )
    return [change for part in parts for change in part(view)]


def change_findings(view: BuildView) -> list[Finding]:
    """Report the silent changes: a warning where the user's own value is changed, else information."""
    findings = []
    for change in silent_changes(view):
        asked = view.is_passed(change.flag)
        was = view.value(change.flag)
        start = f"{change.flag} {'was set to' if asked else 'defaults to'} {was}"
        message = f"{start}, ends as {change.final}: {change.why}"
        # Losing KV cache reuse and chunked context matters even where nobody asked for the option by name.
        loses = change.flag == "use_paged_context_fmha" and change.final == "disable" and was == "enable"
        severity: Severity = "warning" if asked or loses else "info"
        findings.append(Finding(change.rule, severity, view.path(change.flag), message, change.hint))
    return findings


def _word(on: bool) -> str:
    return "enable" if on else "disable"


def _off(rule: str, flag: str, why: str, hint: str = "") -> Change:
    return Change(rule, flag, "disable", why, hint)


def _paged(rule: str, why: str, hint: str = "") -> Change:
    return _off(rule, "use_paged_context_fmha", f"{why}; no KV cache reuse, no chunked context", hint)


def _fp8_off(rule: str, why: str, hint: str = "") -> Change:
    return _off(rule, "use_fp8_context_fmha", why, hint)
