"""Largest magnitudes of activations and weights, measured batch by batch; a killed run goes on where it was.

The result is a safetensors file in the form that :mod:`pipeline.checkpoint.quantization.ranges` reads.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeline.calibration.observe import Spot, batches, observed, run_batch
from pipeline.checkpoint.linears import LayerLinears
from pipeline.engines.reference.attention import KvCache
from pipeline.engines.reference.model import Model
from pipeline.engines.reference.threads import Workers

F32 = npt.NDArray[np.float32]
Progress = Callable[[float, "float | None", str], None]
_DONE = "batches_done"


@dataclass(slots=True)
class RangeStatistics:
    """Running maxima under the names of the ranges file.

    Attributes:
        rows: Rows of each linear's weight: how the output of a fused product is divided.
        values: ``<linear>.x`` [in], ``<linear>.y`` [out], ``<linear>.cache`` [1], float32.
    """

    rows: Mapping[str, int]
    values: dict[str, F32] = field(default_factory=dict)

    def __call__(self, spot: Spot, x: F32, y: F32) -> None:
        """Take in what a product saw."""
        inputs, outputs = np.abs(x).max(axis=1), np.abs(y).max(axis=1)
        first = 0
        for linear in spot.linears:
            self._take(f"{linear}.x", inputs)
            self._take(f"{linear}.y", outputs[first : first + self.rows[linear]])
            first += self.rows[linear]

    def take_caches(self, caches: Sequence[KvCache], linears: Sequence[LayerLinears]) -> None:
        """Take in what the caches hold."""
        for index, names in enumerate(linears):
            qkv = names["attention.qkv"]
            for name, kind in zip(qkv[1:], ("keys", "values"), strict=False):
                for cache in caches:
                    stored = getattr(cache, kind)[index]
                    filled = stored[..., : cache.length] if kind == "keys" else stored[:, : cache.length]
                    self._take(f"{name}.cache", np.abs(filled).max().reshape(1))

    def _take(self, name: str, amax: F32) -> None:
        # A NaN anywhere stays: np.maximum keeps it, and the check after calibration names the module.
        known = self.values.get(name)
        self.values[name] = amax.astype(np.float32) if known is None else np.maximum(known, amax)


def measure_ranges(
    model: Model,
    linears: Sequence[LayerLinears],
    rows: Mapping[str, int],
    sequences: Sequence[Sequence[int]],
    *,
    batch_size: int,
    workers: Workers,
    state: Path,
    identity: str,
    progress: Progress | None = None,
) -> dict[str, F32]:
    """Run the sequences and return the maxima.

    Args:
        model: The unquantized model.
        linears: Names of its linears, by layer.
        rows: Rows of each linear's weight.
        sequences: Token ids.
        batch_size: Sequences in one forward pass. Does not change the result.
        workers: Threads of the engine. Do not change the result.
        state: File that keeps what was measured so far; read if it is of the same ``identity``.
        identity: What decides the result: model and text.
        progress: Called with sequences done, all, ``sequences``.
    """
    statistics = RangeStatistics(rows)
    done = 0
    key = hashlib.sha256(f"{identity}:{batch_size}".encode()).hexdigest()
    if (kept := load_state(state, key)) is not None:
        statistics.values, done = kept[0], int(kept[1][_DONE])
    heard = observed(model, linears, statistics, range(len(model.layers)))
    for index, batch in enumerate(batches(sequences, batch_size)):
        if index < done:
            continue
        caches = run_batch(heard, batch, workers)
        for cache, sequence in zip(caches, batch, strict=True):
            cache.length = len(sequence)
        statistics.take_caches(caches, linears)
        save_state(state, key, statistics.values, {_DONE: str(index + 1)})
        if progress is not None:
            progress(min(len(sequences), (index + 1) * batch_size), len(sequences), "sequences")
    return statistics.values


def save_state(path: Path, key: str, values: Mapping[str, npt.NDArray[np.float32]], notes: Mapping[str, str]) -> None:
    """Write arrays and notes in one step: a kill leaves the former state or this one."""
    from safetensors.numpy import save

    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    data = save({name: np.ascontiguousarray(values[name]) for name in sorted(values)}, {"key": key, **notes})
    with partial.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(path)


def load_state(path: Path, key: str) -> tuple[dict[str, F32], dict[str, str]] | None:
    """Read arrays and notes; None if there are none, of another key, or damaged ones."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        notes = json.loads(data[8 : 8 + length]).get("__metadata__") or {}
        if notes.pop("key", None) != key:
            return None
        return {name: np.array(value) for name, value in load(data).items()}, notes
    except (OSError, ValueError, SafetensorError):
        return None
