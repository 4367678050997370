"""What a family is: a table of rules from source tensors to target tensors, and the config fields of its model class.

Names follow TensorRT-LLM: ``mlp.fc`` is the branch with the activation (Hugging Face ``gate_proj``), ``mlp.gate`` the
multiplied branch (``up_proj``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from pipeline.checkpoint.hfconfig import Architecture
from pipeline.checkpoint.options import ConvertOptions
from pipeline.checkpoint.views import Matrix
from pipeline.errors import SourceError

Prepare = Callable[[Architecture, tuple[Matrix, ...]], tuple[Matrix, ...]]
Condition = Callable[[Architecture], bool]
Place = Literal["layer", "first", "last"]


class Layout(Enum):
    """How a tensor is cut for tensor parallelism. Several parts are each cut, then joined by rows."""

    WHOLE = "the same on every rank"
    COLUMN = "rows (outputs) divided"
    ROW = "columns (inputs) divided"
    QKV = "heads divided; key/value heads repeated when there are fewer than ranks"
    VOCAB = "vocabulary rows divided, zero rows at the end"
    EMBEDDING = "as the option embedding_sharding says"


@dataclass(frozen=True, slots=True)
class Rule:
    """One target tensor, or one per layer.

    Attributes:
        target: Name below ``transformer.layers.{i}.`` for layer rules, else the full name.
        sources: Source names, below the family's layer prefix for layer rules; ``{e}`` counts experts (all sources
        of one
            expert, then of the next).
        layout: How it is cut.
        place: ``layer``, or on the ``first`` or ``last`` pipeline stage only.
        prepare: Turns the source matrices into the parts that are cut.
        when: Whether the model has this tensor.
        dtype: Fixed type; None is the checkpoint's.
        stacked: Whether the parts are experts, stacked in a leading dimension.
    """

    target: str
    sources: tuple[str, ...]
    layout: Layout = Layout.WHOLE
    place: Place = "layer"
    prepare: Prepare | None = None
    when: Condition | None = None
    dtype: str | None = None
    stacked: bool = False

    def applies(self, architecture: Architecture) -> bool:
        """Say whether the model has this tensor."""
        return self.when is None or self.when(architecture)

    def source_names(self, architecture: Architecture, prefix: str) -> tuple[str, ...]:
        """Return the full source names, experts expanded."""
        experts = range(architecture.num_experts) if any("{e}" in name for name in self.sources) else (0,)
        return tuple(prefix + name.replace("{e}", str(e)) for e in experts for name in self.sources)


@dataclass(frozen=True, slots=True)
class Family:
    """A group of architectures that share names and config fields.

    Attributes:
        name: For reports.
        architectures: Model classes it covers.
        rules: The table.
        config: Returns the config fields beyond the common ones.
        layer_prefix: Source prefix of layer ``{i}``.
        ignored: Regular expressions of source tensors that need no place, with the reason.
        check: Raises SourceError for variants that cannot be converted faithfully.
        adjust: Returns options as the model class needs them, whatever was asked, with what to tell about it.
        prefixes: Alternative prefixes of all source names; the first that fits is used.
    """

    name: str
    architectures: tuple[str, ...]
    rules: tuple[Rule, ...]
    config: Callable[[Architecture], Mapping[str, Any]]
    layer_prefix: str = "model.layers.{i}."
    ignored: tuple[tuple[str, str], ...] = ()
    check: Callable[[Architecture], None] | None = None
    adjust: Callable[[ConvertOptions], tuple[ConvertOptions, tuple[str, ...]]] | None = None
    prefixes: tuple[str, ...] = ("",)


def attention_bias(architecture: Architecture) -> bool:
    """Say whether q, k, v and o have biases."""
    return architecture.attention_bias


def mlp_bias(architecture: Architecture) -> bool:
    """Say whether the MLP has biases."""
    return architecture.mlp_bias


def dense(architecture: Architecture) -> bool:
    """Say whether the model has plain MLPs."""
    return architecture.num_experts == 0


def moe(architecture: Architecture) -> bool:
    """Say whether the model has experts."""
    return architecture.num_experts > 0


def refuse(architecture: Architecture, *troubles: tuple[bool, str]) -> None:
    """Refuse variants that the model class cannot express.

    Raises:
        SourceError: One of the conditions holds; names all that do.
    """
    found = [what for wrong, what in troubles if wrong]
    if found:
        raise SourceError(
            f"{architecture.name}: {'; '.join(found)}: cannot be carried into a checkpoint",
            hint="converting without it would change the model's answers",
        )


def refuse_partial_rotation(architecture: Architecture) -> None:
    """Refuse heads that are rotated in part, where the model class rotates whole heads."""
    factor = architecture.rotary_factor
    refuse(architecture, (factor != 1.0, f"partial_rotary_factor {factor}"))


def mixed_windows(architecture: Architecture) -> tuple[bool, str]:
    """Return whether only some layers have a sliding window, with the words for it."""
    raw = architecture.raw
    kinds = raw.get("layer_types")
    if isinstance(kinds, list):
        mixed = len(set(kinds)) > 1
    else:
        mixed = bool(raw.get("use_sliding_window")) and 0 < raw.get("max_window_layers", 0) < architecture.num_layers
    return mixed and architecture.sliding_window is not None, "a sliding window in some of the layers"


ROTARY_BUFFERS = (r"(.*\.)?rotary_emb\.inv_freq", "rotary table, derived from the config")


# Rules that most Hugging Face decoders share.
EMBEDDING = Rule("transformer.vocab_embedding.weight", ("model.embed_tokens.weight",), Layout.EMBEDDING, "first")
FINAL_NORM = Rule("transformer.ln_f.weight", ("model.norm.weight",), Layout.WHOLE, "last")
HEAD = Rule("lm_head.weight", ("lm_head.weight",), Layout.VOCAB, "last")
QKV = Rule(
    "attention.qkv.weight",
    ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    Layout.QKV,
)
QKV_BIAS = Rule(
    "attention.qkv.bias",
    ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    Layout.QKV,
    when=attention_bias,
)
DENSE = Rule("attention.dense.weight", ("self_attn.o_proj.weight",), Layout.ROW)
DENSE_BIAS = Rule("attention.dense.bias", ("self_attn.o_proj.bias",), when=attention_bias)
INPUT_NORM = Rule("input_layernorm.weight", ("input_layernorm.weight",))
POST_NORM = Rule("post_layernorm.weight", ("post_attention_layernorm.weight",))
FC = Rule("mlp.fc.weight", ("mlp.gate_proj.weight",), Layout.COLUMN, when=dense)
GATE = Rule("mlp.gate.weight", ("mlp.up_proj.weight",), Layout.COLUMN, when=dense)
PROJ = Rule("mlp.proj.weight", ("mlp.down_proj.weight",), Layout.ROW, when=dense)
FC_BIAS = Rule("mlp.fc.bias", ("mlp.gate_proj.bias",), Layout.COLUMN, when=mlp_bias)
GATE_BIAS = Rule("mlp.gate.bias", ("mlp.up_proj.bias",), Layout.COLUMN, when=mlp_bias)
PROJ_BIAS = Rule("mlp.proj.bias", ("mlp.down_proj.bias",), when=mlp_bias)
