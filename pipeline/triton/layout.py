"""The layout of a model repository and how files get into it: real files only, hard links where they are possible."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

# Of everything that this package writes into a repository; every model carries it.
LAYOUT_VERSION = "2"
VERSION_FOLDER = "1"
STAMP = "repository_layout"
# The C++ engine backend wants a fixed path; this is where the repository is mounted everywhere.
MOUNT_POINT = "/models"


def files_of(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder in order, without hidden ones."""
    return (path for path in sorted(folder.iterdir()) if path.is_file() and not path.name.startswith("."))


def copy_tree(source: Path, target: Path) -> None:
    """Copy a folder without byte code."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_dir() and path.name != "__pycache__":
            copy_tree(path, target / path.name)
        elif path.is_file():
            copy_file(path, target / path.name)


def copy_file(source: Path, target: Path) -> None:
    """Copy a file; what a link points to becomes a real file."""
    shutil.copyfile(source, target)
    target.chmod(0o644)


def link_or_copy(source: Path, target: Path) -> None:
    """Make a hard link where the file system allows, else a copy."""
    try:
        os.link(source.resolve(), target)
    except OSError:  # another file system, or one without hard links
        copy_file(source, target)


def copy_tokenizer(source: Path, version_folder: Path) -> None:
    """Copy a tokenizer's files beside a model's code."""
    folder = version_folder / "tokenizer"
    folder.mkdir()
    for path in files_of(source):
        copy_file(path, folder / path.name)
