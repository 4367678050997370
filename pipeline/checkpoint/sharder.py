"""Cut tensors for tensor and pipeline parallelism.

A rank's tensor is a list of segments, one below the other; each is a matrix of which the rank takes all rows and some
columns. Rows that no segment covers (vocabulary padding) are zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.checkpoint.families.base import Layout
from pipeline.checkpoint.hfconfig import Architecture
from pipeline.checkpoint.options import ConvertOptions
from pipeline.checkpoint.views import Matrix, rows_of
from pipeline.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Segment:
    """Some columns of a matrix, at a row of the rank's tensor."""

    matrix: Matrix
    first: int
    last: int
    row: int


@dataclass(frozen=True, slots=True)
class Shard:
    """A tensor of one rank, seen as a matrix [rows, cols]."""

    rows: int
    cols: int
    segments: tuple[Segment, ...]


def refuse_bad_sizes(architecture: Architecture, options: ConvertOptions) -> None:
    """Check that heads, MLP width and layers can be divided.

    Raises:
        ConfigError: Names the number and the sizes that would work.
    """
    tp, heads, kv_heads = options.tp, architecture.num_heads, architecture.num_kv_heads
    valid = [n for n in _divisors(heads) if _kv_fits(kv_heads, n) and architecture.intermediate_size % n == 0]
    listed = ", ".join(map(str, valid))
    if heads % tp:
        raise ConfigError(f"tp is {tp}: {heads} attention heads cannot be divided; expected one of {listed}")
    if not _kv_fits(kv_heads, tp):
        raise ConfigError(
            f"tp is {tp}: {kv_heads} key/value heads neither divide nor are divided by it; expected one of {listed}",
            hint="a rank would hold part of a head, which converts without an error and answers garbage",
        )
    if architecture.intermediate_size % tp:
        width = architecture.intermediate_size
        raise ConfigError(f"tp is {tp}: intermediate_size {width} cannot be divided; expected one of {listed}")
    if options.embedding_sharding == "hidden" and architecture.hidden_size % tp:
        raise ConfigError(f"tp is {tp}: hidden_size {architecture.hidden_size} cannot be divided for the embedding")
    if options.pp > architecture.num_layers:
        raise ConfigError(f"pp is {options.pp}; expected at most the {architecture.num_layers} layers of the model")


def stage_layers(num_layers: int, pp: int) -> list[range]:
    """Return the layers of each stage; the first stages take the ones left over."""
    each, extra = divmod(num_layers, pp)
    ends = [each * (stage + 1) + min(stage + 1, extra) for stage in range(pp)]
    return [range(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def shard(
    layout: Layout, parts: Sequence[Matrix], architecture: Architecture, options: ConvertOptions, tp_rank: int
) -> Shard:
    """Cut the parts of one target tensor for one tensor parallel rank."""
    tp = options.tp
    if layout is Layout.EMBEDDING:
        layout = {"none": Layout.WHOLE, "vocab": Layout.VOCAB, "hidden": Layout.ROW}[options.embedding_sharding]
    if layout is Layout.COLUMN:
        parts = [_nth_of(part, tp_rank, tp) for part in parts]
    elif layout is Layout.QKV:
        q, *kv = parts
        parts = [_nth_of(q, tp_rank, tp), *(_kv_rows(part, architecture.num_kv_heads, tp_rank, tp) for part in kv)]
    elif layout is Layout.VOCAB:
        (whole,) = parts
        per_rank = -(-whole.rows // tp)
        begin = min(whole.rows, tp_rank * per_rank)
        part = rows_of(whole, begin, min(whole.rows, begin + per_rank))
        segments = (Segment(part, 0, part.cols, 0),) if part.rows else ()
        return Shard(per_rank, whole.cols, segments)
    columns = parts[0].cols // tp if layout is Layout.ROW else parts[0].cols
    first = columns * tp_rank if layout is Layout.ROW else 0
    return _stacked(parts, first, columns)


def _stacked(parts: Sequence[Matrix], first: int, columns: int) -> Shard:
    segments = []
    row = 0
    for part in parts:
        segments.append(Segment(part, first, first + columns, row))
        row += part.rows
    return Shard(row, columns, tuple(segments))


def _nth_of(part: Matrix, rank: int, tp: int) -> Matrix:
    each = part.rows // tp
    return rows_of(part, each * rank, each * (rank + 1))


def _kv_rows(part: Matrix, kv_heads: int, rank: int, tp: int) -> Matrix:
    """Return the rank's key or value rows; with fewer heads than ranks, tp / kv_heads ranks in a row share a head."""
    if kv_heads >= tp:
        return _nth_of(part, rank, tp)
    return _nth_of(part, rank // (tp // kv_heads), kv_heads)


def _kv_fits(kv_heads: int, tp: int) -> bool:
    return kv_heads % tp == 0 or tp % kv_heads == 0


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
