from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.graph.export import export_tree
from pipeline.graph.places import obstacles


def problems(output_dir: Path, store_root: Path) -> str:
    return "\n".join(f"{finding.path}: {finding.message}" for finding in obstacles(output_dir, store_root))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_places_are_free_when_nothing_is_there(here: Path) -> None:
    assert problems(here / "dist" / "job", here / ".pipeline" / "store") == ""
    assert list(here.iterdir()) == [], "looking leaves nothing behind"


def test_places_accept_an_empty_folder_and_an_earlier_export(here: Path, tmp_path: Path) -> None:
    artefact = tmp_path / ("a" * 64)
    artefact.mkdir()
    (artefact / "manifest.json").write_text('{"schema_version": 1}')
    (here / "out").mkdir()
    assert problems(here / "out", here / "store") == ""
    export_tree(artefact, here / "out")
    assert problems(here / "out", here / "store") == ""


def test_places_refuse_a_folder_with_files_of_others(here: Path) -> None:
    (here / "thesis").mkdir()
    (here / "thesis" / "chapter.tex").touch()
    assert "output_dir: " in problems(here / "thesis", here / "store")
    assert "not an earlier export" in problems(here / "thesis", here / "store")


def test_places_refuse_the_folder_we_are_in_and_those_above(here: Path, tmp_path: Path) -> None:
    # Replacing it as a whole would leave the shell in a folder that is gone.
    assert "the folder you are in" in problems(here, tmp_path / "store")
    assert "the folder you are in" in problems(Path("/"), tmp_path / "store")


def test_places_refuse_store_and_output_within_each_other(here: Path) -> None:
    assert "lies in the store" in problems(here / "store" / "artefacts" / "x", here / "store")
    assert "lies in the store" in problems(here / "x", here / "x")
    assert "lies in output_dir" in problems(here / "out", here / "out" / "store")
    (here / "link").symlink_to("out")
    assert "lies in output_dir" in problems(here / "link", here / "out" / "store")


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("file", "is a file"),
        ("file/below", "lies below"),
        ("loop", "leads back to itself"),
        ("x" * 256, "too long"),
        (f"{'x' * 256}/below", "too long"),
    ],
)
def test_places_name_what_cannot_become_a_folder(here: Path, path: str, problem: str) -> None:
    (here / "file").touch()
    (here / "loop").symlink_to("loop")
    assert problem in problems(here / path, here / "store")
    assert problem in problems(here / "out", here / path)
    assert len(obstacles(here / path, here / path)) == 2, "both are said at once"


def test_places_count_the_name_that_an_export_has_while_it_is_written(here: Path) -> None:
    assert "too long" in problems(here / ("x" * 250), here / "store")
    assert "too long" not in problems(here / "out", here / ("x" * 250))


def test_places_name_the_folder_that_cannot_be_written(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "locked").mkdir(mode=0o555)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    found = obstacles(here / "locked" / "out", here / "locked" / "store")
    assert [finding.path for finding in found] == ["store.root", "output_dir"]
    assert all(str(here / "locked") in finding.message for finding in found)
