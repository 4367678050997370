"""report.html: one file, no script, no external resource. Everything in it is escaped; model text is hostile."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.report import plots

_SIGNS = {"passed": "✓", "failed": "✕", "inconclusive": "?", "invalid": "!", "none": "–"}
_SENTENCES = {
    "passed": "Every judged measure keeps its limit.",
    "failed": "At least one measure breaks its limit; nothing was emitted.",
    "inconclusive": "The measurement cannot tell on which side of a limit the artefact lies; nothing was emitted.",
    "invalid": "Nothing was proven; nothing was emitted.",
    "none": "The artefact was not judged.",
}
_LABELS = {
    "kl": "KL divergence",
    "top1_agreement": "Top-1 agreement",
    "new_degenerate": "Newly broken answers",
    "greedy_identical": "Identical greedy answers",
}
_FACT_KEYS = ("target", "model", "precision", "toolchain", "hardware", "checkpoint_digest", "created")


class _Headline(NamedTuple):
    word: str
    css: str
    sign: str
    sentence: str


class _Split(NamedTuple):
    same: str
    baseline: str
    candidate: str


def write_report(
    out_dir: Path,
    *,
    manifest: Mapping[str, Any],
    evaluation_json: Mapping[str, Any] | None,
    stages: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """Write ``report.html``.

    Args:
        out_dir: Existing folder.
        manifest: What was made; ``name`` is the heading. Any JSON.
        evaluation_json: A gate.json, or None when nothing was judged.
        stages: In order: ``name``, ``status`` (``hit``, ``built`` …), ``seconds``, ``reason``, ``artefact``; missing
            keys stay empty.

    Returns:
        The file.
    """
    path = out_dir / "report.html"
    path.write_text(render_report(manifest=manifest, evaluation_json=evaluation_json, stages=stages), encoding="utf-8")
    return path


def render_report(
    *,
    manifest: Mapping[str, Any],
    evaluation_json: Mapping[str, Any] | None,
    stages: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Return the page as text; see :func:`write_report`."""
    gate = evaluation_json
    verdict = str(gate["verdict"]) if gate else "none"
    measures = list(gate["measures"]) if gate else []
    return str(
        _environment()
        .get_template("report.html.j2")
        .render(
            css=_css(),
            name=str(manifest.get("name", "artefact")),
            headline=_Headline(
                verdict if gate else "not judged", verdict, _SIGNS.get(verdict, "–"), _SENTENCES.get(verdict, "")
            ),
            kind=manifest.get("kind", ""),
            facts=[(key.replace("_", " "), _brief(manifest[key])) for key in _FACT_KEYS if manifest.get(key)],
            gate=gate,
            judged=[measure for measure in measures if measure["status"] != "not judged"],
            informal=[measure for measure in measures if measure["status"] == "not judged"],
            plots=_plots(gate) if gate else {},
            stages=_stage_rows(stages),
            timed=any(stage.get("seconds") is not None for stage in stages),
            rows=list(flatten(manifest)),
        )
    )


def _environment() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        number=format_number,
        seconds=lambda value: "" if value is None else f"{value:.1f}",
        short=lambda digest: str(digest).removeprefix("sha256:")[:12],
        sign=lambda status: _SIGNS.get(status, ""),
        strip=plots.interval_strip,
        words=measure_label,
        common=_split,
    )
    return environment


def _css() -> Any:
    from markupsafe import Markup

    # Our own file: the one text that must not be escaped.
    return Markup((Path(__file__).parent / "templates" / "report.css").read_text(encoding="utf-8"))


def measure_label(name: str) -> str:
    """Return the name of a measure as people read it."""
    return _LABELS.get(name) or name.replace("task:", "accuracy lost on ").replace("_", " ").capitalize()


def format_number(value: float | None) -> str:
    """Write a number for people: four digits, no needless exponent; a dash for none."""
    if value is None:
        return "–"
    return f"{value:.2e}" if 0 < abs(value) < 1e-3 else f"{value:.4g}"


def _brief(value: Any) -> str:
    if isinstance(value, Mapping):
        return str(value.get("name") or value.get("release") or json.dumps(value, ensure_ascii=False))
    text = str(value)
    return text if len(text) <= 60 else text[:16] + "…"


def _split(entry: Mapping[str, Any]) -> _Split:
    """Part two answers into what they share at the start and what follows."""
    before, after = entry["baseline"], entry["candidate"]
    pairs = enumerate(zip(before, after, strict=False))
    same = next((index for index, (a, b) in pairs if a != b), min(len(before), len(after)))
    return _Split(before[:same], before[same:], after[same:])


def _plots(gate: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {"kl": None}
    text = gate["text"]
    if text:
        made["blocks"] = plots.block_differences(text, gate["thresholds"]["perplexity_ratio_max"])
        made["scatter"] = plots.logprob_scatter(text)
        bins = text["difference_histogram"]
        made["differences"] = plots.histogram(
            "Differences of log probability", "baseline minus candidate, nats", bins["edges"], bins["counts"]
        )
        if text["kl_histogram"]:
            bins = text["kl_histogram"]
            made["kl"] = plots.histogram(
                "Divergence per position", "KL, nats", bins["log10_edges"], bins["counts"], powers_of_ten=True
            )
    if gate["tasks"]:
        made["tasks"] = plots.task_bars(gate["tasks"])
    return made


def _stage_rows(stages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    longest = max((float(stage.get("seconds") or 0) for stage in stages), default=0.0) or 1.0
    return [
        {
            "name": stage.get("name", ""),
            "status": stage.get("status", ""),
            "seconds": stage.get("seconds"),
            "share": round(100 * float(stage.get("seconds") or 0) / longest),
            "reason": stage.get("reason", ""),
            "artefact": stage.get("artefact") or "",
        }
        for stage in stages
    ]


def flatten(value: Any, path: str = "") -> list[tuple[str, str]]:
    """Turn nested JSON into rows of dotted path and value."""
    if isinstance(value, Mapping) and value:
        return [row for key, entry in value.items() for row in flatten(entry, f"{path}.{key}" if path else str(key))]
    if isinstance(value, list | tuple) and value and any(isinstance(entry, Mapping | list) for entry in value):
        return [row for index, entry in enumerate(value) for row in flatten(entry, f"{path}[{index}]")]
    if not path:
        return []
    return [(path, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))]
