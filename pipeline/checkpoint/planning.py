"""Turn a source and options into a list of reads and writes, with the books closed before a byte is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.checkpoint.contract import expected_tensors
from pipeline.checkpoint.dtypes import PLAIN_FLOATS
from pipeline.checkpoint.families import Family, Rule, family_of
from pipeline.checkpoint.hfconfig import Architecture, read_architecture
from pipeline.checkpoint.ledger import Ledger, compare_targets
from pipeline.checkpoint.options import ConvertOptions
from pipeline.checkpoint.readers import TensorSource
from pipeline.checkpoint.sharder import Shard, refuse_bad_sizes, shard, stage_layers
from pipeline.checkpoint.target_config import effective_window, resolve_dtype, target_config
from pipeline.checkpoint.views import Matrix, Tensor
from pipeline.errors import SourceError


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor of one rank file.

    Attributes:
        name: TensorRT-LLM name, layer numbers local to the stage.
        shape: As stored.
        dtype: As stored.
        shard: Where its rows come from.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    shard: Shard


@dataclass(frozen=True, slots=True)
class ConversionPlan:
    """Everything that is decided before writing.

    Attributes:
        ranks: Targets of each rank file, in rank order.
        config: The checkpoint's config.json.
        ignored_tensors: Source tensors that need no place, and why.
        duplicates: Pairs of source tensors that must hold the same values (a stored head beside a tied embedding).
        warnings: What a reader of the result should know.
    """

    architecture: Architecture
    family: Family
    dtype: str
    ranks: tuple[tuple[Target, ...], ...]
    config: Mapping[str, Any]
    ignored_tensors: Mapping[str, str]
    duplicates: tuple[tuple[str, str], ...]
    warnings: tuple[str, ...]


def plan_conversion(source: TensorSource, options: ConvertOptions) -> ConversionPlan:
    """Decide what to write. Reads no weight.

    Raises:
        SourceError: The model is not supported, tensors are missing, left over, or of the wrong shape.
        ConfigError: tp or pp does not fit the model.
    """
    architecture = read_architecture(source.config, str(source.path))
    family = family_of(architecture.name)
    if family.check is not None:
        family.check(architecture)
    notes: tuple[str, ...] = ()
    if family.adjust is not None:
        options, notes = family.adjust(options)
    refuse_bad_sizes(architecture, options)
    dtype = resolve_dtype(architecture, options)
    config = target_config(architecture, family, dtype, options)
    ledger = Ledger(source.tensors)
    binder = _Binder(source, architecture, family, ledger)
    stages = [list(binder.stage(layers)) for layers in stage_layers(architecture.num_layers, options.pp)]
    ledger.ignore(family.ignored)
    ledger.close(str(source.path))
    ranks = tuple(
        tuple(_target(bound, architecture, options, dtype, tp_rank) for bound in stage)
        for stage in stages
        for tp_rank in range(options.tp)
    )
    _refuse_differences(ranks, config, stages, source)
    return ConversionPlan(
        architecture=architecture,
        family=family,
        dtype=dtype,
        ranks=ranks,
        config=config,
        ignored_tensors=ledger.ignored,
        duplicates=tuple(binder.duplicates),
        warnings=(*source.warnings, *notes, *_warnings(architecture)),
    )


@dataclass(frozen=True, slots=True)
class _Bound:
    """A rule bound to the matrices of a source."""

    name: str
    rule: Rule
    parts: tuple[Matrix, ...]
    vector: bool
    experts: int


class _Binder:
    """Binds the rules of a family to a source and keeps the books."""

    def __init__(self, source: TensorSource, architecture: Architecture, family: Family, ledger: Ledger) -> None:
        self.source = source
        self.architecture = architecture
        self.family = family
        self.ledger = ledger
        self.duplicates: list[tuple[str, str]] = []
        self._rules = [rule for rule in family.rules if rule.applies(architecture)]
        probes = [rule.sources[0] for rule in self._rules if rule.place == "first"]
        fitting = (p for p in family.prefixes if any(p + name in source.tensors for name in probes))
        self._prefix = next(fitting, family.prefixes[0])

    def stage(self, layers: range) -> Iterator[_Bound]:
        """Yield the tensors of one pipeline stage."""
        first, last = layers.start == 0, layers.stop == self.architecture.num_layers
        for rule in self._rules:
            if rule.place == "layer":
                for local, layer in enumerate(layers):
                    prefix = self._prefix + self.family.layer_prefix.replace("{i}", str(layer))
                    yield from self._bind(rule, f"transformer.layers.{local}.{rule.target}", prefix)
            elif (rule.place == "first" and first) or (rule.place == "last" and last):
                yield from self._bind(rule, rule.target, self._prefix)

    def _bind(self, rule: Rule, target: str, prefix: str) -> Iterator[_Bound]:
        names = rule.source_names(self.architecture, prefix)
        if rule.target == "lm_head.weight":
            names = self._head(names, rule.sources)
        if not all([self.ledger.consume(name, target) for name in names]):
            return
        for name in names:
            self._refuse_type(name)
        parts: tuple[Matrix, ...] = tuple(Tensor(self.source, name) for name in names)
        if rule.prepare is not None:
            parts = rule.prepare(self.architecture, parts)
        vector = len(self.source.tensors[names[0]].shape) < 2
        yield _Bound(target, rule, parts, vector, self.architecture.num_experts if rule.stacked else 0)

    def _refuse_type(self, name: str) -> None:
        info = self.source.tensors[name]
        if info.dtype not in PLAIN_FLOATS:
            raise SourceError(
                f"{info.file}: {name} is {info.dtype}; expected one of {', '.join(PLAIN_FLOATS)}",
                hint="the weights are quantized in a way that this conversion does not read",
            )

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


def _target(bound: _Bound, architecture: Architecture, options: ConvertOptions, dtype: str, tp_rank: int) -> Target:
    piece = shard(bound.rule.layout, bound.parts, architecture, options, tp_rank)
    if bound.vector:
        shape: tuple[int, ...] = (piece.rows,)
    elif bound.experts:
        shape = (bound.experts, piece.rows // bound.experts, piece.cols)
    else:
        shape = (piece.rows, piece.cols)
    return Target(bound.name, shape, bound.rule.dtype or dtype, piece)


def _refuse_differences(
    ranks: tuple[tuple[Target, ...], ...],
    config: Mapping[str, Any],
    stages: list[list[_Bound]],
    source: TensorSource,
) -> None:
    """Compare what will be written with what the model needs; name the source tensors behind a wrong shape."""
    origins = {bound.name: bound.parts for stage in stages for bound in stage}
    for rank, (targets, expected) in enumerate(zip(ranks, expected_tensors(config), strict=True)):
        produced = {target.name: (target.shape, target.dtype) for target in targets}
        findings = compare_targets(produced, expected, f"rank{rank}.safetensors")
        if findings:
            first = findings[0]
            name = first.message.split()[0]
            parts = ", ".join(f"{p.origin()} [{p.rows}, {p.cols}]" for p in origins.get(name, ()))
            raise SourceError(
                f"{source.path}: rank {rank}: {first.message}" + (f"; made from {parts}" if parts else ""),
                hint="config.json and weights do not belong together",
                findings=findings,
            )


def _warnings(architecture: Architecture) -> Iterator[str]:
    window = effective_window(architecture)
    if window is not None:
        yield (
            f"attention looks back {window} tokens only: sliding_window is carried in config.json; "
            "the engine's attention window must be set to it"
        )
