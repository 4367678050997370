"""Matrix products of the model: y = W x, feature-major.

Letters: K inputs, N outputs, T tokens. Activations are [K, T], so that the weight keeps its stored [N, K] form, and a
product of many rows with few tokens can be cut into blocks of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from .threads import Workers

F32 = npt.NDArray[np.float32]

# NOTE: up to this many multiply-adds OpenBLAS multiplies without first copying its operands into panels (measured: up
# to three times as fast for 2 to 48 tokens, 0.3.31, AVX-512). Larger products are cut into blocks of rows below it.
SMALL_PRODUCT = 1_000_000
MOST_TOKENS_IN_BLOCKS = 48
ROW_STEP = 16
# Multiply-adds per token that a thread does while another wakes up: some 40 microseconds (measured, virtual machine).
# With more tokens a product is no longer bound by memory, up to eight times as fast.
HEAD_START = 200_000
HEAD_START_TOKENS = 8


def multiply(weight: F32, x: F32, workers: Workers) -> F32:
    """Return ``weight @ x``: [N, K] times [K, T] float32, the rows divided among the workers."""
    rows, tokens = weight.shape[0], x.shape[1]
    out = np.empty((rows, tokens), np.float32)
    cuts = _cuts(weight.shape, tokens, workers)

    def piece(index: int) -> None:
        part = slice(cuts[index], cuts[index + 1])
        _multiply_rows(weight[part], x, out[part])

    workers.run(piece, len(cuts) - 1)
    return out


def multiply_to_rows(weight: F32, x: F32, workers: Workers) -> F32:
    """Return ``(weight @ x).T``: [T, N] float32, contiguous per token, as sampling wants its logits."""
    rows, tokens = weight.shape[0], x.shape[1]
    out = np.empty((tokens, rows), np.float32)
    cuts = _cuts(weight.shape, tokens, workers)
    x_rows = np.ascontiguousarray(x.T) if tokens > MOST_TOKENS_IN_BLOCKS else x

    def piece(index: int) -> None:
        part = slice(cuts[index], cuts[index + 1])
        if tokens > MOST_TOKENS_IN_BLOCKS:
            np.matmul(x_rows, weight[part].T, out=out[:, part])
            return
        product = np.empty((weight[part].shape[0], tokens), np.float32)
        _multiply_rows(weight[part], x, product)
        out[:, part] = product.T

    workers.run(piece, len(cuts) - 1)
    return out


def _cuts(shape: tuple[int, ...], tokens: int, workers: Workers) -> list[int]:
    """Return where to cut the rows: a piece per worker, the first larger by what its worker does before others wake.

    Smaller pieces would balance better, but a thread that returns to Python every few ten microseconds keeps the
    others from getting the interpreter's lock at all (measured: they came too late for 97 of 100 pieces).
    """
    rows, inputs = shape
    work, head_start = rows * inputs * tokens, HEAD_START * min(tokens, HEAD_START_TOKENS)
    if workers.active == 1 or work < 2.5 * head_start:
        return [0, rows]
    share = int(rows * (1 - head_start / work) / workers.active) // ROW_STEP * ROW_STEP
    return [0, *range(rows - share * (workers.active - 1), rows, share), rows] if share else [0, rows]


def _multiply_rows(weight: F32, x: F32, out: F32) -> None:
    rows, inputs = weight.shape
    tokens = x.shape[1]
    block = min(192, SMALL_PRODUCT // (inputs * tokens)) // ROW_STEP * ROW_STEP
    if not 1 < tokens <= MOST_TOKENS_IN_BLOCKS or block == 0 or rows <= block:
        np.matmul(weight, x, out=out)
        return
    blocks = rows // block
    even = blocks * block
    np.matmul(weight[:even].reshape(blocks, block, inputs), x, out=out[:even].reshape(blocks, block, tokens))
    if even < rows:
        np.matmul(weight[even:], x, out=out[even:])


class Prepare(Protocol):
    """What happens to the input of a linear layer before the product: scaling, rounding to 8 bits."""

    def __call__(self, x: F32) -> F32:
        """Return the prepared [K, T]; the argument is left as it was."""


class Product(Protocol):
    """A linear layer, however it is stored; calibration puts an observer in its place."""

    def __call__(self, x: F32, workers: Workers) -> F32:
        """Return [N, T] for x [K, T]."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer in float32.

    Attributes:
        weight: [N, K] float32, contiguous.
        bias: [N, 1] float32 or None.
        prepare: What happens to the input first; None for nothing.
    """

    weight: F32
    bias: F32 | None = None
    prepare: Prepare | None = None

    def __call__(self, x: F32, workers: Workers) -> F32:
        """Return [N, T] for x [K, T]."""
        if self.prepare is not None:
            x = self.prepare(x)
        out = multiply(self.weight, x, workers)
        if self.bias is not None:
            out += self.bias
        return out


@dataclass(frozen=True, slots=True)
class Stacked:
    """Linear layers of one input that cannot be one matrix, since each prepares the input in its own way."""

    parts: tuple[Linear, ...]

    def __call__(self, x: F32, workers: Workers) -> F32:
        """Return the outputs below each other: [sum of N, T]."""
        return np.concatenate([part(x, workers) for part in self.parts])


class Arena:
    """Hands out float32 arrays from a few large blocks.

    Blocks of many megabytes get huge pages from the kernel; streaming the weights of a 135M model once per token was a
    quarter faster than from separate arrays.
    """

    def __init__(self, block_bytes: int = 128 << 20) -> None:
        self._block_items = block_bytes // 4
        self._block = np.empty(0, np.float32)
        self._used = 0

    def empty(self, shape: tuple[int, ...]) -> F32:
        """Return an uninitialized contiguous array."""
        items = int(np.prod(shape))
        if items > self._block.size - self._used:
            self._block = np.empty(max(items, self._block_items), np.float32)
            self._used = 0
        array = self._block[self._used : self._used + items].reshape(shape)
        self._used += -(-items // 16) * 16
        return array
