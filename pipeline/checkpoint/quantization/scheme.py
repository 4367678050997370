"""What a quantization scheme is: it changes the tensors of a plan, and says how in the config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.checkpoint.binding import Bound, Form, LayerNames, Target
from pipeline.checkpoint.blocks import row_blocks
from pipeline.checkpoint.dtypes import PLAIN_FLOATS, Array, cast_checked, largest_magnitude
from pipeline.checkpoint.families import Family, Layout, Rule
from pipeline.checkpoint.hfconfig import Architecture
from pipeline.checkpoint.ledger import Ledger
from pipeline.checkpoint.options import ConvertOptions
from pipeline.checkpoint.readers import TensorInfo, TensorSource
from pipeline.checkpoint.views import Matrix, Tensor
from pipeline.errors import ConfigError

# The linear layers that schemes quantize; embedding, head, router and norms stay in the checkpoint's type.
LINEARS = ("attention.qkv", "attention.dense", "mlp.fc", "mlp.gate", "mlp.proj")
# Linears with a common input: their input scales are common too, because the engine may fuse them.
SHARED_INPUTS = ({"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}, {"mlp.gate_proj", "mlp.up_proj"})


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


class WeightAmaxes:
    """Largest magnitude of a linear's weight in the type of the checkpoint; one pass over it, once."""

    def __init__(self, context: SchemeContext) -> None:
        """Remember where the weights are."""
        self._context = context
        self._found: dict[str, float] = {}

    def __call__(self, linear: str) -> float:
        """Return it for a linear by its source name."""
        if linear not in self._found:
            weight = Tensor(self._context.source, f"{linear}.weight")
            blocks = (
                cast_checked(weight.read(start, stop), self._context.dtype, weight.origin())
                for start, stop in row_blocks(weight)
            )
            self._found[linear] = max(largest_magnitude(block) for block in blocks)
        return self._found[linear]


def is_linear_weight(rule: Rule) -> bool:
    """Say whether a rule makes the weight of a quantized linear layer."""
    return rule.place == "layer" and rule.target.removesuffix(".weight") in LINEARS and rule.target.endswith(".weight")


def shared_inputs(bound: Bound) -> list[str]:
    """Return the full names of the linears that share the input of a bound weight, itself included."""
    prefix = bound.sources[0].removesuffix(bound.rule.sources[0])
    own = bound.rule.sources[0].removesuffix(".weight")
    return sorted(prefix + name for name in next((group for group in SHARED_INPUTS if own in group), {own}))


def beside(bound: Bound, suffix: str, parts: Sequence[Matrix], **changes: Any) -> Bound:
    """Return a tensor that stands beside a weight: same module, other name and parts.

    Args:
        bound: The weight.
        suffix: ``weights_scaling_factor`` …
        parts: Its matrices.
        **changes: ``form``, ``layout``, ``dtype``; by default a float32 vector cut like the weight's rows.
    """
    name = f"{bound.module}.{suffix}"
    layout = changes.get("layout", bound.rule.layout)
    rule = Rule(name, (), layout, dtype=changes.get("dtype", "float32"))
    return Bound(name, rule, (), tuple(parts), changes.get("form", Form.VECTOR))


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
