"""What a quantization scheme is: it changes the tensors of a plan, and says how in the config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.checkpoint.binding import Bound, Form, LayerNames, Target
from pipeline.checkpoint.dtypes import PLAIN_FLOATS, Array
from pipeline.checkpoint.families import Family, Layout, Rule
from pipeline.checkpoint.hfconfig import Architecture
from pipeline.checkpoint.ledger import Ledger
from pipeline.checkpoint.options import ConvertOptions
from pipeline.checkpoint.readers import TensorInfo, TensorSource
from pipeline.errors import ConfigError

# The linear layers that schemes quantize; embedding, head, router and norms stay in the checkpoint's type.
LINEARS = ("attention.qkv", "attention.dense", "mlp.fc", "mlp.gate", "mlp.proj")


@dataclass(frozen=True, slots=True)
class SchemeContext:
    """What a scheme may look at while a conversion is planned."""

    source: TensorSource
    architecture: Architecture
    family: Family
    options: ConvertOptions
    dtype: str
    ledger: Ledger


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A small matrix that is known when the conversion is planned; equal only to itself."""

    values: Array
    what: str

    @property
    def rows(self) -> int:
        """First dimension."""
        return int(self.values.shape[0])

    @property
    def cols(self) -> int:
        """Second dimension."""
        return int(self.values.shape[1])

    def read(self, start: int, stop: int) -> Array:
        """Return rows."""
        rows: Array = self.values[start:stop]
        return rows

    def origin(self) -> str:
        """Return what it is."""
        return self.what


class Scheme:
    """The scheme that quantizes nothing; others override what differs.

    Attributes:
        quantization: Changes to the config's ``quantization`` object.
        ignored: Regular expressions of source tensors that need no place under this scheme, with the reason.
        warnings: What a reader of the result should know.
    """

    quantization: Mapping[str, Any] = {}
    ignored: tuple[tuple[str, str], ...] = ()
    warnings: tuple[str, ...] = ()

    def accepts(self, info: TensorInfo, rule: Rule) -> bool:
        """Say whether a source tensor has a type that this rule can take."""
        return info.dtype in PLAIN_FLOATS

    def expand(self, bound: Bound) -> Iterator[Bound]:
        """Yield the tensors that take the place of one, before they are cut for the ranks."""
        yield bound

    def finish(self, target: Target) -> Iterator[Target]:
        """Yield the tensors that take the place of one of a rank."""
        yield target

    def layer_tensors(self, names: LayerNames) -> Iterator[Bound]:
        """Yield further tensors of a layer."""
        yield from ()


def is_linear_weight(rule: Rule) -> bool:
    """Say whether a rule makes the weight of a quantized linear layer."""
    return rule.place == "layer" and rule.target.removesuffix(".weight") in LINEARS and rule.target.endswith(".weight")


def constant(
    name: str, values: Sequence[float] | Array, *, form: Form = Form.VECTOR, layout: Layout = Layout.WHOLE
) -> Bound:
    """Return a computed float32 tensor."""
    column = np.asarray(values, np.float32).reshape(-1, 1)
    return Bound(name, Rule(name, (), layout, dtype="float32"), (), (Constant(column, name),), form)


def only_for(context: SchemeContext, architectures: Sequence[str], what: str) -> None:
    """Refuse a scheme for other architectures.

    Raises:
        ConfigError: Names the architecture and those that work.
    """
    name = context.architecture.name
    if name not in architectures:
        raise ConfigError(f"{what} is not supported for {name}; expected one of {', '.join(architectures)}")
