"""The parts of a :class:`pipeline.config.spec.Spec` that only matter where TensorRT engines are built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.config.identity import identity
from pipeline.facts.speculation import lookahead_draft_len

# What a free flag may hold.
FlagValue = str | int | float | bool | Sequence[str] | None


@dataclass(frozen=True, slots=True)
class Calibration:
    """Text that quantization measures on.

    Attributes:
        path: Absolute path of a folder, or of a ``.jsonl`` or ``.txt`` file; empty for the shipped excerpt. Not part of
            any identity: the stage that reads it takes the content's digest.
        column: Field that holds the text, for ``.jsonl``.
        samples: Texts that are run.
        seq_len: Tokens kept of each.
        batch_size: Texts in one forward pass.
        modelopt_python: Interpreter that has ModelOpt, for ``converter=modelopt``; the pins decide, not the place.
    """

    path: str = field(metadata=identity())
    column: str = field(metadata=identity("convert"))
    samples: int = field(metadata=identity("convert"))
    seq_len: int = field(metadata=identity("convert"))
    batch_size: int = field(metadata=identity("convert"))
    modelopt_python: str = field(default="", metadata=identity())


@dataclass(frozen=True, slots=True)
class Build:
    """How engines are built.

    Attributes:
        workers: Processes of the builder at once; None for one per rank or GPU. Changes no byte of the result.
        multiple_profiles: Several optimization profiles instead of one.
        force_num_profiles: Cap on their number; None for the builder's choice.
        weight_streaming: Weights stay on the host and are streamed.
        kv_reuse: The run time must be able to reuse cache blocks between requests.
        chunked_context: The run time must be able to take prompts longer than a step.
        timing_cache: Absolute path of an earlier build's timing cache; it saves time and decides nothing.
        flags: Further flags of the builder by name, without dashes. May hold host paths, so they are no identity here:
            the build stage takes the command's arguments, which hold none.
        converter_flags: Further flags of the tool that writes the checkpoint, likewise.
    """

    workers: int | None = field(metadata=identity())
    multiple_profiles: bool = field(metadata=identity("build"))
    force_num_profiles: int | None = field(metadata=identity("build"))
    weight_streaming: bool = field(metadata=identity("build"))
    kv_reuse: bool = field(metadata=identity())
    chunked_context: bool = field(metadata=identity())
    timing_cache: str = field(metadata=identity())
    flags: Mapping[str, FlagValue] = field(metadata=identity())
    converter_flags: Mapping[str, FlagValue] = field(metadata=identity())


@dataclass(frozen=True, slots=True)
class Speculative:
    """Speculative decoding.

    Attributes:
        mode: ``draft_target``, ``medusa``, ``eagle``, ``lookahead`` or ``redrafter``.
        max_draft_len: Draft tokens of a step; 0 takes it from the checkpoint, or from the lookahead window.
        window: Lookahead window W.
        ngram: Lookahead n-gram size N.
        verification: Lookahead verification set G.
        medusa_heads: Heads to merge; None for upstream's default.
        medusa_layers: Layers of a head; None likewise.
        eagle_layers: Layers of the EAGLE net, which lengthen the sequence; 0 when not known.
        path: Absolute path of the folder with the Medusa heads; empty otherwise. The convert stage takes its digest.
    """

    mode: str = field(metadata=identity("build"))
    max_draft_len: int = field(metadata=identity("build"))
    window: int = field(metadata=identity("build"))
    ngram: int = field(metadata=identity("build"))
    verification: int = field(metadata=identity("build"))
    medusa_heads: int | None = field(metadata=identity("build"))
    medusa_layers: int | None = field(metadata=identity("build"))
    eagle_layers: int = field(metadata=identity("build"))
    path: str = field(metadata=identity())

    @property
    def draft_len(self) -> int:
        """Draft tokens of a step; 0 when only the checkpoint knows."""
        if self.max_draft_len or self.mode != "lookahead" or not self.ngram:
            return self.max_draft_len
        return lookahead_draft_len(self.window, self.ngram, self.verification)


@dataclass(frozen=True, slots=True)
class Lora:
    """LoRA adapters that the engine can take.

    Attributes:
        max_rank: Largest rank.
        target_modules: Modules they change; empty takes them from the first adapter folder.
        adapters: Absolute paths of adapter folders. The build stage takes their digests.
        adapter_rank: Largest rank among them; None when not known.
        dora: They are DoRA.
    """

    max_rank: int = field(metadata=identity("build"))
    target_modules: tuple[str, ...] = field(metadata=identity("build"))
    adapters: tuple[str, ...] = field(metadata=identity())
    adapter_rank: int | None = field(metadata=identity())
    dora: bool = field(metadata=identity("build"))


@dataclass(frozen=True, slots=True)
class EngineTie:
    """What a TensorRT engine belongs to; change one and it must be built again.

    Attributes:
        release: TensorRT-LLM release.
        build_image: Container image that builds, with digest once locked.
        gpu: GPU name.
        sm: Compute capability, 90 for 9.0; None when not known.
    """

    release: str = field(metadata=identity("build"))
    build_image: str = field(metadata=identity("build"))
    gpu: str = field(metadata=identity("build"))
    sm: int | None = field(metadata=identity("build"))
