"""Turn a source and options into a list of reads and writes, with the books closed before a byte is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.checkpoint.binding import Binder, Bound, Form, Target
from pipeline.checkpoint.contract import expected_tensors
from pipeline.checkpoint.families import Family, family_of
from pipeline.checkpoint.hfconfig import Architecture, read_architecture
from pipeline.checkpoint.ledger import Ledger, compare_targets
from pipeline.checkpoint.options import ConvertOptions
from pipeline.checkpoint.quantization import Scheme, SchemeContext, choose_scheme
from pipeline.checkpoint.readers import TensorSource
from pipeline.checkpoint.sharder import refuse_bad_sizes, shard, stage_layers
from pipeline.checkpoint.target_config import effective_window, resolve_dtype, target_config
from pipeline.errors import SourceError


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
    if architecture.num_layers > len(source.tensors):  # before anything is done for each layer
        raise SourceError(
            f"{source.path}: the config states {architecture.num_layers} layers, the weights are "
            f"{len(source.tensors)} tensors in all",
            hint="config.json and weights do not belong together",
        )
    family = family_of(architecture.name)
    if family.check is not None:
        family.check(architecture)
    notes: tuple[str, ...] = ()
    if family.adjust is not None:
        options, notes = family.adjust(options)
    refuse_bad_sizes(architecture, options)
    dtype = resolve_dtype(architecture, options)
    ledger = Ledger(source.tensors)
    scheme = choose_scheme(SchemeContext(source, architecture, family, options, dtype, ledger))
    config = target_config(architecture, family, dtype, options)
    config["quantization"] |= scheme.quantization
    binder = Binder(source, architecture, family, ledger, scheme.accepts)
    stages = [_stage(binder, scheme, layers) for layers in stage_layers(architecture.num_layers, options.pp)]
    ledger.ignore((*family.ignored, *scheme.ignored))
    ledger.close(str(source.path))
    ranks = tuple(
        tuple(
            target for bound in stage for target in scheme.finish(_target(bound, architecture, options, dtype, tp_rank))
        )
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
        warnings=(*source.warnings, *notes, *scheme.warnings, *_warnings(architecture, options, config)),
    )


def _stage(binder: Binder, scheme: Scheme, layers: range) -> list[Bound]:
    bound = [made for plain in binder.stage(layers) for made in scheme.expand(plain)]
    return [*bound, *(made for names in binder.layer_names(layers) for made in scheme.layer_tensors(names))]


def _target(bound: Bound, architecture: Architecture, options: ConvertOptions, dtype: str, tp_rank: int) -> Target:
    piece = shard(bound.rule.layout, bound.parts, architecture, options, tp_rank)
    experts = architecture.num_experts
    shapes: Mapping[Form, tuple[int, ...]] = {
        Form.MATRIX: (piece.rows, piece.cols),
        Form.VECTOR: (piece.rows,),
        Form.ROW: (1, piece.rows),
        Form.SCALAR: (),
        Form.EXPERTS: (experts, piece.rows // max(1, experts), piece.cols),
    }
    return Target(bound.name, shapes[bound.form], bound.rule.dtype or dtype, piece, bound.rule)


def _refuse_differences(
    ranks: tuple[tuple[Target, ...], ...],
    config: Mapping[str, Any],
    stages: list[list[Bound]],
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


def _warnings(architecture: Architecture, options: ConvertOptions, config: Mapping[str, Any]) -> Iterator[str]:
    plain = config["quantization"].get("quant_algo") is None and not options.dequantize
    if architecture.raw.get("quantization_config") is not None and plain:
        yield "the config states a quantization_config, the weights are plain numbers: it is not carried over"
    if options.dtype == "auto" and architecture.dtype in ("", "float32"):
        stated = architecture.dtype or "no type"
        yield f"the config states {stated}: weights are written as float16, as NVIDIA's converter does; ask for another"
    window = effective_window(architecture)
    if window is not None:
        yield (
            f"attention looks back {window} tokens only: sliding_window is carried in config.json; "
            "the engine's attention window must be set to it"
        )
