"""Carry out a conversion plan: read each block of rows once, cast it, and write it wherever it belongs.

Memory is bounded by the block, not by the model: each worker holds a few blocks of about a million values.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from pipeline.checkpoint.binding import Target
from pipeline.checkpoint.blocks import row_blocks
from pipeline.checkpoint.dtypes import cast_checked, itemsize
from pipeline.checkpoint.views import Matrix
from pipeline.checkpoint.writer import SafetensorsWriter

Progress = Callable[[float, "float | None", str], None]


@dataclass(frozen=True, slots=True)
class Place:
    """Where some columns of a matrix go.

    Attributes:
        rank: Rank file.
        target: Tensor in it.
        first: First column taken.
        last: Column after the last one taken.
        row: Row of the tensor at which the matrix begins.
    """

    rank: int
    target: str
    first: int
    last: int
    row: int


@dataclass(frozen=True, slots=True)
class Copy:
    """A matrix, the type it is rounded to, and all its places."""

    matrix: Matrix
    dtype: str
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class _Block:
    copy: Copy
    start: int
    stop: int


def gather_copies(ranks: Sequence[Sequence[Target]]) -> list[Copy]:
    """Group the segments of all ranks by matrix and type, so that what several ranks need is read and cast once."""
    places: dict[tuple[Matrix, str], list[Place]] = {}
    for rank, targets in enumerate(ranks):
        for target in targets:
            for segment in target.shard.segments:
                place = Place(rank, target.name, segment.first, segment.last, segment.row)
                places.setdefault((segment.matrix, target.dtype), []).append(place)
    return [Copy(matrix, dtype, tuple(found)) for (matrix, dtype), found in places.items()]


def execute(
    copies: Sequence[Copy], writers: Sequence[SafetensorsWriter], *, workers: int, progress: Progress | None
) -> None:
    """Do all copies.

    Raises:
        SourceError: A value does not survive, or a file cannot be read; names file and tensor.
        StoreError: A file cannot be written.
    """
    total = sum(copy.matrix.rows * copy.matrix.cols * itemsize(copy.dtype) for copy in copies)
    meter = _Meter(total, progress)

    def work(block: _Block) -> None:
        _do(block, writers)
        meter.add((block.stop - block.start) * block.copy.matrix.cols * itemsize(block.copy.dtype))

    run_all(work, _blocks(copies), workers)


def run_all(work: Callable[[_Block], None], blocks: Iterator[_Block], workers: int) -> None:
    """Apply ``work`` to all blocks from several threads; the first error stops them and is raised."""
    lock = threading.Lock()
    failed = threading.Event()

    def loop() -> None:
        while not failed.is_set():
            with lock:
                block = next(blocks, None)
            if block is None:
                return
            try:
                work(block)
            except BaseException:
                failed.set()
                raise

    with ThreadPoolExecutor(workers, thread_name_prefix="convert") as pool:
        futures = [pool.submit(loop) for _ in range(workers)]
        try:
            for future in futures:
                future.result()
        except BaseException:
            failed.set()
            raise


def _blocks(copies: Sequence[Copy]) -> Iterator[_Block]:
    for copy in copies:
        for start, stop in row_blocks(copy.matrix):
            yield _Block(copy, start, stop)


def _do(block: _Block, writers: Sequence[SafetensorsWriter]) -> None:
    copy = block.copy
    what = f"{copy.matrix.origin()} (to {copy.places[0].target})"
    values = cast_checked(copy.matrix.read(block.start, block.stop), copy.dtype, what)
    for place in copy.places:
        width = place.last - place.first
        position = (place.row + block.start) * width * itemsize(copy.dtype)
        writers[place.rank].write(place.target, position, values[:, place.first : place.last])


class _Meter:
    """Counts bytes from several threads and reports them."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._lock = threading.Lock()
        self._total = total
        self._done = 0
        self._progress = progress

    def add(self, count: int) -> None:
        if self._progress is None:
            return
        with self._lock:
            self._done += count
            self._progress(self._done, self._total, "bytes")
