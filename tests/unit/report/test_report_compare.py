"""compare A B and report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.errors import SourceError
from pipeline.report.commands import compare, report

GATE = json.loads((Path(__file__).parents[2] / "data" / "report" / "gate.json").read_text(encoding="utf-8"))


def result(folder, manifest, gate=GATE):
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    if gate is not None:
        (folder / "gate.json").write_text(json.dumps(gate))
    return folder


def test_compare_lists_what_differs_and_the_measures(tmp_path):
    a = result(tmp_path / "a", {"precision": "bf16", "same": 1})
    b = result(tmp_path / "b", {"precision": "fp8", "same": 1, "extra": [1]})
    document, lines = compare(a, b)
    assert document["manifest"] == (("precision", "bf16", "fp8"), ("extra", "", "[1]"))
    assert document["comparable"]
    assert any("Perplexity ratio" in line for line in lines)
    json.dumps(document)


def test_compare_says_when_numbers_do_not_belong_together(tmp_path):
    other = {**GATE, "protocol": {**GATE["protocol"], "tokens": 99}}
    document, lines = compare(result(tmp_path / "a", {}), result(tmp_path / "b", {}, other))
    assert not document["comparable"]
    assert any("tokens" in line for line in lines)
    document, _ = compare(tmp_path / "a", result(tmp_path / "c", {}, None))
    assert document["note"] == "only one of them was judged"


def test_report_writes_the_page_again_where_asked_and_leaves_the_result_alone(tmp_path):
    folder = result(tmp_path / "a", {"name": "x"})
    before = sorted(path.name for path in folder.iterdir())
    (tmp_path / "new").mkdir()

    document, lines = report(folder, tmp_path / "new")

    assert document["report"] == str(tmp_path / "new" / "report.html")
    assert (tmp_path / "new" / "report.html").is_file()
    assert document["verdict"] == GATE["verdict"]
    assert lines[-1].startswith("report ")
    assert sorted(path.name for path in folder.iterdir()) == before


@pytest.mark.parametrize("content", [None, "[]", "{"])
def test_report_refuses_a_folder_that_is_no_result(content, tmp_path):
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(SourceError, match=r"manifest\.json"):
        report(tmp_path)
