"""gate.json, junit.xml and the terminal lines."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import numpy as np
import pytest
from gate_fakes import NEWLINE, TableEngine

from pipeline.errors import ExitCode, GateFailed, SourceError
from pipeline.gate.results import gate_document, junit, read_results, require_passed, summary_lines, write_results
from pipeline.gate.thresholds import Thresholds
from pipeline.gate.verdict import judge


@pytest.fixture
def document_of(measured):
    def make(engine, **changes):
        limits = changes.pop("thresholds", Thresholds())
        evaluation = measured(engine, thresholds=limits, **changes)
        return gate_document(evaluation, judge(evaluation, limits), limits)

    return make


def test_write_results_gives_files_that_read_back(table, tmp_path, document_of):
    document = document_of(TableEngine(table))
    write_results(tmp_path, document)
    assert read_results(tmp_path / "gate.json") == document
    assert document["verdict"] == "passed"
    assert document["baseline"]["kind"] == "recorded"
    assert {"kl", "perplexity", "top1_agreement"} <= {measure["name"] for measure in document["measures"]}


def test_gate_document_has_the_same_content_for_the_same_inputs(table, document_of):
    first, second = (document_of(TableEngine(table, noise=0.01)) for _ in range(2))
    assert {**first, "seconds": 0} == {**second, "seconds": 0}


@pytest.mark.parametrize(
    "change,verdict,tag",
    [
        (lambda t: t, "passed", None),
        (lambda t: t * 4, "failed", "failure"),
        (lambda t: np.zeros_like(t), "invalid", "error"),
    ],
    ids=["passed", "failed", "invalid"],
)
def test_junit_carries_the_verdict(change, verdict, tag, table, document_of):
    document = document_of(TableEngine(change(table)))
    root = ElementTree.fromstring(junit(document))
    suite = root.find("testsuite")
    cases = {case.get("name"): case for case in suite.findall("testcase")}
    assert document["verdict"] == verdict
    assert int(suite.get("tests")) == len(cases)
    assert [child.tag for child in cases["verdict"]] == ([tag] if tag else [])
    bad = sum(case.find("failure") is not None for case in cases.values())
    assert int(suite.get("failures")) == bad
    if verdict == "failed":
        assert "perplexity_ratio" in cases["perplexity_ratio"].find("failure").get("message")


def test_junit_survives_characters_xml_cannot_hold(table, document_of):
    document = document_of(TableEngine(table))
    hostile = {**document, "verdict": "failed", "reasons": ["\x00\x08<script>&\ud800 ok"]}
    message = ElementTree.fromstring(junit(hostile)).find(".//failure").get("message")
    assert "<script>&" in message and "ok" in message


def test_summary_lines_name_the_baseline_and_every_judged_measure(table, document_of):
    lines = "\n".join(summary_lines(document_of(TableEngine(table))))
    assert "passed" in lines and "recorded" in lines
    for name in ("perplexity_ratio", "top1_agreement", "new_degenerate"):
        assert name in lines


@pytest.mark.parametrize("change", [lambda t: t * 4, lambda t: np.zeros_like(t)], ids=["failed", "invalid"])
def test_require_passed_raises_the_gate_exit_code_otherwise(change, table, document_of):
    require_passed(document_of(TableEngine(table)))
    with pytest.raises(GateFailed) as caught:
        require_passed(document_of(TableEngine(change(table))))
    assert caught.value.exit_code == ExitCode.GATE
    assert caught.value.hint


def test_gate_document_shows_the_worst_passages_with_their_words(table, document_of):
    sick = table.copy()
    sick[:, NEWLINE] += 3
    passages = document_of(TableEngine(sick))["text"]["worst_passages"]
    assert len(passages) == 5
    assert passages[0]["difference"] >= passages[1]["difference"] > 0
    assert passages[0]["text"].strip()


@pytest.mark.parametrize("content", ["", "[1, 2]", json.dumps({"schema_version": 99})])
def test_read_results_refuses_anything_else(content, tmp_path):
    (tmp_path / "gate.json").write_text(content)
    with pytest.raises(SourceError, match="gate result"):
        read_results(tmp_path / "gate.json")
