"""What a finished TensorRT-LLM checkpoint must hold, told from its ``config.json`` alone. No numpy here.

Written from the side of the model that loads the checkpoint, independent of the family tables that produce it, so
that a rule that was forgotten there is noticed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pipeline.checkpoint.quantized_contract import Spec, quantized_layer
from pipeline.errors import SourceError


@dataclass(frozen=True, slots=True)
class _Model:
    """What the model class of an architecture has, beyond what all decoders have.

    Attributes:
        attention_bias: Config key that says whether q, k and v have a bias.
        mlp_bias: Config key that says whether the MLP has biases.
        dense_bias: Whether the attention output has a bias where q, k and v have one.
        norm_bias: Whether norms have a bias.
        mlp: ``gated`` (fc and gate apart), ``fused`` (both in fc), ``plain`` (fc alone).
        qk_norm: Whether queries and keys are normalized per head.
        inner_norms: Whether attention and MLP outputs are normalized too.
        positions: Whether positions are learned.
    """

    attention_bias: str = "attn_bias"
    mlp_bias: str = "mlp_bias"
    dense_bias: bool = True
    norm_bias: bool = False
    mlp: str = "gated"
    qk_norm: bool = False
    inner_norms: bool = False
    positions: bool = False


_GPT = _Model(attention_bias="bias", mlp_bias="bias", norm_bias=True, mlp="plain")
_MODELS: Mapping[str, _Model] = {
    "LlamaForCausalLM": _Model(),
    "MistralForCausalLM": _Model(),
    "MixtralForCausalLM": _Model(),
    "Qwen2ForCausalLM": _Model(dense_bias=False),
    "Qwen3ForCausalLM": _Model(dense_bias=False, qk_norm=True),
    "GemmaForCausalLM": _Model(),
    "Gemma2ForCausalLM": _Model(inner_norms=True),
    "Gemma3ForCausalLM": _Model(inner_norms=True, qk_norm=True),
    "Phi3ForCausalLM": _Model(mlp="fused"),
    "GPT2LMHeadModel": replace(_GPT, positions=True),
    "GPTForCausalLM": replace(_GPT, positions=True),
    "Starcoder2ForCausalLM": _GPT,
}


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Sizes of one rank."""

    hidden: int
    head: int
    q_rows: int
    kv_rows: int
    mlp: int
    vocab: int
    padded_vocab: int


def expected_tensors(config: Mapping[str, Any]) -> list[dict[str, Spec]]:
    """Return, for each rank, the tensors its file must hold: name to shape and type.

    Args:
        config: The checkpoint's ``config.json``.

    Raises:
        SourceError: The architecture is unknown, or a needed key is missing.
    """
    try:
        mapping = config["mapping"]
        tp, pp = int(mapping.get("tp_size", 1)), int(mapping.get("pp_size", 1))
        layers = int(config["num_hidden_layers"])
        each, extra = divmod(layers, pp)
        ranks: list[dict[str, Spec]] = []
        for stage in range(pp):
            spec = dict(_rank(config, tp, each + (stage < extra), stage == 0, stage == pp - 1))
            ranks.extend(dict(spec) for _ in range(tp))
    except KeyError as error:
        raise SourceError(f"config.json: lacks {error.args[0]!r}; expected a TensorRT-LLM checkpoint") from None
    return ranks


def _rank(config: Mapping[str, Any], tp: int, layers: int, first: bool, last: bool) -> Iterator[tuple[str, Spec]]:
    dtype = str(config["dtype"])
    model = _MODELS.get(str(config["architecture"]))
    if model is None:
        raise SourceError(f"config.json: no contract for architecture {config['architecture']}")
    sizes = _sizes(config, tp)
    if first:
        yield "transformer.vocab_embedding.weight", (_embedding(config, sizes, tp), dtype)
        if model.positions:
            yield (
                "transformer.position_embedding.weight",
                ((int(config["max_position_embeddings"]), sizes.hidden), dtype),
            )
    layer_tensors = {
        name: (shape, "float32" if name == "mlp.router.weight" else dtype)
        for name, shape in _layer(config, model, sizes)
    }
    quantized = quantized_layer(config, layer_tensors)
    for layer in range(layers):
        for name, spec in quantized.items():
            yield f"transformer.layers.{layer}.{name}", spec
    if last:
        for kind in _norm_kinds(model):
            yield f"transformer.ln_f.{kind}", ((sizes.hidden,), dtype)
        yield "lm_head.weight", ((sizes.padded_vocab // tp, sizes.hidden), dtype)


def _norm_kinds(model: _Model) -> tuple[str, ...]:
    return ("weight", "bias") if model.norm_bias else ("weight",)


def _sizes(config: Mapping[str, Any], tp: int) -> _Sizes:
    head = int(config["head_size"])
    vocab = int(config["vocab_size"])
    return _Sizes(
        hidden=int(config["hidden_size"]),
        head=head,
        q_rows=int(config["num_attention_heads"]) // tp * head,
        kv_rows=-(-int(config["num_key_value_heads"]) // tp) * head,
        mlp=int(config["intermediate_size"]) // tp,
        vocab=vocab,
        padded_vocab=-(-vocab // tp) * tp,
    )


def _embedding(config: Mapping[str, Any], sizes: _Sizes, tp: int) -> tuple[int, int]:
    if not config.get("use_parallel_embedding"):
        return sizes.vocab, sizes.hidden
    if config.get("embedding_sharding_dim"):
        return sizes.vocab, sizes.hidden // tp
    return sizes.padded_vocab // tp, sizes.hidden


def _layer(config: Mapping[str, Any], model: _Model, sizes: _Sizes) -> Iterator[tuple[str, tuple[int, ...]]]:
    norms = ["input_layernorm", "post_layernorm"]
    if model.inner_norms:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for norm in norms:
        for kind in _norm_kinds(model):
            yield f"{norm}.{kind}", (sizes.hidden,)
    qkv_rows = sizes.q_rows + 2 * sizes.kv_rows
    yield "attention.qkv.weight", (qkv_rows, sizes.hidden)
    yield "attention.dense.weight", (sizes.hidden, sizes.q_rows)
    if config.get(model.attention_bias):
        yield "attention.qkv.bias", (qkv_rows,)
        if model.dense_bias:
            yield "attention.dense.bias", (sizes.hidden,)
    if model.qk_norm:
        yield "attention.q_layernorm.weight", (sizes.head,)
        yield "attention.k_layernorm.weight", (sizes.head,)
    yield from _mlp(config, model, sizes)


def _mlp(config: Mapping[str, Any], model: _Model, sizes: _Sizes) -> Iterator[tuple[str, tuple[int, ...]]]:
    experts = int((config.get("moe") or {}).get("num_experts", 0))
    if experts:
        yield "mlp.router.weight", (experts, sizes.hidden)
        yield "mlp.fc.weight", (experts, 2 * sizes.mlp, sizes.hidden)
        yield "mlp.proj.weight", (experts, sizes.hidden, sizes.mlp)
        return
    fc_rows = 2 * sizes.mlp if model.mlp == "fused" else sizes.mlp
    linears = {"fc": (fc_rows, sizes.hidden), "proj": (sizes.hidden, sizes.mlp)}
    if model.mlp == "gated":
        linears["gate"] = (sizes.mlp, sizes.hidden)
    for name, shape in linears.items():
        yield f"mlp.{name}.weight", shape
        if config.get(model.mlp_bias):
            yield f"mlp.{name}.bias", shape[:1]
