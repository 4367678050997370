"""Scales that mean something: after measuring, and in the finished checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeline.errors import Finding, SourceError

_SHOWN = 6
# Tensors of a checkpoint that are scales, by their last name.
_SCALES = (
    "activation_scaling_factor",
    "weights_scaling_factor",
    "weights_scaling_factor_2",
    "prequant_scaling_factor",
    "kv_cache_scaling_factor",
    "per_channel_scale",
    "act_scale",
    "smoother",
    "scale_to_int",
    "quantization_scaling_factor",
)
# Scales that are 1 on purpose where activations are scaled at run time.
_DUMMIES = ("scale_to_int",)
# Scales of what was measured: 1 everywhere is the mark of a calibration that had no effect.
_MEASURED = ("activation_scaling_factor", "kv_cache_scaling_factor", "act_scale", "quantization_scaling_factor")


def check_ranges(values: Mapping[str, npt.NDArray[np.float32]]) -> None:
    """Refuse ranges that no model gives.

    Args:
        values: ``<linear>.x`` and ``<linear>.y``.

    Raises:
        SourceError: A range holds NaN or infinities, is all zero, or all modules have the same; names the modules.
    """
    findings = []
    for name, amax in values.items():
        if not np.isfinite(amax).all():
            findings.append(Finding("scale-not-finite", "error", name, f"{name} holds NaN or infinite values"))
        elif not amax.any():
            findings.append(Finding("scale-zero", "error", name, f"{name} is zero everywhere"))
    inputs = {name: float(amax.max()) for name, amax in values.items() if name.endswith(".x")}
    if not findings and len(inputs) > 1 and len(set(inputs.values())) == 1:
        value = next(iter(inputs.values()))
        findings = [Finding("scale-default", "error", name, f"{name} is {value:g}, as everywhere") for name in inputs]
    _raise("calibration measured nothing that can be used", findings)


def check_scales(checkpoint: Path, *, floors: bool = True) -> None:
    """Refuse a checkpoint whose scales cannot be meant.

    Args:
        checkpoint: Finished folder.
        floors: Whether KV scales of 1 may stand, because they were raised to it.

    Raises:
        SourceError: A scale is missing, zero, negative, NaN, infinite, or 1 in every layer; names the modules.
    """
    from pipeline.checkpoint import verify_checkpoint

    findings = [_with_tensor(finding) for finding in verify_checkpoint(checkpoint) if finding.severity == "error"]
    ones: dict[str, list[str]] = {}
    counts: dict[str, int] = {}
    for name, values in _scales(checkpoint):
        kind = name.rpartition(".")[2]
        if not np.isfinite(values).all():
            findings.append(Finding("scale-not-finite", "error", name, f"{name} holds NaN or infinite values"))
        elif kind != "weights_scaling_factor" and not (values > 0).all():
            findings.append(Finding("scale-zero", "error", name, f"{name} holds values that are not positive"))
        elif not values.any():
            findings.append(Finding("scale-zero", "error", name, f"{name} is zero everywhere"))
        counts[kind] = counts.get(kind, 0) + 1
        if kind in _MEASURED and (values == 1).all():
            ones.setdefault(kind, []).append(name)
    for kind, names in ones.items():
        if len(names) == counts[kind] and not (floors and kind == "kv_cache_scaling_factor"):
            findings += [Finding("scale-default", "error", name, f"{name} is 1, as everywhere") for name in names]
    _raise(f"{checkpoint.name}: the scales of the checkpoint cannot be meant", findings)


def _with_tensor(finding: Finding) -> Finding:
    """Name the tensor beside its file, for the list of modules."""
    tensor = finding.message.partition(" ")[0]
    return replace(finding, path=f"{finding.path}: {tensor}") if tensor.endswith(_SCALES) else finding


def _scales(checkpoint: Path) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    from pipeline.engines.reference.safetensors_file import SafetensorsFile, to_float32

    for path in sorted(checkpoint.glob("rank*.safetensors")):
        file = SafetensorsFile(path)
        for name in file.names():
            kind = name.rpartition(".")[2]
            if kind in _SCALES and kind not in _DUMMIES:
                yield name, to_float32(file.tensor(name))


def _raise(what: str, findings: list[Finding]) -> None:
    if not findings:
        return
    named = list(dict.fromkeys(finding.path for finding in findings))
    more = f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
    first = findings[0].message
    raise SourceError(
        f"{what}: {first}; modules: {', '.join(named[:_SHOWN])}{more}",
        hint="calibrate on real text of a few thousand tokens, and check the source with `checkpoint inspect`",
        findings=findings,
    )
