"""The decoder: weights in float32 and the forward pass over a packed step.

Letters: T packed tokens, h hidden size, H query heads, K key/value heads, d head size, I MLP size, V vocabulary.
Hidden states are feature-major, [h, T] float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .attention import AttentionRule, KvCache, Segment, attend
from .config import ModelConfig
from .linear import Linear, multiply, multiply_to_rows
from .rope import RotaryTable, rotate
from .threads import Workers

F32 = npt.NDArray[np.float32]
Activation = Callable[[F32], F32]


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm, or LayerNorm when it has a bias, over the first axis.

    Attributes:
        weight: [h, 1] float32.
        bias: [h, 1] float32 or None.
    """

    weight: F32
    epsilon: float
    bias: F32 | None = None

    def __call__(self, x: F32) -> F32:
        """Return the normalized [h, T]."""
        if self.bias is not None:
            x = x - x.mean(axis=0)
        power = np.square(x).mean(axis=0)
        power += np.float32(self.epsilon)
        out: F32 = x / np.sqrt(power)
        out *= self.weight
        if self.bias is not None:
            out += self.bias
        return out


def silu(x: F32) -> F32:
    """Return x * sigmoid(x)."""
    # NOTE: exp overflows to inf for x below -88, and x / inf is the right answer, 0.
    with np.errstate(over="ignore"):
        out = np.exp(-x)
    out += np.float32(1)
    np.divide(x, out, out=out)
    return out


@dataclass(frozen=True, slots=True)
class Mlp:
    """Gated MLP: proj(act(fc(x)) * gate(x)).

    Attributes:
        fc_gate: Rows of fc, then rows of gate.
    """

    fc_gate: Linear
    proj: Linear
    act: Activation

    def __call__(self, x: F32, workers: Workers) -> F32:
        """Return [h, T] for x [h, T]."""
        both = self.fc_gate(x, workers)
        middle = both.shape[0] // 2
        active = self.act(both[:middle])
        active *= both[middle:]
        return self.proj(active, workers)


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer."""

    input_norm: Norm
    qkv: Linear
    dense: Linear
    post_norm: Norm
    mlp: Mlp
    attention: AttentionRule


@dataclass(frozen=True, slots=True)
class Model:
    """A whole model, joined from its ranks.

    Attributes:
        embedding: [V, h] float32.
        head: [V, h] float32; the embedding itself when the two are equal.
    """

    config: ModelConfig
    embedding: F32
    layers: tuple[Layer, ...]
    final_norm: Norm
    head: F32
    rotary: RotaryTable

    @property
    def max_seq_len(self) -> int:
        """Positions there are tables for."""
        return int(self.rotary.cos.shape[0])

    def probe(self, workers: Workers) -> None:
        """Run the products of two layers for one token, to measure how fast they are."""
        for layer in self.layers[:2]:
            for linear in (layer.qkv, layer.dense, layer.mlp.fc_gate, layer.mlp.proj):
                multiply(linear.weight, np.zeros((linear.weight.shape[1], 1), np.float32), workers)

    def new_cache(self) -> KvCache:
        """Return an empty cache for one sequence."""
        return KvCache(len(self.layers), self.config.kv_heads, self.config.head_size)

    def forward(self, token_ids: npt.NDArray[np.intp], segments: Sequence[Segment], workers: Workers) -> F32:
        """Run the packed tokens [T] through all layers; returns normalized hidden states [h, T].

        The caches of the segments gain the new tokens, but their ``length`` is the caller's to move.
        """
        positions = np.concatenate([np.arange(s.start, s.start + s.count) for s in segments])
        x = np.ascontiguousarray(self.embedding[token_ids].T)
        cos, sin = self.rotary.rows(positions)
        for index, layer in enumerate(self.layers):
            x += self._attend(layer, index, layer.input_norm(x), (cos, sin), segments, workers)
            x += layer.mlp(layer.post_norm(x), workers)
        return self.final_norm(x)

    def logits(self, hidden: F32, workers: Workers) -> F32:
        """Return [T, V] float32 for hidden states [h, T]."""
        return multiply_to_rows(self.head, hidden, workers)

    def _attend(
        self, layer: Layer, index: int, x: F32, rotation: tuple[F32, F32], segments: Sequence[Segment], workers: Workers
    ) -> F32:
        config = self.config
        heads, kv_heads = config.heads, config.kv_heads
        packed = np.ascontiguousarray(layer.qkv(x, workers).T).reshape(-1, heads + 2 * kv_heads, config.head_size)
        rotate(packed[:, : heads + kv_heads], *rotation)
        q, k, v = np.split(packed, (heads, heads + kv_heads), axis=1)
        gathered = attend(np.ascontiguousarray(q), k, v, segments, index, layer.attention, workers)
        return layer.dense(np.ascontiguousarray(gathered.T), workers)
