"""report.html is one safe file, whatever a model wrote."""

from __future__ import annotations

import copy
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pipeline.report.html import flatten, format_number, render_report, write_report

GATE = json.loads((Path(__file__).parents[2] / "data" / "report" / "gate.json").read_text(encoding="utf-8"))
MANIFEST = {
    "name": "smollm2-bf16-reference",
    "kind": "CPU rehearsal",
    "target": "reference",
    "inputs": {"source": {"digest": "ab" * 32}},
}
STAGES = [
    {"name": "fetch", "status": "hit", "seconds": 0.01, "reason": "same key", "artefact": "sha256:" + "12" * 32},
    {"name": "validate", "status": "built", "seconds": 24.2, "reason": "no such key", "artefact": "cd" * 32},
]
HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(1)>\x00{{ 7*7 }}\"'"


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words.append(data)


def test_write_report_shows_verdict_measures_stages_and_manifest(tmp_path):
    path = write_report(tmp_path, manifest=MANIFEST, evaluation_json=GATE, stages=STAGES)
    page = Tags(path.read_text(encoding="utf-8"))
    words = " ".join(page.words)
    for expected in (
        "smollm2-bf16-reference",
        GATE["verdict"],
        "Top-1 agreement",
        "validate",
        "CPU rehearsal",
        "inputs.source.digest",
    ):
        assert expected in words
    assert "121212121212" in words and "sha256:" not in words  # the short form of a digest


def test_render_report_needs_no_other_resource():
    page = render_report(manifest=MANIFEST, evaluation_json=GATE, stages=STAGES)
    tags = Tags(page)
    assert not {tag for tag, _ in tags.found} & {"script", "link", "iframe", "object", "img"}
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/)", page)
    policy = next(attrs["content"] for tag, attrs in tags.found if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")


def test_render_report_escapes_hostile_text_everywhere():
    gate = copy.deepcopy(GATE)
    gate["reasons"] = [HOSTILE]
    gate["caveats"] = [HOSTILE]
    gate["verdict"] = "failed"
    gate["not_measured"] = {HOSTILE: HOSTILE}
    for entry in gate["continuations"]:
        for key in ("prompt", "baseline", "candidate", "candidate_fault", "name"):
            entry[key] = HOSTILE
    gate["text"]["worst_passages"][0]["text"] = HOSTILE
    gate["measures"][0]["detail"] = HOSTILE
    task = {
        "name": HOSTILE,
        "items": 2,
        "chance": 0.25,
        "baseline": {"acc": 0.5, "acc_norm": 0.5},
        "candidate": {"acc": 0.5, "acc_norm": 0.5},
        "worst": [
            {
                "context": HOSTILE,
                "right": HOSTILE,
                "baseline": HOSTILE,
                "candidate": HOSTILE,
                "lost_nats_per_character": 0.1,
            }
        ],
    }
    gate["tasks"] = [task]
    stages = [{"name": HOSTILE, "status": HOSTILE, "seconds": 1.0, "reason": HOSTILE, "artefact": HOSTILE}]
    page = render_report(manifest={"name": HOSTILE, HOSTILE: HOSTILE}, evaluation_json=gate, stages=stages)
    tags = Tags(page)
    assert not [tag for tag, _ in tags.found if tag in ("script", "img")]
    assert not [name for _, attrs in tags.found for name in attrs if name.startswith("on")]
    assert "49" not in {word.strip() for word in tags.words}


def test_render_report_charts_are_well_formed_and_described():
    page = render_report(manifest=MANIFEST, evaluation_json=GATE, stages=())
    charts = re.findall(r"<svg .*?</svg>", page, flags=re.DOTALL)
    assert len(charts) >= 6
    for chart in charts:
        root = ElementTree.fromstring(chart)
        assert root.get("role") == "img"
        assert root.find("title").text
        assert "nan" not in chart


@pytest.mark.parametrize("verdict", ["passed", "failed", "inconclusive", "invalid"])
def test_render_report_names_every_verdict_in_words(verdict):
    gate = {**GATE, "verdict": verdict, "reasons": ["because"], "measures": [], "text": None, "continuations": []}
    page = render_report(manifest=MANIFEST, evaluation_json=gate)
    assert f"<title>smollm2-bf16-reference · {verdict}</title>" in page
    assert ("because" in page) == (verdict != "passed")


def test_render_report_works_without_a_gate():
    page = render_report(manifest={}, evaluation_json=None)
    assert "not judged" in page


def test_render_report_is_the_same_for_the_same_input():
    pages = {render_report(manifest=MANIFEST, evaluation_json=GATE, stages=STAGES) for _ in range(2)}
    assert len(pages) == 1


def test_flatten_gives_dotted_paths():
    assert flatten({"a": {"b": [1, 2], "c": [{"d": None}]}, "e": {}}) == [
        ("a.b", "[1, 2]"),
        ("a.c[0].d", "null"),
        ("e", "{}"),
    ]


@pytest.mark.parametrize(
    "value,expected", [(None, "–"), (0.0, "0"), (1.0, "1"), (37.397637, "37.4"), (1.2e-7, "1.20e-07"), (0.97, "0.97")]
)
def test_format_number_is_short(value, expected):
    assert format_number(value) == expected
