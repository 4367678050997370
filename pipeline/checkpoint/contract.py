"""What a finished TensorRT-LLM checkpoint must hold, told from its ``config.json`` alone. No numpy here.

Written from the side of the model that loads the checkpoint, independent of the family tables that produce it, so
that a rule that was forgotten there is noticed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.errors import SourceError

Spec = tuple[tuple[int, ...], str]


@dataclass(frozen=True, slots=True)
class _Model:
    """What the model class of an architecture has.

    Attributes:
        qkv_bias: Whether the fused q, k, v has a bias whatever ``attn_bias`` says.
        dense_bias: Whether the attention output has a bias if q, k and v have one.
        qk_norm: Whether queries and keys are normalized per head.
    """

    qkv_bias: bool = False
    dense_bias: bool = True
    qk_norm: bool = False


_MODELS: Mapping[str, _Model] = {
    "LlamaForCausalLM": _Model(),
    "MistralForCausalLM": _Model(),
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
    for layer in range(layers):
        for name, shape in _layer(config, model, sizes):
            yield f"transformer.layers.{layer}.{name}", (shape, dtype)
    if last:
        yield "transformer.ln_f.weight", ((sizes.hidden,), dtype)
        yield "lm_head.weight", ((sizes.padded_vocab // tp, sizes.hidden), dtype)


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
    qkv_rows = sizes.q_rows + 2 * sizes.kv_rows
    yield "input_layernorm.weight", (sizes.hidden,)
    yield "post_layernorm.weight", (sizes.hidden,)
    yield "attention.qkv.weight", (qkv_rows, sizes.hidden)
    yield "attention.dense.weight", (sizes.hidden, sizes.q_rows)
    attention_bias = bool(config.get("attn_bias"))
    if attention_bias or model.qkv_bias:
        yield "attention.qkv.bias", (qkv_rows,)
    if attention_bias and model.dense_bias:
        yield "attention.dense.bias", (sizes.hidden,)
    if model.qk_norm:
        yield "attention.q_layernorm.weight", (sizes.head,)
        yield "attention.k_layernorm.weight", (sizes.head,)
    yield "mlp.fc.weight", (sizes.mlp, sizes.hidden)
    yield "mlp.gate.weight", (sizes.mlp, sizes.hidden)
    yield "mlp.proj.weight", (sizes.hidden, sizes.mlp)
    if config.get("mlp_bias"):
        yield "mlp.fc.bias", (sizes.mlp,)
        yield "mlp.gate.bias", (sizes.mlp,)
        yield "mlp.proj.bias", (sizes.hidden,)
