"""How far the emitted checkpoint's logits are from the source model's, at short and long positions, by layer range.

A range is judged by itself: its layers are taken from the emitted checkpoint, all others from the 16-bit conversion of
the source. So the table shows which layers cause a difference, not where it has arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.engines.reference.attention import Segment
from pipeline.engines.reference.model import Model
from pipeline.engines.reference.threads import Workers

F32 = npt.NDArray[np.float32]
SourceLogits = Callable[[Sequence[int], int], F32]

_RANGES = 4
_SHORT = 64
_LONG = 512
# Positions compared at the end of a span.
_COMPARED = 64
_CHUNK = 512
# Multiply-adds a long span may cost: beyond the trained context of a large model it would take hours here.
_MOST_WORK = 2e14


@dataclass(frozen=True, slots=True)
class Span:
    """Positions that are compared: the last ``compared`` of the first ``tokens``."""

    name: str
    tokens: int
    compared: int


def parity_spans(model: Model, available: int) -> tuple[list[Span], dict[str, str]]:
    """Choose what to compare, and say what is left out and why.

    Args:
        model: The emitted model.
        available: Tokens of text there are.
    """
    config = model.config
    room = min(model.max_seq_len, available)
    short = min(_SHORT, room)
    spans, skipped = [Span("short", short, short)], {}
    scaling = config.rotary_scaling or {}
    original = int(scaling.get("original_max_position_embeddings") or 0)
    wanted = original + _COMPARED if original else _LONG
    name = "beyond the original context" if original else "long"
    work = wanted * sum(layer_size(config) for _ in range(config.layers)) * (_RANGES + 2)
    if wanted > room and original:
        skipped[name] = f"needs {wanted} tokens; text and limits give {room}"
        wanted, name = min(_LONG, room), "long"
    elif work > _MOST_WORK:
        skipped[name] = f"{wanted} tokens through this model take too long on a CPU"
        wanted, name = min(_LONG, room), "long"
    length = min(wanted, room)
    if length > short:
        spans.append(Span(name, length, min(_COMPARED, length)))
    return spans, skipped


def layer_size(config: Any) -> int:
    """Return the weights of a layer."""
    hidden = config.hidden_size
    return int(hidden * config.head_size * 2 * (config.heads + config.kv_heads) + 3 * hidden * config.intermediate_size)


def measure_parity(
    emitted: Model,
    source: Model,
    token_ids: Sequence[int],
    workers: Workers,
    *,
    source_logits: SourceLogits | None = None,
    progress: Callable[[float, float | None, str], None] | None = None,
) -> dict[str, Any]:
    """Compare and return the ``parity`` section of gate.json.

    Args:
        emitted: The model that will be served.
        source: The 16-bit conversion of the source.
        token_ids: Text.
        workers: Threads.
        source_logits: Logits of another witness of the source (transformers) for the last positions of a span; it is
            compared with the emitted model as a whole.
        progress: Called with spans done, all, ``spans``.
    """
    spans, skipped = parity_spans(emitted, len(token_ids))
    rows: list[dict[str, Any]] = []
    ranges = _layer_ranges(len(emitted.layers))
    for number, span in enumerate(spans):
        expected = _logits(source, token_ids, span, workers)
        found = _logits(emitted, token_ids, span, workers)
        rows.append(_row(span, "all layers", "16-bit conversion", expected, found))
        if source_logits is not None:
            rows.append(
                _row(span, "all layers", "transformers", source_logits(token_ids[: span.tokens], span.compared), found)
            )
        if not np.array_equal(expected, found):
            for layers in ranges:
                mixed = _mixed(emitted, source, layers)
                name = f"layers {layers.start}-{layers.stop - 1}"
                rows.append(_row(span, name, "16-bit conversion", expected, _logits(mixed, token_ids, span, workers)))
        if progress is not None:
            progress(number + 1, len(spans), "spans")
    return {"rows": rows, "not_measured": skipped, "rope_scaling": bool(emitted.config.rotary_scaling)}


def _layer_ranges(layers: int) -> list[range]:
    count = min(_RANGES, layers)
    cuts = [layers * index // count for index in range(count + 1)]
    return [range(first, last) for first, last in pairwise(cuts)]


def _mixed(emitted: Model, source: Model, layers: range) -> Model:
    chosen = [emitted.layers[i] if i in layers else layer for i, layer in enumerate(source.layers)]
    return replace(source, layers=tuple(chosen))


def _logits(model: Model, token_ids: Sequence[int], span: Span, workers: Workers) -> F32:
    """Return the logits of the last positions of a span: [compared, vocab]."""
    cache = model.new_cache()
    cache.reserve(span.tokens)
    kept: list[F32] = []
    first_kept = span.tokens - span.compared
    for start in range(0, span.tokens, _CHUNK):
        ids = np.asarray(token_ids[start : min(start + _CHUNK, span.tokens)], np.intp)
        hidden = model.forward(ids, [Segment(cache, 0, start, ids.size)], workers)
        cache.length += ids.size
        if start + ids.size > first_kept:
            kept.append(hidden[:, max(0, first_kept - start) :])
    return model.logits(np.ascontiguousarray(np.concatenate(kept, axis=1)), workers)


def _row(span: Span, layers: str, against: str, expected: F32, found: F32) -> dict[str, Any]:
    width = min(expected.shape[1], found.shape[1])
    gap = np.abs(found[:, :width] - expected[:, :width])
    agreement = (found[:, :width].argmax(axis=1) == expected[:, :width].argmax(axis=1)).mean()
    return {
        "span": span.name,
        "positions": [span.tokens - span.compared, span.tokens],
        "layers": layers,
        "against": against,
        "max_logit_difference": float(f"{gap.max():.6g}"),
        "mean_logit_difference": float(f"{gap.mean(dtype=np.float64):.6g}"),
        "top1_agreement": float(f"{agreement:.6g}"),
    }
