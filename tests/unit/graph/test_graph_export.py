from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pipeline.errors import StoreError
from pipeline.graph import export
from pipeline.graph.export import export_tree


def artefact(tmp_path: Path, name: str, files: dict[str, str]) -> Path:
    root = tmp_path / "artefacts" / (name * 64)
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
        (root / path).chmod(0o444)
    (root / "model_repository" / "ensemble" / "1").mkdir(parents=True)
    return root


@pytest.fixture
def first(tmp_path: Path) -> Path:
    return artefact(tmp_path, "a", {"manifest.json": '{"schema_version": 1}', "model_repository/m/1/model.py": "one"})


@pytest.fixture
def second(tmp_path: Path) -> Path:
    return artefact(tmp_path, "b", {"manifest.json": '{"schema_version": 2}', "other.txt": "two"})


def names(path: Path) -> set[str]:
    return {p.relative_to(path).as_posix() for p in path.rglob("*")}


def test_export_makes_real_writable_copies(tmp_path: Path, first: Path) -> None:
    done = export_tree(first, tmp_path / "dist" / "job")
    assert done.status == "written"
    assert names(done.path) == names(first) | {".export.json"}
    copy = done.path / "model_repository/m/1/model.py"
    assert copy.read_text() == "one"
    assert not copy.samefile(first / "model_repository/m/1/model.py")
    assert os.access(copy, os.W_OK)
    assert list((tmp_path / "dist").iterdir()) == [done.path]


def test_export_is_skipped_when_nothing_changed(tmp_path: Path, first: Path) -> None:
    out = tmp_path / "out"
    export_tree(first, out)
    inode = out.stat().st_ino
    assert export_tree(first, out).status == "unchanged"
    # A server that ran from here leaves caches, a user leaves notes.
    (out / "model_repository/m/1/__pycache__").mkdir()
    (out / "notes.txt").write_text("mine")
    assert export_tree(first, out).status == "unchanged"
    assert out.stat().st_ino == inode


def test_export_undoes_changes_and_names_them(tmp_path: Path, first: Path) -> None:
    out = tmp_path / "out"
    export_tree(first, out)
    (out / "model_repository/m/1/model.py").write_text("two")
    (out / "model_repository/ensemble/1").rmdir()
    done = export_tree(first, out)
    assert (done.status, done.changed) == (
        "repaired",
        ("model_repository/ensemble/1", "model_repository/m/1/model.py"),
    )
    assert (out / "model_repository/m/1/model.py").read_text() == "one"
    assert export_tree(first, out).status == "unchanged"


@pytest.mark.parametrize("can_exchange", [True, False])
def test_export_replaces_an_earlier_one_and_keeps_files_of_others(
    tmp_path: Path, first: Path, second: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    if not can_exchange:
        monkeypatch.setattr(export, "_exchange", lambda a, b: False)
    out = tmp_path / "dist" / "job"
    export_tree(first, out)
    (out / "notes").mkdir()
    (out / "notes" / "a.txt").write_text("mine")
    (out / "model_repository/m/1/__pycache__").mkdir()
    (out / "model_repository/m/1/__pycache__/model.pyc").touch()
    done = export_tree(second, out)
    assert done.status == "written"
    assert names(out) == names(second) | {".export.json"}
    assert done.moved == tmp_path / "dist" / "job.extra"
    assert names(done.moved) == {"notes", "notes/a.txt"}
    assert {path.name for path in (tmp_path / "dist").iterdir()} == {"job", "job.extra"}


def test_export_refuses_folders_that_are_not_its_own(tmp_path: Path, first: Path) -> None:
    out = tmp_path / "home"
    out.mkdir()
    assert export_tree(first, out).status == "written", "an empty folder may be used"
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "chapter.tex").write_text("x")
    with pytest.raises(StoreError, match="not empty and not an earlier export"):
        export_tree(first, other)
    (other / "manifest.json").write_text("[]")
    with pytest.raises(StoreError, match="not empty and not an earlier export"):
        export_tree(first, other)
    assert names(other) == {"chapter.tex", "manifest.json"}
    with pytest.raises(StoreError, match="is no folder"):
        export_tree(first, other / "chapter.tex")


@pytest.mark.parametrize("content", [None, "", "{}", "[1]"], ids=["missing", "empty", "object", "list"])
def test_export_without_its_record_is_written_again(tmp_path: Path, first: Path, content: str | None) -> None:
    out = tmp_path / "out"
    export_tree(first, out)
    (out / ".export.json").unlink()
    if content is not None:
        (out / ".export.json").write_text(content)
    assert export_tree(first, out).status == "written"
    assert json.loads((out / ".export.json").read_text())["artefact"] == "a" * 64


def test_export_goes_through_a_symbolic_link(tmp_path: Path, first: Path, second: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    export_tree(first, tmp_path / "link")
    export_tree(second, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "other.txt").read_text() == "two"


def test_export_removes_what_a_killed_one_left(tmp_path: Path, first: Path, second: Path) -> None:
    out = tmp_path / "out [1]"
    export_tree(first, out)
    out.rename(tmp_path / ".out [1].old-0")
    (tmp_path / ".out [1].new-0").mkdir()
    # Killed between the two renames: the old one is put back first, then found to be right.
    assert export_tree(first, out).status == "unchanged"
    (tmp_path / ".out [1].old-1").mkdir()
    assert export_tree(second, out).status == "written"
    assert {path.name for path in tmp_path.iterdir()} == {"artefacts", "out [1]"}


def test_export_names_a_folder_it_cannot_write(tmp_path: Path, first: Path) -> None:
    with pytest.raises(StoreError, match="cannot write"):
        export_tree(first, Path("/proc/nowhere/out"))


def test_export_keeps_files_of_others_when_its_record_is_damaged(tmp_path: Path, first: Path) -> None:
    out = tmp_path / "out"
    export_tree(first, out)
    (out / ".export.json").write_text("cut")
    (out / "notes.txt").write_text("mine")
    done = export_tree(first, out)
    assert done.moved == tmp_path / "out.extra"
    assert names(done.moved) == {"notes.txt"}


def test_export_refuses_a_link_that_leads_back_to_itself(tmp_path: Path, first: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(StoreError, match="is no folder"):
        export_tree(first, tmp_path / "loop")
    assert (tmp_path / "loop").is_symlink()


def test_export_blames_output_dir_for_its_faults(tmp_path: Path, first: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError) as caught:
        export_tree(first, tmp_path / "file" / "out")
    assert "output_dir" in caught.value.hint and "store" not in caught.value.hint
