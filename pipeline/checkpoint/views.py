"""Matrices that are read by rows and never held whole. What a rank stores is described by them.

Shapes: a matrix is [rows, cols]; vectors are [n, 1]. Views are values: two equal views read the same data, which
lets the writer read once what several ranks or tensors need.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pipeline.checkpoint.dtypes import Array
from pipeline.checkpoint.readers.base import TensorSource


class Matrix(Protocol):
    """Anything that can return rows."""

    @property
    def rows(self) -> int:
        """Number of rows."""

    @property
    def cols(self) -> int:
        """Number of columns."""

    def read(self, start: int, stop: int) -> Array:
        """Return rows [start, stop): [stop - start, cols]."""

    def origin(self) -> str:
        """Return what the rows come from, for errors."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A whole tensor of a source."""

    source: TensorSource
    name: str

    @property
    def rows(self) -> int:
        """Rows of the tensor seen as a matrix."""
        return self.source.tensors[self.name].rows

    @property
    def cols(self) -> int:
        """Columns of the tensor seen as a matrix."""
        return self.source.tensors[self.name].cols

    def read(self, start: int, stop: int) -> Array:
        """Return rows as stored."""
        return self.source.read(self.name, start, stop)

    def origin(self) -> str:
        """Return file and tensor name."""
        return f"{self.source.tensors[self.name].file}: {self.name}"


@dataclass(frozen=True, slots=True, eq=False)
class Derived:
    """A matrix computed from another row by row; equal only to itself. Others override what differs."""

    base: Matrix

    @property
    def rows(self) -> int:
        """As the base."""
        return self.base.rows

    @property
    def cols(self) -> int:
        """As the base."""
        return self.base.cols

    def origin(self) -> str:
        """As the base."""
        return self.base.origin()


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows [begin, end) of another matrix."""

    base: Matrix
    begin: int
    end: int

    @property
    def rows(self) -> int:
        """Length of the range."""
        return self.end - self.begin

    @property
    def cols(self) -> int:
        """As the base."""
        return self.base.cols

    def read(self, start: int, stop: int) -> Array:
        """Return rows of the range."""
        return self.base.read(self.begin + start, self.begin + stop)

    def origin(self) -> str:
        """As the base."""
        return self.base.origin()


@dataclass(frozen=True, slots=True)
class Transposed:
    """A source tensor with rows and columns exchanged (GPT-2 stores [in, out])."""

    base: Tensor

    @property
    def rows(self) -> int:
        """Columns of the tensor."""
        return self.base.cols

    @property
    def cols(self) -> int:
        """Rows of the tensor."""
        return self.base.rows

    def read(self, start: int, stop: int) -> Array:
        """Return columns of the tensor as rows."""
        return np.ascontiguousarray(self.base.source.read(self.base.name, 0, self.base.rows, start, stop).T)

    def origin(self) -> str:
        """As the tensor."""
        return self.base.origin()


@dataclass(frozen=True, slots=True)
class PlusOne:
    """A norm weight stored as its difference from one (Gemma); the sum is float32, rounded by the writer."""

    base: Matrix

    @property
    def rows(self) -> int:
        """As the base."""
        return self.base.rows

    @property
    def cols(self) -> int:
        """As the base."""
        return self.base.cols

    def read(self, start: int, stop: int) -> Array:
        """Return float32 rows."""
        plus_one: Array = self.base.read(start, stop).astype(np.float32) + np.float32(1.0)
        return plus_one

    def origin(self) -> str:
        """As the base."""
        return self.base.origin()


def rows_of(base: Matrix, begin: int, end: int) -> Matrix:
    """Return a row range; the whole matrix stays itself, so that equal data has equal views."""
    return base if (begin, end) == (0, base.rows) else Rows(base, begin, end)
