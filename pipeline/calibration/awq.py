"""Search of what INT4 in groups needs: factors for the inputs, and how far each group is clipped.

For linears that share an input the factors are shared, as the layout demands. Error is measured on outputs: with the
second moments H of the input, a change D of the weight changes the outputs by tr(D H D^T) in the square.

Letters: N outputs, K inputs, T tokens, G groups of g inputs.

Source: Activation-aware Weight Quantization, arXiv 2306.00978, section 3.2 (factors) and its public code (clipping);
the error is measured with second moments here instead of running the layer again for every candidate.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.calibration.observe import Spot, batches, observed, run_batch
from pipeline.calibration.ranges import Progress, load_state, save_state
from pipeline.checkpoint.dtypes import numpy_dtype
from pipeline.checkpoint.linears import LayerLinears
from pipeline.checkpoint.quantization.grouped_int4 import int4_codes
from pipeline.engines.reference.linear import multiply
from pipeline.engines.reference.model import Model
from pipeline.engines.reference.threads import Workers

F32 = npt.NDArray[np.float32]
ReadWeight = Callable[[str], F32]

_ALPHAS = tuple(step / 10 for step in range(11))
_CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6)
# Rows on which candidates are compared; more change the choice little and cost much for wide layers.
_COMPARED_ROWS = 1024
_LARGEST = np.float32(7.0)
# Second moments held at once; more layers than fit are searched in further passes over the text.
_MOMENT_BYTES = 192 << 20
_SMALLEST = 1e-4


@dataclass(slots=True)
class _Moments:
    """Sums over the tokens of one input: x x^T [K, K] and |x| [K]."""

    products: F32
    magnitudes: F32
    tokens: int = 0


class _Listener:
    def __init__(self, workers: Workers) -> None:
        self.moments: dict[Spot, _Moments] = {}
        self._workers = workers

    def __call__(self, spot: Spot, x: F32, y: F32) -> None:
        size = x.shape[0]
        found = self.moments.setdefault(spot, _Moments(np.zeros((size, size), np.float32), np.zeros(size, np.float32)))
        found.products += multiply(x, np.ascontiguousarray(x.T), self._workers)
        found.magnitudes += np.abs(x).sum(axis=1)
        found.tokens += x.shape[1]


def search_int4(
    model: Model,
    linears: Sequence[LayerLinears],
    read_weight: ReadWeight,
    sequences: Sequence[Sequence[int]],
    *,
    group_size: int,
    dtype: str,
    batch_size: int,
    workers: Workers,
    state: Path,
    identity: str,
    progress: Progress | None = None,
) -> dict[str, F32]:
    """Return ``<linear>.prequant`` and ``<linear>.clip`` for every linear.

    Args:
        model: The unquantized model.
        linears: Names of its linears, by layer.
        read_weight: Returns a weight [N, K] as float32.
        sequences: Token ids.
        group_size: g.
        dtype: Type in which the factors will be stored; they are rounded to it before they are judged.
        batch_size: Sequences in one forward pass.
        workers: Threads of the engine.
        state: File that keeps what was found so far.
        identity: What decides the result.
        progress: Called with layers done, all, ``layers``.
    """
    key = hashlib.sha256(f"{identity}:{batch_size}:{group_size}:{dtype}".encode()).hexdigest()
    kept = load_state(state, key)
    found, done = (kept[0], int(kept[1]["layers_done"])) if kept is not None else ({}, 0)
    total = len(model.layers)
    for layers in _passes(model, done):
        listener = _Listener(workers)
        heard = observed(model, linears, listener, layers)
        for batch in batches(sequences, batch_size):
            run_batch(heard, batch, workers)
        for spot, moments in listener.moments.items():
            weights = {linear: read_weight(linear) for linear in spot.linears}
            found.update(_search(weights, moments, group_size, numpy_dtype(dtype)))
        save_state(state, key, found, {"layers_done": str(layers.stop)})
        if progress is not None:
            progress(layers.stop, total, "layers")
    return found


def _passes(model: Model, done: int) -> Iterator[range]:
    """Yield the layers whose moments fit into memory together."""
    config = model.config
    attention = config.heads * config.head_size
    bytes_per_layer = 4 * (2 * config.hidden_size**2 + attention**2 + config.intermediate_size**2)
    step = max(1, _MOMENT_BYTES // bytes_per_layer)
    for first in range(done, len(model.layers), step):
        yield range(first, min(len(model.layers), first + step))


def _search(weights: Mapping[str, F32], moments: _Moments, group: int, dtype: np.dtype[Any]) -> dict[str, F32]:
    """Choose factors for one input and clips for its linears."""
    second: F32 = moments.products / np.float32(moments.tokens)
    mean: F32 = moments.magnitudes / np.float32(moments.tokens)
    stacked = np.concatenate(list(weights.values()))
    step = max(1, len(stacked) // _COMPARED_ROWS)
    compared = np.ascontiguousarray(stacked[::step])
    best = np.inf
    prequant: F32 = np.ones_like(mean)
    for candidate in _candidates(mean, _relative_magnitude(compared, group), dtype):
        change = compared - _rounded(compared, candidate, _amax(np.divide(compared, candidate), group))
        loss = float(np.einsum("nk,nk->", change @ second, change, dtype=np.float64))
        if loss < best:
            best, prequant = loss, candidate
    found = {}
    for linear, weight in weights.items():
        found[f"{linear}.prequant"] = prequant
        found[f"{linear}.clip"] = _clips(weight, prequant, second, group)
    return found


def _candidates(mean: F32, magnitude: F32, dtype: np.dtype[Any]) -> Iterator[F32]:
    """Yield factors of the input, 1/s: s = x^a, and s = x^a / w^(1-a), brought to a geometric middle of one."""
    x = np.maximum(mean.astype(np.float64), _SMALLEST)
    w = np.maximum(magnitude.astype(np.float64), _SMALLEST)
    for alpha in _ALPHAS:
        for scale in (x**alpha, x**alpha / w ** (1 - alpha)):
            bounded = np.maximum(scale, _SMALLEST)
            bounded /= np.sqrt(bounded.max() * bounded.min())
            factors: F32 = (1.0 / bounded).astype(dtype).astype(np.float32)
            yield factors


def _relative_magnitude(weight: F32, group: int) -> F32:
    """Return the mean |w| of each input, relative to the largest of its group: [K]."""
    grouped = np.abs(weight).reshape(len(weight), -1, group)
    relative = grouped / np.maximum(grouped.max(axis=2, keepdims=True), np.float32(1e-12))
    mean: F32 = relative.reshape(weight.shape).mean(axis=0)
    return mean


def _amax(weight: F32, group: int) -> F32:
    """Return the largest magnitude of each group: [N, G]."""
    amax: F32 = np.abs(weight).reshape(len(weight), -1, group).max(axis=2)
    return amax


def _rounded(weight: F32, prequant: F32, clip: F32) -> F32:
    """Return the weight that the codes stand for, seen from the original input: [N, K]."""
    scales = np.where(clip > 0, clip, np.float32(1.0)) / _LARGEST
    codes = int4_codes(weight / prequant, scales).astype(np.float32)
    real = codes.reshape(*scales.shape, -1) * scales[:, :, None]
    seen: F32 = real.reshape(weight.shape) * prequant
    return seen


def _clips(weight: F32, prequant: F32, second: F32, group: int) -> F32:
    """Return for each group the bound that costs least at the outputs: [N, G]. Groups are judged one by one."""
    largest = _amax(weight / prequant, group)
    blocks = _diagonal_blocks(second, group)
    best = np.full(largest.shape, np.inf, np.float32)
    chosen: F32 = largest.copy()
    for share in _CLIPS:
        clip = largest * np.float32(share)
        change = (weight - _rounded(weight, prequant, clip)).reshape(*largest.shape, group)
        by_group = np.ascontiguousarray(change.transpose(1, 0, 2))
        loss = np.einsum("gnk,gnk->gn", by_group @ blocks, by_group).T
        better = loss < best
        best[better], chosen[better] = loss[better], clip[better]
    return chosen


def _diagonal_blocks(second: F32, group: int) -> F32:
    """Return the blocks of H on its diagonal: [G, g, g]."""
    count = len(second) // group
    index = np.arange(count)
    blocks: F32 = np.ascontiguousarray(second.reshape(count, group, count, group)[index, :, index, :])
    return blocks
