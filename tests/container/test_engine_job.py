"""A whole engine job through real containers: plan and run agree, faults publish nothing, the next run goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from container_case import IMAGE

from pipeline.cli.main import main

pytestmark = pytest.mark.container

MODEL = Path(__file__).parents[1] / "data" / "models" / "tiny-llama"


def job(*more: str) -> list[str]:
    """Return the overrides of a tiny engine job for the stand-in image."""
    return [
        f"model.path={MODEL}",
        "model=hf",
        "target=engine",
        "hardware=h100_80g",
        "runner=podman",
        "runner.ulimits=[]",
        "runner.pull=never",
        "toolchain.standin=true",
        f"toolchain.build_image={IMAGE}",
        *more,
    ]


def ended(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def engines(store: Path) -> list[Path]:
    return sorted(path for path in store.rglob("rank*.engine"))


@pytest.fixture(autouse=True)
def _folder(podman: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("more", "ranks"),
    [(("precision=fp16",), 1), (("precision=fp8", "parallel=tp2", "calibration=short"), 2)],
    ids=["fp16", "fp8-tp2"],
)
def test_engines_are_built_once_and_the_end_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, more: tuple[str, ...], ranks: int
) -> None:
    code, document = ended(capsys, *job(*more))
    assert code == 3, document
    assert {finding["rule"] for finding in document["findings"]} == {"engine-not-judged"}
    built = engines(tmp_path / ".pipeline" / "store")
    assert [path.name for path in built] == [f"rank{rank}.engine" for rank in range(ranks)]
    before = [path.stat().st_mtime_ns for path in built]
    ended(capsys, *job(*more))
    assert [path.stat().st_mtime_ns for path in engines(tmp_path / ".pipeline" / "store")] == before


@pytest.mark.parametrize("fault", ["missing-rank", "out-of-memory"])
def test_half_failed_build_is_exit_5_and_publishes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, fault: str
) -> None:
    failing = job("precision=fp16", "parallel=tp2", f"runner.extra=[--env=STANDIN_FAULT=trtllm-build:{fault}]")
    code, document = ended(capsys, *failing)
    assert code == 5, document
    store = tmp_path / ".pipeline" / "store"
    assert not [path for path in engines(store) if "logs" not in path.parts and "failed" not in str(path)]
    if fault == "out-of-memory":
        (finding,) = document["findings"]
        assert "memory" in finding["message"].lower() and finding["hint"]
        assert "log:" in document["error"]["message"] and "CUDA out of memory" in document["error"]["message"]
    code, document = ended(capsys, *job("precision=fp16", "parallel=tp2"))
    assert code == 3 and len(engines(store)) >= 2


def test_image_of_another_release_stops_with_both_versions(
    capsys: pytest.CaptureFixture[str], newer_image: str
) -> None:
    code, document = ended(capsys, *job("precision=fp16", f"toolchain.build_image={newer_image}"))
    assert code == 3
    assert any("1.4.0" in f["message"] and "1.2.1" in f["message"] for f in document["findings"])
