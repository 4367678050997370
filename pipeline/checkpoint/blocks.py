"""How a matrix is cut into blocks of rows, so that memory is bounded by the block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

BLOCK_VALUES = 1 << 20


class _Sized(Protocol):
    @property
    def rows(self) -> int: ...

    @property
    def cols(self) -> int: ...


def row_blocks(matrix: _Sized) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) row ranges of about a million values."""
    step = max(1, BLOCK_VALUES // max(1, matrix.cols))
    for start in range(0, matrix.rows, step):
        yield start, min(matrix.rows, start + step)
