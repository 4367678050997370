"""The built wheel works by itself: installed elsewhere, run in an empty folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from command_line import TINY_MODEL, environment

PROJECT = Path(__file__).parents[2]
COPIED = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "pipeline", "conf", "triton_repo")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the unpacked wheel; its dependencies come from this environment."""
    root = tmp_path_factory.mktemp("wheel")
    source = root / "source"
    source.mkdir()
    for name in COPIED:
        path = PROJECT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source / name)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(root),
        str(source),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    (wheel,) = root.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(root / "installed")
    shutil.rmtree(source)
    return root / "installed"


def _run(installed: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**environment(), "PYTHONPATH": str(installed), "PYTHONDONTWRITEBYTECODE": "1"}
    where = "import pipeline, sys; sys.stderr.write(pipeline.__file__ + '\\n'); "
    program = where + "from pipeline.cli.main import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=240
    )


def test_wheel_holds_every_file_that_is_not_code(installed: Path) -> None:
    """Against the checkout: what lies beside the code there lies beside it here."""
    for folder in ("pipeline", "conf", "triton_repo"):
        at = installed / ("pipeline" if folder == "pipeline" else f"pipeline/_shipped/{folder}")
        for path in (PROJECT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts and not path.name.endswith(".pyc"):
                assert (at / path.relative_to(PROJECT / folder)).is_file(), path


def test_wheel_plans_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    done = _run(installed, tmp_path, "plan", "model=llama2", "precision=fp8", "hardware=h100_80g", "--json")

    assert done.stderr.splitlines()[0].startswith(str(installed))
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.triton
def test_wheel_runs_the_whole_pipeline_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    job = ["model=hf", "source=local", f"model.path={TINY_MODEL}", "precision=fp16", "name=tiny", "target=reference"]
    done = _run(installed, tmp_path, *job)

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "dist" / "tiny" / "manifest.json").is_file()
