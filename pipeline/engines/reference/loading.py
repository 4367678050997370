"""Build a :class:`~.model.Model` from a checkpoint folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .attention import AttentionRule
from .config import ModelConfig, read_config
from .errors import EngineError
from .linear import Arena, Linear
from .model import Layer, Mlp, Model, Norm, silu
from .rope import RotaryTable, inverse_frequencies
from .safetensors_file import to_float32
from .weights import Checkpoint, Join

F32 = npt.NDArray[np.float32]
ACTIVATIONS = {"silu": silu, "swiglu": silu}


def load_model(folder: Path, *, max_seq_len: int | None = None) -> Model:
    """Read, join and widen a checkpoint.

    Args:
        folder: Has ``config.json`` and ``rank*.safetensors``.
        max_seq_len: Length of the position tables; the model's own by default, and at most that.

    Raises:
        EngineError: Anything is missing, has the wrong shape, is left over, or is of a kind the engine does not know.
    """
    config = read_config(folder)
    if config.quantization.algo is not None or config.quantization.kv_cache is not None:
        raise EngineError(f"{folder}: quantization {config.quantization.algo!r} is not supported")
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
        self._arena = Arena()

    def model(self, length: int) -> Model:
        config = self.config
        table = (config.vocab_size, config.hidden_size)
        frequencies = inverse_frequencies(config.rotary_dim, config.rotary_base, config.rotary_scaling)
        layers = tuple(self._layer(index) for index in range(config.layers))
        embedding = self._keep(self._embedding(table))
        return Model(
            config=config,
            embedding=embedding,
            layers=layers,
            final_norm=self._norm("transformer.ln_f"),
            head=self._head(table, embedding),
            rotary=RotaryTable.build(frequencies, length),
        )

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
        config = self.config
        prefix = f"transformer.layers.{index}"
        q_rows, kv_rows = config.heads * config.head_size, config.kv_heads * config.head_size
        hidden, middle = config.hidden_size, config.intermediate_size
        has_dense_bias = config.attn_bias and config.family.dense_bias_with_qkv
        fc = self._read(f"{prefix}.mlp.fc", (middle, hidden), "rows", has_bias=config.mlp_bias)
        gate = self._read(f"{prefix}.mlp.gate", (middle, hidden), "rows", has_bias=config.mlp_bias)
        return Layer(
            input_norm=self._norm(f"{prefix}.input_layernorm"),
            qkv=self._linear(
                f"{prefix}.attention.qkv", (q_rows + 2 * kv_rows, hidden), "qkv", has_bias=config.attn_bias
            ),
            dense=self._linear(f"{prefix}.attention.dense", (hidden, q_rows), "columns", has_bias=has_dense_bias),
            post_norm=self._norm(f"{prefix}.post_layernorm"),
            mlp=Mlp(
                fc_gate=self._stack(fc, gate),
                proj=self._linear(f"{prefix}.mlp.proj", (hidden, middle), "columns", has_bias=config.mlp_bias),
                act=ACTIVATIONS[config.hidden_act],
            ),
            attention=AttentionRule(scale=config.head_size**-0.5),
        )

    def _norm(self, prefix: str) -> Norm:
        weight = self.checkpoint.tensor(f"{prefix}.weight", "same", (self.config.hidden_size,))
        return Norm(to_float32(weight)[:, None], self.config.norm_epsilon)

    def _linear(self, prefix: str, shape: tuple[int, int], join: Join, *, has_bias: bool) -> Linear:
        linear = self._read(prefix, shape, join, has_bias=has_bias)
        return replace(linear, weight=self._keep(linear.weight))

    def _read(self, prefix: str, shape: tuple[int, int], join: Join, *, has_bias: bool) -> Linear:
        weight = to_float32(self.checkpoint.tensor(f"{prefix}.weight", join, shape))
        if not has_bias:
            return Linear(weight)
        bias = self.checkpoint.tensor(f"{prefix}.bias", "same" if join == "columns" else join, shape[:1])
        return Linear(weight, to_float32(bias)[:, None])

    def _stack(self, first: Linear, second: Linear) -> Linear:
        bias = None
        if first.bias is not None and second.bias is not None:
            bias = np.concatenate([first.bias, second.bias])
        return Linear(self._keep(np.concatenate([first.weight, second.weight])), bias)

    def _keep(self, stored: npt.NDArray[Any]) -> F32:
        kept = self._arena.empty(stored.shape)
        kept[...] = to_float32(stored)
        return kept
