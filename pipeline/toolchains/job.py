"""What the adapters need to know of a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from pipeline.config.engine_parts import FlagValue as FlagValue
from pipeline.facts.precisions import SMOOTHQUANT as SMOOTHQUANT
from pipeline.facts.published import SourceQuantization as SourceQuantization
from pipeline.facts.speculation import lookahead_draft_len
from pipeline.toolchains.release import data

PRECISIONS = (
    "fp16",
    "bf16",
    "int8",
    "int4",
    "smoothquant",
    "fp8",
    "fp8_rowwise",
    "int4_awq",
    "w4a8_awq",
    "nvfp4",
    "from_checkpoint",
)


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes the engine is built for, in sequences or tokens; None leaves upstream's default."""

    max_batch_size: int | None = None
    max_input_len: int | None = None
    max_seq_len: int | None = None
    max_num_tokens: int | None = None
    max_beam_width: int | None = None


@dataclass(frozen=True, slots=True)
class Calibration:
    """Data that quantization measures on: a local folder with a ``train`` split and a ``text`` column.

    Attributes:
        samples: Texts that are run.
        seq_len: Tokens kept of each.
        batch_size: Texts per forward pass.
    """

    samples: int = 512
    seq_len: int = 512
    batch_size: int = 1


@dataclass(frozen=True, slots=True)
class Speculative:
    """Speculative decoding.

    Attributes:
        mode: ``draft_tokens_external``, ``lookahead_decoding``, ``medusa``, ``explicit_draft_tokens`` or ``eagle``.
        max_draft_len: Draft tokens per step; 0 takes it from the checkpoint (or, for lookahead, from the window).
        window: Lookahead window size W.
        ngram: Lookahead n-gram size N.
        verification: Lookahead verification set size G.
        medusa_heads: Heads to merge; None leaves upstream's default.
        medusa_layers: Layers of a head; None leaves upstream's default.
        eagle_layers: Layers of the EAGLE net, which lengthen the sequence; 0 when not known.
    """

    mode: str
    max_draft_len: int = 0
    window: int = 0
    ngram: int = 0
    verification: int = 0
    medusa_heads: int | None = None
    medusa_layers: int | None = None
    eagle_layers: int = 0

    @property
    def lookahead_draft_len(self) -> int:
        """Draft tokens that the lookahead window needs."""
        return lookahead_draft_len(self.window, self.ngram, self.verification)

    @property
    def draft_len(self) -> int:
        """Draft tokens the engine is built for; 0 when only the checkpoint knows."""
        if self.max_draft_len or self.mode != "lookahead_decoding" or not self.ngram:
            return self.max_draft_len
        return self.lookahead_draft_len


@dataclass(frozen=True, slots=True)
class Lora:
    """LoRA adapters.

    Attributes:
        max_rank: Largest rank the engine takes.
        target_modules: Modules they apply to; empty takes them from the first adapter folder.
        adapters: Number of adapter folders given to the build.
        adapter_rank: Largest rank among them; None when not known.
        dora: The adapters are DoRA.
    """

    max_rank: int = 64
    target_modules: tuple[str, ...] = ()
    adapters: int = 0
    adapter_rank: int | None = None
    dora: bool = False


@dataclass(frozen=True, slots=True)
class ToolJob:
    """One job for NVIDIA's tools. Everything here decides a command or a finding; nothing here is a host path.

    Attributes:
        family: Family name or Hugging Face architecture; see ``data/families.json``.
        precision: One of :data:`PRECISIONS`.
        dtype: Type of what is not quantized: ``auto``, ``float16``, ``bfloat16`` or ``float32``.
        kv_cache: ``auto`` (the dtype), ``int8`` or ``fp8``.
        sm: Compute capability of the GPU, 90 for 9.0; None when not known.
        gpu_count: GPUs of the machine; None when not known.
        gpu_memory_bytes: Memory of one GPU; None when not known.
        parameters: Weights of the model; None when not known.
        experts: Experts of a layer; 0 for dense models or when not known.
        vocab_size: Rows of the embedding; 0 when not known.
        tp: Tensor parallel size.
        pp: Pipeline parallel size.
        cp: Context parallel size.
        moe_tp: Tensor parallel size inside experts; -1 lets the tool derive it.
        moe_ep: Expert parallel size; -1 lets the tool derive it.
        embedding_sharding: ``none``, ``vocab`` or ``hidden``.
        converter: ``nvidia``: the release's own scripts write the checkpoint; ``native``: something else does.
        limits: Sizes the engine is built for.
        flags: Further ``trtllm-build`` flags by name without dashes.
        converter_flags: Further flags of the tool that writes the checkpoint, likewise.
        smoothquant_algo: ``quant_algo`` that SmoothQuant shall give.
        alpha: Smoothing strength of SmoothQuant, 0 to 1.
        group_size: Weights that share a scale, for group-wise methods.
        quantize_lm_head: Quantize the head too (FP8 only).
        calibration: None when no data was given.
        source: How the source is quantized; None when it is not.
        speculative: None for plain decoding.
        lora: None for no adapters.
        workers: Parallel processes of the tools; None lets the plan choose.
        multiple_profiles: Build several optimization profiles.
        force_num_profiles: Cap on their number (debugging); None for upstream's choice.
        weight_streaming: Keep weights on the host and stream them.
        reuse_kv: The user wants KV cache reuse.
        chunked_context: The user wants prompts longer than ``max_num_tokens``.
        reuse_timing_cache: A timing cache of an earlier build is mounted.
    """

    family: str
    precision: str
    dtype: str = "auto"
    kv_cache: str = "auto"
    sm: int | None = None
    gpu_count: int | None = None
    gpu_memory_bytes: int | None = None
    parameters: int | None = None
    experts: int = 0
    vocab_size: int = 0
    tp: int = 1
    pp: int = 1
    cp: int = 1
    moe_tp: int = -1
    moe_ep: int = -1
    embedding_sharding: str = "none"
    converter: str = "nvidia"
    limits: Limits = Limits()
    flags: Mapping[str, FlagValue] = field(default_factory=dict)
    converter_flags: Mapping[str, FlagValue] = field(default_factory=dict)
    smoothquant_algo: str = SMOOTHQUANT[True, True]
    alpha: float = 0.5
    group_size: int = 128
    quantize_lm_head: bool = False
    calibration: Calibration | None = None
    source: SourceQuantization | None = None
    speculative: Speculative | None = None
    lora: Lora | None = None
    workers: int | None = None
    multiple_profiles: bool = False
    force_num_profiles: int | None = None
    weight_streaming: bool = False
    reuse_kv: bool = False
    chunked_context: bool = False
    reuse_timing_cache: bool = False

    @property
    def world_size(self) -> int:
        """Ranks in all: one GPU each."""
        return self.tp * self.pp * self.cp

    @property
    def recipe(self) -> str:
        """Name of the precision in the route table."""
        if self.precision == "smoothquant":
            return f"smoothquant:{self.smoothquant_algo}"
        if self.precision == "from_checkpoint":
            return f"from_checkpoint:{self.source.key if self.source else 'unquantized'}"
        return self.precision


@dataclass(frozen=True, slots=True)
class Family:
    """A model family as NVIDIA's tools see it.

    Attributes:
        name: ``llama``, ``qwen2`` …
        script: Family whose ``convert_checkpoint.py`` it uses; empty for none.
        row: Its line in the published precision matrix; empty when it has none.
        quantize: ``yes``, ``no`` or ``unverified``: whether quantize.py takes it.
        since: First release with an engine class; empty when older than every release here.
        unverified_before: Release before which nothing was found; empty for none.
        parallel: Ways of splitting that work: ``tp``, ``pp``, ``cp``.
        is_moe: It is a mixture of experts.
        transformers: First transformers release that knows it; empty when older than any that is bundled.
    """

    name: str
    script: str
    row: str
    quantize: str
    since: str
    unverified_before: str
    parallel: tuple[str, ...]
    is_moe: bool
    transformers: str


@cache
def find_family(name: str) -> Family | None:
    """Return the family of that name, alias or Hugging Face architecture; None when unknown."""
    for family, facts in data("families")["families"].items():
        if name == family or name in facts["architectures"] or name in facts.get("aliases", ()):
            listed = facts["quantize"]
            return Family(
                name=family,
                script=facts["script"] or "",
                row=facts["row"] or "",
                quantize=listed if isinstance(listed, str) else ("yes" if listed else "no"),
                since=facts.get("since", ""),
                unverified_before=facts.get("unverified_before", ""),
                parallel=tuple(facts.get("parallel", ("tp", "pp", "cp"))),
                is_moe=bool(facts.get("moe")),
                transformers=facts.get("transformers", ""),
            )
    return None


def family_names() -> tuple[str, ...]:
    """Return every known family."""
    return tuple(data("families")["families"])
