"""Read a Hugging Face ``config.json`` of either style (transformers 4 or 5) into one value. No numpy here."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.errors import SourceError

# Rope scaling types the TensorRT-LLM model reads; anything else stops the engine build.
ROPE_TYPES = ("linear", "dynamic", "longrope", "llama3", "yarn", "mrope")

# What a scaling object must state; transformers refuses it without.
_ROPE_NUMBERS: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}

# Model types whose transformers class shares head and embedding when the config does not say.
_TIED_BY_DEFAULT = {"gemma", "gemma2", "gemma3", "gemma3_text", "gpt2", "starcoder2"}


@dataclass(frozen=True, slots=True)
class Architecture:
    """The facts of a decoder that conversion needs, under one set of names.

    Attributes:
        name: First of ``architectures``, verbatim.
        model_type: ``llama``, ``qwen2`` …
        dtype: ``torch_dtype`` or ``dtype`` of the config; empty if it says none.
        num_kv_heads: True number, before any duplication.
        head_dim: ``head_dim`` (or ``kv_channels``) if stated and not null, else hidden_size / num_heads.
        rope_theta: None if the config says none; each family knows its default.
        rope_scaling: The scaling object without the base; None if there is none or its type is ``default``.
        rotary_factor: Part of each head that is rotated.
        tied: Whether the output head is the embedding.
        attention_bias: Whether q, k, v and o have biases.
        sliding_window: Window in tokens if it is in use, else None.
        num_experts: 0 for dense models.
        raw: The whole config.
    """

    name: str
    model_type: str
    dtype: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    hidden_act: str
    norm_eps: float
    max_positions: int | None
    rope_theta: float | None
    rope_scaling: Mapping[str, Any] | None
    rotary_factor: float
    tied: bool
    attention_bias: bool
    mlp_bias: bool
    sliding_window: int | None
    num_experts: int
    raw: Mapping[str, Any] = field(repr=False, hash=False, compare=False)


class _Fields:
    """Typed access to a config, with errors that name file and key."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where

    def first(self, *names: str) -> Any:
        return next((self.raw[n] for n in names if self.raw.get(n) is not None), None)

    def stated(self, *names: str) -> str:
        """Return the name under which a value is stated, the first one if it is not."""
        return next((n for n in names if self.raw.get(n) is not None), names[0])

    def whole(self, *names: str, default: int | None = None) -> int:
        value = self.first(*names)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise SourceError(f"{self.where}: {self.stated(*names)} is {value!r}; expected a whole number from 1")
        return value

    def positive(self, *names: str) -> float | None:
        value = self.first(*names)
        if value is None:
            return None
        # JSON as Python reads it has NaN, infinities, and integers beyond any float.
        known = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not known or not 0 < value <= sys.float_info.max:
            raise SourceError(f"{self.where}: {self.stated(*names)} is {value!r}; expected a number above 0")
        return value  # type: ignore[no-any-return]  # a number, see above

    def flag(self, *names: str, default: bool = False) -> bool:
        value = self.first(*names)
        return default if value is None else bool(value)


def load_config(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        SourceError: The file is missing, is no JSON, or no object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SourceError(f"{path}: does not exist", hint="the source folder needs the model's config.json") from None
    except (ValueError, OSError, RecursionError) as error:
        hint = "save it as UTF-8 without a byte order mark" if "BOM" in str(error) else ""
        raise SourceError(f"{path}: cannot be read as JSON ({error})", hint=hint) from error
    if not isinstance(value, dict):
        raise SourceError(f"{path}: holds {type(value).__name__}; expected a JSON object")
    return value


def read_architecture(raw: Mapping[str, Any], where: str = "config.json") -> Architecture:
    """Read a Hugging Face config of a decoder.

    Args:
        raw: The config object.
        where: File name for errors.

    Raises:
        SourceError: A needed key is missing, or a value is out of range or unknown; names the key.
    """
    fields = _Fields(raw, where)
    names = raw.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise SourceError(f"{where}: architectures is {names!r}; expected a list with the model class")
    hidden = fields.whole("hidden_size", "n_embd")
    heads = fields.whole("num_attention_heads", "n_head")
    kv_heads = fields.whole("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise SourceError(f"{where}: {heads} attention heads over {kv_heads} key/value heads do not divide evenly")
    stated_dim = fields.first("kv_channels", "head_dim")
    if stated_dim is None and hidden % heads:
        raise SourceError(f"{where}: hidden_size {hidden} is no multiple of {heads} heads and head_dim is not stated")
    model_type = str(raw.get("model_type", ""))
    theta, scaling, rotary_factor = _rope(fields)
    return Architecture(
        name=names[0],
        model_type=model_type,
        dtype=str(fields.first("torch_dtype", "dtype") or "").removeprefix("torch."),
        vocab_size=fields.whole("vocab_size"),
        hidden_size=hidden,
        num_layers=fields.whole("num_hidden_layers", "n_layer"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=fields.whole("kv_channels", "head_dim", default=hidden // heads),
        intermediate_size=fields.whole("intermediate_size", "n_inner", default=4 * hidden),
        hidden_act=str(fields.first("hidden_activation", "hidden_act", "activation_function") or "silu"),
        norm_eps=fields.positive("rms_norm_eps", "layer_norm_epsilon", "norm_epsilon") or 1e-5,
        max_positions=fields.whole("max_position_embeddings", "n_positions"),
        rope_theta=theta,
        rope_scaling=scaling,
        rotary_factor=rotary_factor,
        tied=fields.flag("tie_word_embeddings", default=model_type in _TIED_BY_DEFAULT),
        attention_bias=fields.flag("attention_bias", "bias", "use_bias"),
        mlp_bias=fields.flag("mlp_bias"),
        sliding_window=_sliding_window(fields),
        num_experts=fields.whole("num_local_experts", default=1) if raw.get("num_local_experts") else 0,
        raw=dict(raw),
    )


def _rope(fields: _Fields) -> tuple[float | None, Mapping[str, Any] | None, float]:
    """Return base, scaling and rotated part from ``rope_theta`` + ``rope_scaling`` or from ``rope_parameters``.

    Where ``rope_parameters`` has an object per kind of layer, that of ``full_attention`` counts.
    """
    theta = fields.positive("rope_theta")
    factor = fields.positive("partial_rotary_factor") or 1.0
    scaling = fields.first("rope_scaling")
    parameters = fields.first("rope_parameters")
    if isinstance(parameters, Mapping):
        own = parameters.get("full_attention", parameters)
        if not isinstance(own, Mapping):
            raise SourceError(f"{fields.where}: rope_parameters.full_attention is {own!r}; expected an object")
        inner = _Fields(own, f"{fields.where}: rope_parameters")
        theta = inner.positive("rope_theta") or theta
        factor = inner.positive("partial_rotary_factor") or factor
        if scaling is None:
            scaling = {key: own[key] for key in own if key not in ("rope_theta", "partial_rotary_factor")}
    return theta, _scaling(fields, scaling), factor


def _scaling(fields: _Fields, scaling: object) -> Mapping[str, Any] | None:
    """Return a scaling object that the model class can read, None for the default."""
    if scaling is None:
        return None
    if not isinstance(scaling, Mapping):
        raise SourceError(f"{fields.where}: rope_scaling is {scaling!r}; expected an object or null")
    kind = scaling.get("type", scaling.get("rope_type"))
    if kind in (None, "default", "none"):
        return None
    # The first Phi-3 configs call the same scaling "su".
    if kind not in ROPE_TYPES and not (kind == "su" and fields.raw.get("model_type") == "phi3"):
        raise SourceError(
            f"{fields.where}: rope scaling type is {kind!r}; expected one of {', '.join(ROPE_TYPES)} or default",
            hint="TensorRT-LLM would refuse it at build; there is no equivalent to convert it to",
        )
    inner = _Fields(scaling, f"{fields.where}: rope_scaling")
    numbers = {name: inner.positive(name) for name in _ROPE_NUMBERS.get(kind, ())}
    missing = [name for name, value in numbers.items() if value is None]
    if missing:
        raise SourceError(f"{inner.where} of type {kind!r} lacks {', '.join(missing)}; transformers refuses that too")
    if kind == "llama3" and numbers["low_freq_factor"] == numbers["high_freq_factor"]:
        raise SourceError(f"{inner.where}: low_freq_factor and high_freq_factor are equal; expected a range")
    return dict(scaling)


def _sliding_window(fields: _Fields) -> int | None:
    """Return the window in use.

    Qwen configs state one that ``use_sliding_window: false`` switches off, or that only layers from
    ``max_window_layers`` on have; ``layer_types`` may say that no layer has it.
    """
    window = fields.first("sliding_window")
    if window is None or not fields.flag("use_sliding_window", default=True):
        return None
    kinds = fields.first("layer_types")
    if isinstance(kinds, list) and "sliding_attention" not in kinds:
        return None
    if "use_sliding_window" in fields.raw and kinds is None:
        layers = fields.whole("num_hidden_layers")
        if int(fields.first("max_window_layers") or 0) >= layers:
            return None
    return fields.whole("sliding_window")
