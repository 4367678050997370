"""What a TensorRT engine was built for, from the ``config.json`` beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import SourceError

# The builder writes the mode as a flag's number; newer configs as its name.
_SPECULATIVE = {1: "none", 2: "draft_tokens_external", 4: "medusa", 8: "lookahead_decoding"}
_SPECULATIVE |= {16: "explicit_draft_tokens", 32: "eagle"}
_DATATYPES = {"float32": "FP32", "float16": "FP16", "bfloat16": "BF16"}


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Limits and abilities of an engine.

    Attributes:
        release: TensorRT-LLM release that built it, ``1.2.1``; empty when the file does not say.
        world_size: Ranks, one file each.
        max_batch_size: Sequences in flight.
        max_seq_len: Prompt plus new tokens of one sequence.
        max_input_len: Longest prompt.
        max_num_tokens: Tokens in one step; None when there is no bound.
        max_beam_width: Beams.
        kv_cache: ``paged``, ``continuous`` or ``disabled``.
        paged_context_fmha: Reuse of blocks and chunked prompts are possible.
        context_logits: The logits of prompts can be returned.
        generation_logits: The logits of new tokens can be returned, for every step.
        speculative: How the engine drafts: ``none``, ``draft_tokens_external``, ``medusa`` ….
        max_draft_len: Draft tokens it takes.
        weight_streaming: Weights can stay on the host.
        lora: It takes LoRA adapters.
        logits: Datatype of logits, ``FP32`` or ``FP16``.
        dtype: Datatype of the network, ``FP16``, ``BF16`` or ``FP32``.
        vocab_size: Vocabulary, without padding.
    """

    release: str
    world_size: int
    max_batch_size: int
    max_seq_len: int
    max_input_len: int
    max_num_tokens: int | None
    max_beam_width: int
    kv_cache: str
    paged_context_fmha: bool
    context_logits: bool
    generation_logits: bool
    speculative: str
    max_draft_len: int
    weight_streaming: bool
    lora: bool
    logits: str
    dtype: str
    vocab_size: int


def read_engine_facts(folder: Path) -> EngineFacts:
    """Read ``config.json`` of an engine folder.

    Raises:
        SourceError: It is missing, damaged, or says too little to serve the engine.
    """
    path = folder / "config.json"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SourceError(f"{path} is not the config of an engine: {error}") from error
    try:
        return _facts(document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SourceError(
            f"{path} is not the config of an engine: {type(error).__name__}: {error}",
            hint="an engine's config has the parts version, pretrained_config and build_config",
        ) from error


def _facts(document: Mapping[str, Any]) -> EngineFacts:
    model, build = document["pretrained_config"], document["build_config"]
    plugins = build.get("plugin_config") or {}
    mapping = model.get("mapping") or {}
    gathers_all = bool(build.get("gather_all_token_logits"))
    max_seq_len = int(build["max_seq_len"])
    release = str(document.get("version", "")).partition("+")[0]
    return EngineFacts(
        release=re.sub(r"^v", "", release),
        world_size=int(mapping.get("world_size") or 1),
        max_batch_size=int(build["max_batch_size"]),
        max_seq_len=max_seq_len,
        max_input_len=int(build.get("max_input_len") or max_seq_len),
        max_num_tokens=int(build["max_num_tokens"]) if build.get("max_num_tokens") else None,
        max_beam_width=int(build.get("max_beam_width") or 1),
        kv_cache=str(build.get("kv_cache_type") or "paged").rpartition(".")[2].lower(),
        paged_context_fmha=_is_on(plugins.get("use_paged_context_fmha", build.get("use_paged_context_fmha"))),
        context_logits=gathers_all or bool(build.get("gather_context_logits")),
        generation_logits=gathers_all or bool(build.get("gather_generation_logits")),
        speculative=_speculative(build.get("speculative_decoding_mode")),
        max_draft_len=int(build.get("max_draft_len") or 0),
        weight_streaming=bool(build.get("weight_streaming")),
        lora=_is_on(plugins.get("lora_plugin")),
        logits=_DATATYPES.get(str(model.get("logits_dtype") or "float32"), "FP32"),
        dtype=_DATATYPES.get(str(model.get("dtype") or "float16"), "FP16"),
        vocab_size=int(model["vocab_size"]),
    )


def _is_on(value: object) -> bool:
    return value not in (None, False, "", "disable", "None", "0", 0)


def _speculative(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return _SPECULATIVE.get(value, str(value))
    name = str(value or "none").rpartition(".")[2].lower()
    return _SPECULATIVE.get(int(name), name) if name.isdecimal() else name
