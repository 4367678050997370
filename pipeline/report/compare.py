"""What two results have in common and where they differ: manifests by path, gate measures by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import SourceError
from pipeline.gate.results import read_results
from pipeline.report.html import flatten


@dataclass(frozen=True, slots=True)
class Result:
    """A finished result folder: its manifest and, where it was judged, its gate.json."""

    folder: Path
    manifest: Mapping[str, Any]
    gate: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class ComparedMeasure:
    """One measure of both sides; None where a side lacks it."""

    name: str
    unit: str
    a: float | None
    b: float | None
    a_status: str
    b_status: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything that differs.

    Attributes:
        manifest: (path, value in A, value in B) of every entry that differs; empty text where a side lacks it.
        measures: Of either side.
        comparable: False when the gates used other texts, windows or baselines: numbers then say nothing together.
        note: Why not comparable.
    """

    manifest: tuple[tuple[str, str, str], ...]
    measures: tuple[ComparedMeasure, ...]
    comparable: bool
    note: str


def load_result(folder: Path) -> Result:
    """Read ``manifest.json`` and, if there, ``gate.json`` of a result folder.

    Raises:
        SourceError: No manifest, or a file that cannot be read.
    """
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SourceError(
            f"{path}: cannot be read as a manifest: {error}", hint="name a result folder such as dist/<name>"
        ) from error
    if not isinstance(manifest, dict):
        raise SourceError(f"{path}: holds {type(manifest).__name__}, expected a JSON object")
    gate_path = folder / "gate.json"
    return Result(folder, manifest, read_results(gate_path) if gate_path.is_file() else None)


def compare_results(a: Result, b: Result) -> Comparison:
    """Compare two result folders."""
    left, right = dict(flatten(a.manifest)), dict(flatten(b.manifest))
    differing = tuple(
        (path, left.get(path, ""), right.get(path, ""))
        for path in dict.fromkeys([*left, *right])
        if left.get(path) != right.get(path)
    )
    note = _obstacle(a.gate, b.gate)
    return Comparison(differing, _measures(a.gate, b.gate), not note, note)


def _obstacle(a: Mapping[str, Any] | None, b: Mapping[str, Any] | None) -> str:
    """Say why the numbers of two gates cannot be held against each other; empty when they can."""
    if a is None or b is None:
        return "only one of them was judged" if a is not b else "neither was judged"
    for key in ("text_digest", "tokens", "window", "stride", "add_bos"):
        if a["protocol"][key] != b["protocol"][key]:
            return f"the gates differ in {key}: {a['protocol'][key]} and {b['protocol'][key]}"
    for key in ("source_digest", "tokenizer_digest"):
        if a["baseline"][key] != b["baseline"][key]:
            return f"the baselines differ in {key}: {a['baseline'][key]:.12} and {b['baseline'][key]:.12}"
    return ""


def _measures(a: Mapping[str, Any] | None, b: Mapping[str, Any] | None) -> tuple[ComparedMeasure, ...]:
    left, right = (
        {measure["name"]: measure for measure in gate["measures"]} if gate is not None else {} for gate in (a, b)
    )
    rows = []
    for name in dict.fromkeys([*left, *right]):
        one, two = left.get(name), right.get(name)
        present: Mapping[str, Any] = one or two or {}
        rows.append(
            ComparedMeasure(
                name,
                present["unit"],
                one and one["value"],
                two and two["value"],
                one["status"] if one else "missing",
                two["status"] if two else "missing",
            )
        )
    return tuple(rows)
