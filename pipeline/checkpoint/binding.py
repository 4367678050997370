"""Bind the rules of a family to the tensors of a source, and keep the books while doing so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from pipeline.checkpoint.families import Family, Rule
from pipeline.checkpoint.hfconfig import Architecture
from pipeline.checkpoint.ledger import Ledger
from pipeline.checkpoint.readers import TensorInfo, TensorSource
from pipeline.checkpoint.sharder import Shard
from pipeline.checkpoint.views import Matrix, Tensor
from pipeline.errors import SourceError


class Form(Enum):
    """How a tensor that is seen as a matrix [rows, cols] is stored."""

    MATRIX = "[rows, cols]"
    VECTOR = "[rows]"
    ROW = "[1, rows]"
    SCALAR = "[]"
    EXPERTS = "[experts, rows / experts, cols]"


@dataclass(frozen=True, slots=True)
class Bound:
    """A rule bound to the matrices of a source: one target tensor before it is cut for the ranks.

    Attributes:
        name: TensorRT-LLM name, layer number local to the stage.
        rule: The rule; its layout says how the parts are cut.
        sources: Names of the source tensors; empty for computed ones.
        parts: What is cut and joined.
        form: How the result is stored.
    """

    name: str
    rule: Rule
    sources: tuple[str, ...]
    parts: tuple[Matrix, ...]
    form: Form

    @property
    def module(self) -> str:
        """Name without the last section (``.weight``)."""
        return self.name.rpartition(".")[0]


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor of one rank file.

    Attributes:
        name: TensorRT-LLM name, layer numbers local to the stage.
        shape: As stored.
        dtype: As stored.
        shard: Where its rows come from.
        rule: The rule that made it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    shard: Shard
    rule: Rule


@dataclass(frozen=True, slots=True)
class LayerNames:
    """Name prefixes of one layer, with the trailing dot.

    Attributes:
        source: In the source.
        target: In the checkpoint, numbered within the stage.
    """

    source: str
    target: str


class Binder:
    """Binds the rules of a family to a source."""

    def __init__(
        self,
        source: TensorSource,
        architecture: Architecture,
        family: Family,
        ledger: Ledger,
        accepts: Callable[[TensorInfo, Rule], bool],
    ) -> None:
        """Prepare for a source.

        Args:
            source: An opened source.
            architecture: Its architecture.
            family: The table that covers it.
            ledger: Books to keep.
            accepts: Whether a source tensor has a type that this rule can take.
        """
        self.source = source
        self.architecture = architecture
        self.family = family
        self.ledger = ledger
        self._accepts = accepts
        self.duplicates: list[tuple[str, str]] = []
        self._rules = [rule for rule in family.rules if rule.applies(architecture)]
        probes = [rule.sources[0] for rule in self._rules if rule.place == "first"]
        fitting = (p for p in family.prefixes if any(p + name in source.tensors for name in probes))
        self._prefix = next(fitting, family.prefixes[0])

    def layer_names(self, layers: range) -> list[LayerNames]:
        """Return the prefixes of the layers of a stage."""
        prefix = self._prefix + self.family.layer_prefix
        return [
            LayerNames(prefix.replace("{i}", str(layer)), f"transformer.layers.{local}.")
            for local, layer in enumerate(layers)
        ]

    def stage(self, layers: range) -> Iterator[Bound]:
        """Yield the tensors of one pipeline stage."""
        first, last = layers.start == 0, layers.stop == self.architecture.num_layers
        for rule in self._rules:
            if rule.place == "layer":
                for names in self.layer_names(layers):
                    yield from self._bind(rule, names.target + rule.target, names.source)
            elif (rule.place == "first" and first) or (rule.place == "last" and last):
                yield from self._bind(rule, rule.target, self._prefix)

    def _bind(self, rule: Rule, target: str, prefix: str) -> Iterator[Bound]:
        names = rule.source_names(self.architecture, prefix)
        if rule.target == "lm_head.weight":
            names = self._head(names, rule.sources)
        if not all([self.ledger.consume(name, target) for name in names]):
            return
        infos = [self.source.tensors[name] for name in names]
        for info in infos:
            if not self._accepts(info, rule):
                raise SourceError(
                    f"{info.file}: {info.name} is {info.dtype}; expected a plain floating point type",
                    hint="the weights are quantized in a way that this conversion does not read",
                )
        parts: tuple[Matrix, ...] = tuple(Tensor(self.source, name) for name in names)
        if rule.prepare is not None:
            parts = rule.prepare(self.architecture, parts)
        form = Form.EXPERTS if rule.stacked else Form.MATRIX if len(infos[0].shape) > 1 else Form.VECTOR
        yield Bound(target, rule, names, parts, form)

    def _head(self, prefixed: tuple[str, ...], plain: tuple[str, ...]) -> tuple[str, ...]:
        """Return the stored head, or the embedding if they are tied; a stored head must then be equal to it.

        The head stands outside the prefix in some models, so both places are looked at.
        """
        stored = prefixed if prefixed[0] in self.source.tensors else plain
        if not self.architecture.tied:
            return stored
        embedding = next(r for r in self._rules if r.target == "transformer.vocab_embedding.weight")
        names = embedding.source_names(self.architecture, self._prefix)
        if stored[0] in self.source.tensors:
            self.ledger.ignore_one(stored[0], f"tied: equal to {names[0]}")
            self.duplicates.append((names[0], stored[0]))
        return names
