"""Ears on the engine's linear layers: what goes in, what comes out.

Letters: K inputs, N outputs, T tokens, L layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pipeline.checkpoint.linears import LayerLinears
from pipeline.engines.reference.attention import KvCache, Segment
from pipeline.engines.reference.linear import Product
from pipeline.engines.reference.mlp import GatedMlp, PlainMlp
from pipeline.engines.reference.model import Block, Layer, Model
from pipeline.engines.reference.threads import Workers
from pipeline.errors import SourceError

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Spot:
    """A product of the engine: linears that share an input, computed at once.

    Attributes:
        layer: Number of the layer.
        linears: Source names, in the order of their rows in the output.
    """

    layer: int
    linears: tuple[str, ...]


class Observer(Protocol):
    """What is told of every product."""

    def __call__(self, spot: Spot, x: F32, y: F32) -> None:
        """Look at the input [K, T] and the output [N, T]; neither may be changed."""


@dataclass(frozen=True, slots=True)
class _Observed:
    inner: Product
    spot: Spot
    observer: Observer

    def __call__(self, x: F32, workers: Workers) -> F32:
        y = self.inner(x, workers)
        self.observer(self.spot, x, y)
        return y


def observed(model: Model, linears: Sequence[LayerLinears], observer: Observer, layers: range) -> Model:
    """Return a model that tells ``observer`` of the products in ``layers``, and ends behind the last of them.

    Raises:
        SourceError: A layer is built in a way that has no single linear layers (mixtures of experts).
    """
    made = [
        _with_ears(layer, linears[index], index, observer) if index in layers else layer
        for index, layer in enumerate(model.layers[: layers.stop])
    ]
    return replace(model, layers=tuple(made))


def _with_ears(layer: Layer, names: LayerLinears, index: int, observer: Observer) -> Layer:
    def ears(inner: Product, *modules: str) -> Product:
        spot = Spot(index, tuple(name for module in modules for name in names[module]))
        return _Observed(inner, spot, observer)

    mlp = layer.mlp
    if isinstance(mlp, GatedMlp):
        modules = [module for module in ("mlp.fc", "mlp.gate") if module in names]
        heard: Block = replace(mlp, fc_gate=ears(mlp.fc_gate, *modules), proj=ears(mlp.proj, "mlp.proj"))
    elif isinstance(mlp, PlainMlp):
        heard = replace(mlp, fc=ears(mlp.fc, "mlp.fc"), proj=ears(mlp.proj, "mlp.proj"))
    else:
        raise SourceError("a mixture of experts cannot be calibrated: its experts see different tokens")
    return replace(layer, qkv=ears(layer.qkv, "attention.qkv"), dense=ears(layer.dense, "attention.dense"), mlp=heard)


def run_batch(model: Model, sequences: Sequence[Sequence[int]], workers: Workers) -> list[KvCache]:
    """Run sequences side by side through all layers; returns their caches, which hold what a quantized one would."""
    segments, offset = [], 0
    for sequence in sequences:
        cache = model.new_cache()
        cache.reserve(len(sequence))
        segments.append(Segment(cache, offset, 0, len(sequence)))
        offset += len(sequence)
    ids = np.concatenate([np.asarray(sequence, np.intp) for sequence in sequences])
    model.forward(ids, segments, workers)
    return [segment.cache for segment in segments]


def batches(sequences: Sequence[Sequence[int]], size: int) -> Iterator[Sequence[Sequence[int]]]:
    """Yield ``size`` sequences at a time."""
    for start in range(0, len(sequences), size):
        yield sequences[start : start + size]
