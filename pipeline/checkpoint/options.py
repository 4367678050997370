"""What a conversion is asked for and what it reports. No numpy here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pipeline.errors import ConfigError

EmbeddingSharding = Literal["none", "vocab", "hidden"]

Quantization = Literal["int8", "int4", "smoothquant", "int8_sq", "fp8", "fp8_rowwise", "int4_awq", "w4a8_awq", "nvfp4"]
KvCache = Literal["int8", "fp8"]

QUANTIZATIONS = ("int8", "int4", "smoothquant", "int8_sq", "fp8", "fp8_rowwise", "int4_awq", "w4a8_awq", "nvfp4")
# Schemes that smooth, and schemes whose int4 weights share a scale in groups.
SMOOTHED = ("smoothquant", "int8_sq")
GROUPED = ("int4_awq", "w4a8_awq")
KV_CACHES = ("int8", "fp8")
DTYPES = ("auto", "float16", "bfloat16", "float32")
EMBEDDING_SHARDINGS = ("none", "vocab", "hidden")


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """How to convert.

    Attributes:
        dtype: Type of the weights in the checkpoint. ``auto`` takes the source's, except that float32 and an unstated
            type become float16, as NVIDIA's converter does.
        tp: Tensor parallel size.
        pp: Pipeline parallel size; the first stages get the layers left over.
        embedding_sharding: Whether ``vocab_embedding`` is whole on every rank, split by vocabulary rows, or by columns.
        quant: How linear layers are quantized. ``int8`` and ``int4`` are weight-only: the builder packs the weights,
            the checkpoint keeps 16 bits. ``fp8`` takes over a source that is FP8 already (also recognised without), or
            quantizes by measured ranges. ``smoothquant`` is the layout of the plugins, ``int8_sq`` modelopt's
            W8A8_SQ_PER_CHANNEL. Quantized sources are recognised and taken over with None.
        alpha: Strength of smoothing, 0 to 1 (smoothquant, int8_sq).
        per_channel: A scale per output channel of the weights, else per tensor (smoothquant).
        per_token: Activations scaled per token at run time, else by one measured range (smoothquant).
        kv_cache: Type of a quantized KV cache.
        group_size: Weights of a row that share a scale (int4_awq, w4a8_awq).
        ranges: File of measured activation ranges (all but int8, int4 and fp8_rowwise; quantized KV cache).
        kv_scale_floor: Least scale of an FP8 cache made from ranges. modelopt's is 1, which costs accuracy where values
            are small; 0 keeps what was measured.
        dequantize: Turn a quantized source into plain weights.
        digest_source: Whether to hash config and weights of the source for the report; costs a second per gigabyte on
            one processor, beside the conversion.
        workers: Threads that read, cast and write; None takes the number of processors, at most 4. Never changes a
        byte.
    """

    dtype: str = "auto"
    tp: int = 1
    pp: int = 1
    embedding_sharding: EmbeddingSharding = "none"
    quant: Quantization | None = None
    alpha: float = 0.5
    per_channel: bool = False
    per_token: bool = False
    kv_cache: KvCache | None = None
    group_size: int = 128
    ranges: Path | None = None
    kv_scale_floor: float = 1.0
    dequantize: bool = False
    digest_source: bool = True
    workers: int | None = None

    def __post_init__(self) -> None:
        """Refuse values outside the ranges above.

        Raises:
            ConfigError: Names the option, its value and what is possible.
        """
        _choice("dtype", self.dtype, DTYPES)
        _choice("embedding_sharding", self.embedding_sharding, EMBEDDING_SHARDINGS)
        for name in ("tp", "pp", "group_size"):
            _positive(name, getattr(self, name))
        if self.quant is not None:
            _choice("quant", self.quant, QUANTIZATIONS)
        if self.kv_cache is not None:
            _choice("kv_cache", self.kv_cache, KV_CACHES)
        if not 0.0 <= self.alpha <= 1.0:
            raise ConfigError(f"alpha is {self.alpha}; expected a number from 0 to 1")
        if (self.per_channel or self.per_token) and self.quant != "smoothquant":
            raise ConfigError("per_channel and per_token belong to quant smoothquant")
        if self.workers is not None:
            _positive("workers", self.workers)


def _choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}; expected one of {', '.join(choices)}")


def _positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name} is {value}; expected a whole number from 1")


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """What a finished conversion read and wrote.

    Attributes:
        architecture: ``LlamaForCausalLM`` …
        family: Name of the family table that was used.
        dtype: Type of the weights written.
        tp: Tensor parallel size.
        pp: Pipeline parallel size.
        source_tensors: Number of tensors in the source.
        target_tensors: Number of tensors written, over all ranks.
        parameters: Number of values in the source's tensors.
        dtypes: Tensor class (``matrix``, ``norm``, ``bias``, ``scale``) to the types written.
        source_bytes: Size of the source's tensors.
        target_bytes: Size of the tensors written, over all ranks.
        ignored_files: Weight files of the source folder that were not read, and why.
        ignored_tensors: Source tensors that need no place in the checkpoint, and why.
        warnings: What a reader of the result should know.
        source_digest: sha256 that identifies config and weights of the source by content; empty if not asked for.
        seconds: Wall time.
    """

    architecture: str
    family: str
    dtype: str
    tp: int
    pp: int
    source_tensors: int
    target_tensors: int
    parameters: int
    dtypes: Mapping[str, tuple[str, ...]]
    source_bytes: int
    target_bytes: int
    ignored_files: Mapping[str, str]
    ignored_tensors: Mapping[str, str]
    warnings: tuple[str, ...]
    source_digest: str
    seconds: float = field(compare=False)
