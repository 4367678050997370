"""What the gate leaves behind: gate.json for programs, junit.xml for CI, a few lines for the terminal."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

from pipeline.errors import GateFailed, SourceError
from pipeline.gate.baseline import WHAT_IT_SHOWS
from pipeline.gate.evaluation import Evaluation, Measure
from pipeline.gate.statistics import block_means
from pipeline.gate.thresholds import BLOCK_TOKENS, Thresholds
from pipeline.gate.verdict import Judgement, Verdict

SCHEMA_VERSION = 1
# Points of the scatter plot and bins of the histograms: enough for the eye, small enough for a file.
_POINTS = 600
_BINS = 41


def gate_document(evaluation: Evaluation, verdict: Verdict, thresholds: Thresholds) -> dict[str, Any]:
    """Return gate.json [contract of the result]: JSON values only, no NaN, no infinity."""
    baseline = evaluation.baseline
    document = {
        "schema_version": SCHEMA_VERSION,
        "verdict": verdict.status,
        "reasons": list(verdict.reasons),
        "caveats": list(evaluation.caveats),
        "not_measured": dict(evaluation.not_measured),
        "protocol": evaluation.protocol.to_json(),
        "candidate": {
            "engine": evaluation.candidate.kind,
            "checkpoint_digest": evaluation.candidate.checkpoint_digest,
            "vocab_size": evaluation.candidate.vocab_size,
        },
        "baseline": {
            "kind": baseline.kind,
            "shows": WHAT_IT_SHOWS[baseline.kind],
            "engine": baseline.engine_kind,
            "source_digest": baseline.source_digest,
            "checkpoint_digest": baseline.checkpoint_digest,
            "tokenizer_digest": baseline.tokenizer_digest,
            "made_by": baseline.made_by,
            "versions": dict(baseline.versions),
        },
        "thresholds": thresholds.to_json(),
        "measures": [_measure(measure, verdict) for measure in evaluation.measures],
        "text": _text_plots(evaluation),
        "continuations": [
            {
                "name": entry.name,
                "kind": entry.kind,
                "prompt": entry.prompt,
                "baseline": entry.baseline_text,
                "candidate": entry.candidate_text,
                "baseline_fault": entry.baseline_fault,
                "candidate_fault": entry.candidate_fault,
                "agreeing_tokens": entry.agreeing_tokens,
            }
            for entry in evaluation.continuations
        ],
        "tasks": [
            {
                "name": task.name,
                "items": task.items,
                "chance": task.chance,
                "baseline": {"acc": task.baseline_acc, "acc_norm": task.baseline_acc_norm},
                "candidate": {"acc": task.candidate_acc, "acc_norm": task.candidate_acc_norm},
                "worst": [dict(item) for item in task.worst],
            }
            for task in evaluation.tasks
        ],
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "seconds": round(evaluation.seconds, 2),
    }
    finite: dict[str, Any] = _finite(document)
    return finite


def _measure(measure: Measure, verdict: Verdict) -> dict[str, Any]:
    judgement = next((entry for entry in verdict.judgements if entry.measure == measure.name), None)
    interval = measure.interval
    return {
        "name": measure.name,
        "value": _round(measure.value),
        "unit": measure.unit,
        "interval": None if interval is None else [_round(interval.low), _round(interval.high)],
        "confidence": None if interval is None else interval.confidence,
        "samples": measure.samples,
        "detail": measure.detail,
        **_judgement(judgement),
    }


def _judgement(judgement: Judgement | None) -> dict[str, Any]:
    if judgement is None:
        return {"status": "not judged", "limit": None, "limit_is": None, "reason": "", "samples_needed": None}
    return {
        "status": judgement.status,
        "limit": judgement.limit,
        "limit_is": "at most" if judgement.at_most else "at least",
        "reason": judgement.reason,
        "samples_needed": judgement.samples_needed,
    }


def _text_plots(evaluation: Evaluation) -> dict[str, Any] | None:
    """Condense the per-token arrays to what the plots need."""
    scores, differences = evaluation.scores, evaluation.differences
    if scores is None or not len(differences):
        return None
    step = max(1, len(differences) // _POINTS)
    reference = evaluation.baseline.logprobs
    reach = max(float(np.quantile(np.abs(differences), 0.995)), 1e-9)
    counts, edges = np.histogram(np.clip(differences, -reach, reach), bins=_BINS, range=(-reach, reach))
    plots: dict[str, Any] = {
        "block_tokens": BLOCK_TOKENS,
        "block_differences": [_round(value) for value in block_means(differences, BLOCK_TOKENS)],
        "logprob_pairs": [
            [_round(float(a)), _round(float(b))]
            for a, b in zip(reference[::step], scores.logprobs[::step], strict=True)
        ],
        "difference_histogram": {"edges": [_round(edge) for edge in edges], "counts": counts.tolist()},
        "kl_histogram": None,
    }
    if evaluation.divergences.size:
        exponents = np.log10(np.maximum(evaluation.divergences, 1e-9))
        counts, edges = np.histogram(exponents, bins=36, range=(-9.0, 3.0))
        plots["kl_histogram"] = {"log10_edges": [_round(edge) for edge in edges], "counts": counts.tolist()}
    plots["worst_passages"] = [
        {"first_token": entry.first_token, "difference": _round(entry.difference), "text": entry.text}
        for entry in evaluation.worst_passages
    ]
    return plots


def _round(value: float) -> float:
    """Keep seven significant digits: what float32 inputs support."""
    return float(f"{value:.7g}")


def _finite(value: Any) -> Any:
    """Replace numbers JSON does not have by null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value


def junit(document: Mapping[str, Any], *, suite: str = "accuracy gate") -> str:
    """Return junit.xml: one test case per measure and one for the verdict.

    Failed measures are failures; invalid and inconclusive evaluations are errors; what has no limit is skipped.
    """
    root = ElementTree.Element("testsuites")
    element = ElementTree.SubElement(root, "testsuite", name=suite)
    failures = errors = skipped = 0
    for measure in document["measures"]:
        case = ElementTree.SubElement(element, "testcase", classname="gate", name=measure["name"])
        status, reason = measure["status"], measure["reason"]
        if status == "failed":
            failures += 1
            ElementTree.SubElement(case, "failure", message=_xml(reason), type="failed")
        elif status == "inconclusive":
            errors += 1
            ElementTree.SubElement(case, "error", message=_xml(reason), type="inconclusive")
        elif status == "not judged":
            skipped += 1
            ElementTree.SubElement(case, "skipped", message=_xml(f"{measure['value']} {measure['unit']}, no limit"))
        else:
            ElementTree.SubElement(case, "system-out").text = _xml(reason)
    for name, reason in document["not_measured"].items():
        case = ElementTree.SubElement(element, "testcase", classname="gate", name=_xml(name))
        ElementTree.SubElement(case, "skipped", message=_xml(f"not measured: {reason}"))
        skipped += 1
    case = ElementTree.SubElement(element, "testcase", classname="gate", name="verdict")
    reasons = _xml("\n".join(document["reasons"]))
    if document["verdict"] == "failed":
        failures += 1
        ElementTree.SubElement(case, "failure", message=reasons, type="failed")
    elif document["verdict"] != "passed":
        errors += 1
        ElementTree.SubElement(case, "error", message=reasons, type=document["verdict"])
    counts = {"tests": len(element.findall("testcase")), "failures": failures, "errors": errors, "skipped": skipped}
    for target in (root, element):
        for key, count in counts.items():
            target.set(key, str(count))
    element.set("time", str(document["seconds"]))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _xml(text: str) -> str:
    """Drop the characters XML 1.0 cannot hold; model text may contain any."""
    return "".join(
        c if c in "\t\n\r" or " " <= c <= "\ud7ff" or "\ue000" <= c <= "\ufffd" or c > "\uffff" else "�" for c in text
    )


def write_results(folder: Path, document: Mapping[str, Any]) -> None:
    """Write gate.json and junit.xml."""
    text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)
    (folder / "gate.json").write_text(text + "\n", encoding="utf-8")
    (folder / "junit.xml").write_text(junit(document), encoding="utf-8")


def read_results(path: Path) -> dict[str, Any]:
    """Read a gate.json.

    Raises:
        SourceError: Missing, not JSON, or of another schema.
    """
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SourceError(f"{path}: cannot be read as a gate result: {error}") from error
    if not isinstance(document, dict) or document.get("schema_version") != SCHEMA_VERSION:
        raise SourceError(f"{path}: not a gate result of schema {SCHEMA_VERSION}")
    return document


def summary_lines(document: Mapping[str, Any]) -> list[str]:
    """Return what the terminal shows: verdict, judged measures, baseline, caveats."""
    baseline = document["baseline"]
    lines = [f"gate {document['verdict']} · {document['protocol']['name']} · baseline {baseline['kind']}"]
    for measure in document["measures"]:
        if measure["status"] != "not judged":
            lines.append(f"  {measure['status']:<12} {measure['reason']}")
    if document["verdict"] == "invalid":
        lines += [f"  {reason}" for reason in document["reasons"]]
    lines += [f"  not measured: {name} ({reason})" for name, reason in document["not_measured"].items()]
    lines += [f"  note: {caveat}" for caveat in document["caveats"]]
    return lines


_OTHER_WITNESS = (
    "this model needs another witness: gate.baseline_python=PYTHON, an interpreter with torch and transformers (extra "
    "`oracle` under constraints/oracle.txt)"
)
_HINTS = {
    "failed": "see report.html; a coarser precision needs wider limits (gate.perplexity_ratio_max=...)",
    "inconclusive": "measure more text (gate=standard) or widen the limit",
    "invalid": "nothing was proven: repair what the reasons name, then run again",
}


def require_passed(document: Mapping[str, Any]) -> None:
    """Raise unless the verdict is passed.

    Raises:
        GateFailed: Failed, inconclusive or invalid, with the reasons.
    """
    verdict = document["verdict"]
    if verdict != "passed":
        reasons = "; ".join(document["reasons"])
        hint = _OTHER_WITNESS if "the candidate itself" in reasons else _HINTS[verdict]
        raise GateFailed(f"accuracy gate {verdict}: {reasons}", hint=hint)
