"""Build a :class:`~.model.Model` from a checkpoint folder."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .attention import AttentionRule
from .config import ModelConfig, read_config
from .errors import EngineError
from .linear import Arena, Linear, Prepare, Stacked
from .mlp import ACTIVATIONS, ExpertsMlp, GatedMlp, PlainMlp
from .model import Block, Layer, Model, Norm
from .quantized import LinearSource, read_experts, read_kv_rounding, read_linear
from .rope import RotaryTable, inverse_frequencies
from .safetensors_file import to_float32
from .weights import Checkpoint, Join

F32 = npt.NDArray[np.float32]


def load_model(folder: Path, *, max_seq_len: int | None = None) -> Model:
    """Read, join and widen a checkpoint.

    Args:
        folder: Has ``config.json`` and ``rank*.safetensors``.
        max_seq_len: Length of the position tables; the model's own by default, and at most that.

    Raises:
        EngineError: Anything is missing, has the wrong shape, is left over, or is of a kind the engine does not know.
    """
    config = read_config(folder)
    if config.quantization.covers("lm_head"):
        raise EngineError(f"{folder}: a quantized lm_head is not supported; expected it among exclude_modules")
    if max_seq_len is not None and not 1 <= max_seq_len <= config.max_seq_len:
        raise EngineError(f"max_seq_len is {max_seq_len}; the model has positions for 1 to {config.max_seq_len} tokens")
    if config.hidden_act not in ACTIVATIONS:
        raise EngineError(f"{folder}: hidden_act {config.hidden_act!r} is unknown; known are {', '.join(ACTIVATIONS)}")
    loader = _Loader(Checkpoint(folder, config), config)
    model = loader.model(max_seq_len or config.max_seq_len)
    loader.checkpoint.require_all_used()
    return model


class _Loader:
    def __init__(self, checkpoint: Checkpoint, config: ModelConfig) -> None:
        self.checkpoint = checkpoint
        self.config = config
        self._act = ACTIVATIONS[config.hidden_act]
        self._arena = Arena()

    def model(self, length: int) -> Model:
        config = self.config
        table = (config.vocab_size, config.hidden_size)
        layers = tuple(self._layer(index) for index in range(config.layers))
        embedding = self._keep(self._embedding(table))
        return Model(
            config=config,
            max_seq_len=length,
            embedding=embedding,
            layers=layers,
            final_norm=self._norm("transformer.ln_f"),
            head=self._head(table, embedding),
            rotaries=self._rotaries(length),
            positions=self._positions(length),
        )

    def _rotaries(self, length: int) -> tuple[RotaryTable, ...]:
        config = self.config
        if not config.rotary_dim:
            return ()
        kinds = [(config.rotary_base, config.rotary_scaling)]
        if config.rotary_local_base is not None:
            kinds.append((float(config.rotary_local_base), None))
        tables = []
        for base, scaling in kinds:
            frequencies, factor = inverse_frequencies(config.rotary_dim, base, scaling, length)
            tables.append(RotaryTable.build(frequencies, length, factor))
        return tuple(tables)

    def _positions(self, length: int) -> F32 | None:
        if self.config.rotary_dim:
            return None
        shape = (self.config.max_position_embeddings, self.config.hidden_size)
        return to_float32(self.checkpoint.tensor("transformer.position_embedding.weight", "same", shape)[:length])

    def _embedding(self, shape: tuple[int, int]) -> npt.NDArray[Any]:
        joins: dict[int | None, Join] = {None: "same", 0: "rows", 1: "columns"}
        return self.checkpoint.tensor("transformer.vocab_embedding.weight", joins[self.config.embedding_split], shape)

    def _head(self, shape: tuple[int, int], embedding: F32) -> F32:
        name = "lm_head.weight"
        if not self.checkpoint.has(name):
            # A tied model may leave its head out, except where the head is on another rank than the embedding.
            if self.config.pp == 1 and (self.config.tp == 1 or self.config.embedding_split == 0):
                return embedding
            raise EngineError(f"{self.checkpoint.folder}: tensor {name} is missing, and other ranks have the embedding")
        head = to_float32(self.checkpoint.tensor(name, "rows", shape))
        return embedding if np.array_equal(head, embedding) else self._keep(head)

    def _layer(self, index: int) -> Layer:
        config, prefix = self.config, f"transformer.layers.{index}"
        attention = f"{prefix}.attention"
        q_rows, kv_rows = config.heads * config.head_size, config.kv_heads * config.head_size
        qkv = self._linear(f"{attention}.qkv", (q_rows + 2 * kv_rows, config.hidden_size), "qkv", bias=config.attn_bias)
        has_dense_bias = config.attn_bias and config.family.dense_bias
        dense = self._linear(f"{attention}.dense", (config.hidden_size, q_rows), "columns", bias=has_dense_bias)
        post = self._norm(f"{prefix}.post_layernorm")
        has_heads_norm = config.family.qk_norm
        is_local = config.is_local(index)
        rotary = 1 if is_local and config.rotary_local_base is not None else 0
        return Layer(
            input_norm=self._norm(f"{prefix}.input_layernorm"),
            qkv=self._placed(qkv),
            dense=self._placed(dense),
            mlp_norm=self._norm(f"{prefix}.pre_feedforward_layernorm") if config.inter_norms else post,
            mlp=self._mlp(f"{prefix}.mlp"),
            attention=AttentionRule(
                scale=config.query_divisor**-0.5,
                window=config.sliding_window if is_local else None,
                softcap=config.attention_softcap,
                quantize_kv=read_kv_rounding(self.checkpoint, config.quantization.kv_cache, attention),
            ),
            rotary=rotary if config.rotary_dim else None,
            q_norm=self._norm(f"{attention}.q_layernorm", config.head_size) if has_heads_norm else None,
            k_norm=self._norm(f"{attention}.k_layernorm", config.head_size) if has_heads_norm else None,
            after_attention=post if config.inter_norms else None,
            after_mlp=self._norm(f"{prefix}.post_feedforward_layernorm") if config.inter_norms else None,
        )

    def _mlp(self, prefix: str) -> Block:
        config = self.config
        hidden, middle = config.hidden_size, config.intermediate_size
        if config.experts is not None:
            return self._experts(prefix)
        proj = self._placed(self._linear(f"{prefix}.proj", (hidden, middle), "columns", bias=config.mlp_bias))
        if config.family.mlp == "fused":
            fused = self._linear(f"{prefix}.fc", (2 * middle, hidden), "halves", bias=config.mlp_bias)
            return GatedMlp(self._placed(_swap_halves(fused)), proj, self._act)
        fc = self._linear(f"{prefix}.fc", (middle, hidden), "rows", bias=config.mlp_bias)
        if config.family.mlp == "plain":
            return PlainMlp(self._placed(fc), proj, self._act)
        gate = self._linear(f"{prefix}.gate", (middle, hidden), "rows", bias=config.mlp_bias)
        return GatedMlp(self._stacked(fc, gate), proj, self._act)

    def _experts(self, prefix: str) -> ExpertsMlp:
        config, experts = self.config, self.config.experts
        if experts is None:
            raise EngineError(f"{prefix}: the config has no experts")
        hidden, middle = config.hidden_size, config.intermediate_size
        fused = read_experts(self._source(f"{prefix}.fc", (2 * middle, hidden), "halves"), experts.count)
        projs = read_experts(self._source(f"{prefix}.proj", (hidden, middle), "columns"), experts.count)
        router = self.checkpoint.tensor(f"{prefix}.router.weight", "same", (experts.count, hidden))
        return ExpertsMlp(
            router=to_float32(router),
            experts=tuple(
                GatedMlp(self._placed(_swap_halves(fc)), self._placed(proj), self._act)
                for fc, proj in zip(fused, projs, strict=True)
            ),
            top_k=experts.top_k,
            renormalize=experts.renormalize,
        )

    def _norm(self, prefix: str, size: int | None = None) -> Norm:
        shape = (size or self.config.hidden_size,)
        weight = to_float32(self.checkpoint.tensor(f"{prefix}.weight", "same", shape))
        bias = None
        if self.config.family.norm == "layer":
            bias = to_float32(self.checkpoint.tensor(f"{prefix}.bias", "same", shape))[:, None]
        return Norm(weight[:, None], self.config.norm_epsilon, bias)

    def _source(self, prefix: str, shape: tuple[int, int], join: Join) -> LinearSource:
        layer, block, module = prefix.rsplit(".", 2)
        inputs = {
            "qkv": f"{layer}.input_layernorm.scale_to_int",
            "dense": f"{layer}.{block}.quantization_scaling_factor",
            "proj": f"{layer}.{block}.quantization_scaling_factor",
        }
        input_scale = inputs.get(module, f"{layer}.post_layernorm.scale_to_int")
        return LinearSource(self.checkpoint, self.config, prefix, shape, join, input_scale)

    def _linear(self, prefix: str, shape: tuple[int, int], join: Join, *, bias: bool) -> Linear:
        linear = read_linear(self._source(prefix, shape, join))
        if not bias:
            return linear
        stored = self.checkpoint.vector(f"{prefix}.bias", "same" if join == "columns" else join, shape[0])
        return replace(linear, bias=stored[:, None])

    def _stacked(self, first: Linear, second: Linear) -> Linear | Stacked:
        """Put two layers of one input into one matrix, if they treat the input alike."""
        if not _are_equal(first.prepare, second.prepare):
            return Stacked((self._placed(first), self._placed(second)))
        biases = [linear.bias for linear in (first, second) if linear.bias is not None]
        weight = self._keep(np.concatenate([first.weight, second.weight]))
        return Linear(weight, np.concatenate(biases) if biases else None, first.prepare)

    def _placed(self, linear: Linear) -> Linear:
        return replace(linear, weight=self._keep(linear.weight))

    def _keep(self, stored: npt.NDArray[Any]) -> F32:
        kept = self._arena.empty(stored.shape)
        kept[...] = stored if stored.dtype == np.float32 else to_float32(stored)
        return kept


def _swap_halves(fused: Linear) -> Linear:
    """Turn rows of gate, then fc, into rows of fc, then gate."""
    bias = None if fused.bias is None else np.concatenate(np.split(fused.bias, 2)[::-1])
    return Linear(np.concatenate(np.split(fused.weight, 2)[::-1]), bias, fused.prepare)


def _are_equal(first: Prepare | None, second: Prepare | None) -> bool:
    """Compare two preparations by value; dataclass equality would compare their arrays by element."""
    if first is None or second is None or type(first) is not type(second):
        return first is second
    pairs = [(getattr(first, f.name), getattr(second, f.name)) for f in fields(first)]  # type: ignore[arg-type]
    return all(
        np.array_equal(a, b) if isinstance(a, np.ndarray) else _are_equal(a, b) if callable(a) else a == b
        for a, b in pairs
    )
