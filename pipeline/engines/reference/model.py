"""The decoder: weights in float32 and the forward pass over a packed step.

Letters: T packed tokens, h hidden size, H query heads, K key/value heads, d head size, I MLP size, V vocabulary.
Hidden states are feature-major, [h, T] float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from .attention import AttentionRule, KvCache, Segment, attend
from .config import ModelConfig
from .linear import Product, multiply_to_rows
from .rope import RotaryTable, rotate
from .threads import Workers

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm, or LayerNorm when it has a bias.

    Attributes:
        weight: [h, 1] float32, for feature-major states.
        bias: [h, 1] float32 or None.
    """

    weight: F32
    epsilon: float
    bias: F32 | None = None

    def __call__(self, x: F32) -> F32:
        """Return the normalized [h, T]."""
        # np.add.reduce and not mean(): the method's Python part costs more than the sum of one token.
        share = np.float32(1 / x.shape[0])
        if self.bias is not None:
            x = x - np.add.reduce(x, axis=0) * share
        power = np.add.reduce(np.square(x), axis=0)
        power *= share
        power += np.float32(self.epsilon)
        np.sqrt(power, out=power)
        out: F32 = x / power
        out *= self.weight
        if self.bias is not None:
            out += self.bias
        return out

    def heads(self, x: F32) -> None:
        """Normalize each head of ``x`` [T, H, d] in place; the weight has d rows."""
        power = np.square(x).mean(axis=-1, keepdims=True)
        power += np.float32(self.epsilon)
        x /= np.sqrt(power)
        x *= self.weight[:, 0]


class Block(Protocol):
    """A part of a layer that maps hidden states to hidden states, both [h, T]."""

    def __call__(self, x: F32, workers: Workers) -> F32:
        """Return what is added to the residual stream."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer.

    Attributes:
        qkv: Rows of all queries, then keys, then values.
        q_norm: Over each head of the queries, as ``k_norm`` of the keys; None for none.
        after_attention: Norm of the attention's output, as ``after_mlp`` of the MLP's; None for none.
        rotary: Which of the model's tables rotates; None for none.
    """

    input_norm: Norm
    qkv: Product
    dense: Product
    mlp_norm: Norm
    mlp: Block
    attention: AttentionRule
    rotary: int | None = 0
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    after_attention: Norm | None = None
    after_mlp: Norm | None = None


@dataclass(frozen=True, slots=True)
class Model:
    """A whole model, joined from its ranks.

    Attributes:
        max_seq_len: Positions there are tables for.
        embedding: [V, h] float32.
        head: [V, h] float32; the embedding itself when the two are equal.
        rotaries: Tables that layers refer to.
        positions: Learned position embedding [max_seq_len, h] float32 or None.
    """

    config: ModelConfig
    max_seq_len: int
    embedding: F32
    layers: tuple[Layer, ...]
    final_norm: Norm
    head: F32
    rotaries: tuple[RotaryTable, ...]
    positions: F32 | None = None

    def probe(self, workers: Workers) -> None:
        """Run the products of two layers for one token, to measure how fast they are."""
        x = np.zeros((self.config.hidden_size, 1), np.float32)
        for layer in self.layers[:2]:
            layer.qkv(x, workers)
            layer.mlp(x, workers)

    def new_cache(self) -> KvCache:
        """Return an empty cache for one sequence."""
        return KvCache(len(self.layers), self.config.kv_heads, self.config.head_size)

    def forward(self, token_ids: npt.NDArray[np.intp], segments: Sequence[Segment], workers: Workers) -> F32:
        """Run the packed tokens [T] through all layers; returns normalized hidden states [h, T].

        The caches of the segments gain the new tokens, but their ``length`` is the caller's to move.
        """
        positions = np.concatenate([np.arange(s.start, s.start + s.count) for s in segments])
        x = self._embed(token_ids, positions)
        rotations = [table.rows(positions) for table in self.rotaries]
        for index, layer in enumerate(self.layers):
            rotation = None if layer.rotary is None else rotations[layer.rotary]
            added = self._attend(layer, index, layer.input_norm(x), rotation, segments, workers)
            x += added if layer.after_attention is None else layer.after_attention(added)
            added = layer.mlp(layer.mlp_norm(x), workers)
            x += added if layer.after_mlp is None else layer.after_mlp(added)
        return self.final_norm(x)

    def logits(self, hidden: F32, workers: Workers) -> F32:
        """Return [T, V] float32 for hidden states [h, T]."""
        logits = multiply_to_rows(self.head, hidden, workers)
        if self.config.final_softcap is not None:
            logits /= np.float32(self.config.final_softcap)
            np.tanh(logits, out=logits)
            logits *= np.float32(self.config.final_softcap)
        return logits

    def _embed(self, token_ids: npt.NDArray[np.intp], positions: npt.NDArray[np.intp]) -> F32:
        x = self.embedding[token_ids]
        if self.config.family.scale_embedding:
            x *= np.float32(self.config.hidden_size**0.5)
        if self.positions is not None:
            x += self.positions[positions]
        return np.ascontiguousarray(x.T)

    def _attend(
        self,
        layer: Layer,
        index: int,
        x: F32,
        rotation: tuple[F32, F32] | None,
        segments: Sequence[Segment],
        workers: Workers,
    ) -> F32:
        heads, kv_heads = self.config.heads, self.config.kv_heads
        packed = np.ascontiguousarray(layer.qkv(x, workers).T).reshape(-1, heads + 2 * kv_heads, self.config.head_size)
        q, k, v = packed[:, :heads], packed[:, heads : heads + kv_heads], packed[:, heads + kv_heads :]
        if layer.q_norm is not None and layer.k_norm is not None:
            layer.q_norm.heads(q)
            layer.k_norm.heads(k)
        if rotation is not None:
            rotate(packed[:, : heads + kv_heads], *rotation)
        gathered = attend(np.ascontiguousarray(q), k, v, segments, index, layer.attention, workers)
        return layer.dense(np.ascontiguousarray(gathered.T), workers)
