"""The file verbs ``report`` and ``compare``, without their argument parsing: folders in, JSON value and lines out."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.gate.results import summary_lines
from pipeline.report.compare import Comparison, compare_results, load_result
from pipeline.report.html import format_number, measure_label, write_report


def report(folder: Path, out: Path | None = None) -> tuple[dict[str, Any], list[str]]:
    """Say what a result folder holds; make its ``report.html`` anew.

    Args:
        folder: With ``manifest.json`` and ``gate.json``.
        out: Existing folder for a new report. None leaves the one that is there: the manifest has its digest.

    Returns:
        The ``--json`` document and the lines for people.

    Raises:
        SourceError: The folder is no result.
    """
    result = load_result(folder)
    path = folder / "report.html"
    if out is not None:
        path = write_report(out, manifest=result.manifest, evaluation_json=result.gate)
    document = {"schema_version": 1, "report": str(path), "verdict": result.gate["verdict"] if result.gate else None}
    lines = summary_lines(result.gate) if result.gate else ["not judged: no gate.json"]
    return document, [*lines, f"report {path}"]


def compare(a: Path, b: Path) -> tuple[dict[str, Any], list[str]]:
    """Compare two result folders; returns the ``--json`` document and the lines for people.

    Raises:
        SourceError: One of them is no result.
    """
    comparison = compare_results(load_result(a), load_result(b))
    document = {"schema_version": 1, "a": str(a), "b": str(b), **asdict(comparison)}
    return document, _lines(comparison, str(a), str(b))


def _lines(comparison: Comparison, a: str, b: str) -> list[str]:
    lines = [f"A {a}", f"B {b}"]
    if comparison.note:
        lines.append(f"numbers are not comparable: {comparison.note}")
    for measure in comparison.measures:
        lines.append(
            f"  {measure_label(measure.name):<32} {format_number(measure.a):>10} {format_number(measure.b):>10}  "
            f"{measure.unit} ({measure.a_status}, {measure.b_status})"
        )
    if not comparison.manifest:
        return [*lines, "manifests are equal"]
    lines.append(f"manifests differ in {len(comparison.manifest)} entries")
    return [*lines, *(f"  {path}: {one or '-'} | {two or '-'}" for path, one, two in comparison.manifest)]
