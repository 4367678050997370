"""The MLPs: gated, plain, and mixtures of experts.

Letters: T tokens, h hidden size, I middle size, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .linear import Product
from .threads import Workers

F32 = npt.NDArray[np.float32]
Activation = Callable[[F32], F32]


def silu(x: F32) -> F32:
    """Return x * sigmoid(x)."""
    # exp overflows to inf for x below -88, and x / inf is the right answer, 0.
    with np.errstate(over="ignore"):
        out = np.exp(-x)
    out += np.float32(1)
    np.divide(x, out, out=out)
    return out


def gelu(x: F32) -> F32:
    """Return the Gaussian error linear unit in its tanh form.

    Source: arXiv 1606.08415, section 2. TensorRT-LLM uses this form for every name of the function, ``gelu`` too.
    """
    out: F32 = np.float32(0.044715) * x * x
    out += np.float32(1)
    out *= x
    out *= np.float32((2 / np.pi) ** 0.5)
    np.tanh(out, out=out)
    out += np.float32(1)
    out *= x
    out *= np.float32(0.5)
    return out


ACTIVATIONS: Mapping[str, Activation] = {
    "silu": silu,
    "swiglu": silu,
    "gelu": gelu,
    "gelu_new": gelu,
    "gelu_fast": gelu,
    "gelu_pytorch_tanh": gelu,
    "geglu": gelu,
}


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """proj(act(fc(x)) * gate(x)).

    Attributes:
        fc_gate: [2I, h]: rows of fc, then rows of gate.
    """

    fc_gate: Product
    proj: Product
    act: Activation

    def __call__(self, x: F32, workers: Workers) -> F32:
        """Return [h, T]."""
        both = self.fc_gate(x, workers)
        middle = both.shape[0] // 2
        active = self.act(both[:middle])
        active *= both[middle:]
        return self.proj(active, workers)


@dataclass(frozen=True, slots=True)
class PlainMlp:
    """proj(act(fc(x)))."""

    fc: Product
    proj: Product
    act: Activation

    def __call__(self, x: F32, workers: Workers) -> F32:
        """Return [h, T]."""
        return self.proj(self.act(self.fc(x, workers)), workers)


@dataclass(frozen=True, slots=True)
class ExpertsMlp:
    """Each token visits its ``top_k`` best experts; their outputs are added with the router's weights.

    Source: Mixtral of Experts, arXiv 2401.04088, section 2.1. The router runs in float32, never quantized.

    Attributes:
        router: [E, h] float32.
        renormalize: Whether the weights of the chosen experts are made to sum to one.
    """

    router: F32
    experts: tuple[GatedMlp, ...]
    top_k: int
    renormalize: bool

    def __call__(self, x: F32, workers: Workers) -> F32:
        """Return [h, T]."""
        scores = self.router @ x
        scores -= scores.max(axis=0)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=0)
        chosen = np.argsort(-scores, axis=0, kind="stable")[: self.top_k]
        weights = np.take_along_axis(scores, chosen, axis=0)
        if self.renormalize:
            weights /= weights.sum(axis=0)
        out = np.zeros_like(x)
        for index, expert in enumerate(self.experts):
            places, tokens = np.nonzero(chosen == index)
            if tokens.size:
                out[:, tokens] += expert(np.ascontiguousarray(x[:, tokens]), workers) * weights[places, tokens]
        return out
