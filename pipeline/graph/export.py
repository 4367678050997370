"""Copy an artefact out of the store into a folder that belongs to the user."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.errors import StoreError
from pipeline.store.faults import store_errors
from pipeline.store.files import copy_tree, remove_tree

# Lies in every export: which artefact it is, and size and time of each file as we left them.
RECORD_NAME = ".export.json"
MANIFEST_NAME = "manifest.json"

# What the name of a folder gets on top while it is exchanged.
_TEMPORARY = ".{name}.{what}-{tag}"
TEMPORARY_CHARS = len(_TEMPORARY.format(name="", what="new", tag="12345678"))

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


# By path: path, size, time in ns, mode.
Rows = dict[str, tuple[str, int, int, int]]


@dataclass(frozen=True, slots=True)
class Export:
    """What :func:`export_tree` did.

    Attributes:
        path: The folder.
        status: ``written``, ``unchanged``, or ``repaired`` when somebody had changed exported files.
        changed: For ``repaired``, the files and folders that were not as they had been exported.
        moved: Where files went that lay in the folder but were not ours; None if there were none.
    """

    path: Path
    status: Literal["written", "unchanged", "repaired"]
    changed: tuple[str, ...] = ()
    moved: Path | None = None


def export_tree(artefact: Path, output_dir: Path) -> Export:
    """Make ``output_dir`` a copy of an artefact, in one step: at any moment it is the old export or the new one.

    Files are real copies that the user may change; the next export finds and undoes changes. Files that others put in
    do not matter while the folder stays; they are moved to ``<output_dir>.extra`` when it is replaced.

    Args:
        artefact: Folder in the store; its name is its digest.
        output_dir: Target. Replaced if it is an earlier export, used if empty or missing.

    Raises:
        StoreError: ``output_dir`` is something else, or cannot be written.
    """
    # Through symbolic links: the link stays, what it points to is replaced.
    target = Path(os.path.realpath(output_dir))
    with store_errors(target, "write", setting="output_dir"):
        if target.is_symlink() or (target.exists() and not target.is_dir()):
            raise StoreError(f"{output_dir} is no folder", hint="Give another output_dir.")
        target.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(target.parent):
            _recover(target)
            expected: Rows = {}
            changed: tuple[str, ...] = ()
            if target.is_dir() and any(target.iterdir()):
                name, expected = read_export(target, shown=output_dir)
                if name == artefact.name:
                    changed = _changes(target, expected)
                    if expected and not changed:
                        return Export(output_dir, "unchanged")
            moved = _replace(artefact, target, expected)
    return Export(output_dir, "repaired" if changed else "written", changed, moved)


def _replace(artefact: Path, target: Path, expected: Rows) -> Path | None:
    """Copy beside the target, then swap; return where files that are not ours went.

    Nothing is flushed to the disk: after a power cut, sizes do not match the record and the next export repairs.
    """
    fresh = _beside(target, "new")
    try:
        _write_export(artefact, fresh)
        if not target.exists():
            fresh.rename(target)
            return None
        if _exchange(fresh, target):
            return _retire(fresh, target, expected)
        # SAFETY: a kill between the two renames leaves no target; `_recover` puts the old one back.
        old = _beside(target, "old")
        target.rename(old)
        fresh.rename(target)
        return _retire(old, target, expected)
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise StoreError(
                f"{target} is a mount point, which cannot be replaced in one step",
                hint="Set output_dir to a folder inside it.",
            ) from error
        raise
    finally:
        remove_tree(fresh)


def _beside(target: Path, what: str) -> Path:
    return target.with_name(_TEMPORARY.format(name=target.name, what=what, tag=uuid.uuid4().hex[:8]))


def _retire(old: Path, target: Path, expected: Rows) -> Path | None:
    """Remove the export that was replaced, but not what others had put into it."""
    moved = None
    # Without a record, what the new export does not have may be somebody's.
    expected = expected or _rows(target)
    for path, row in _rows(old).items():
        # Interpreters of a server that ran from here leave caches.
        if path not in expected and row[1] >= 0 and "__pycache__" not in path and path != RECORD_NAME:
            moved = target.with_name(f"{target.name}.extra")
            (moved / path).parent.mkdir(parents=True, exist_ok=True)
            (old / path).replace(moved / path)
    remove_tree(old)
    return moved


def _write_export(source: Path, target: Path) -> None:
    copy_tree(source, target)
    record = {"artefact": source.name, "files": list(_rows(target).values())}
    (target / RECORD_NAME).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _rows(root: Path) -> Rows:
    """Describe every file (path, size, time, mode) and every folder (path, -1, 0, 0) below ``root``."""
    rows: Rows = {}
    for folder, folders, names in os.walk(root):
        base = Path(folder).relative_to(root)
        for name in folders:
            path = (base / name).as_posix()
            rows[path] = (path, -1, 0, 0)
        for name in names:
            st = Path(folder, name).lstat()
            path = (base / name).as_posix()
            rows[path] = (path, st.st_size, st.st_mtime_ns, st.st_mode)
    return rows


def _changes(target: Path, expected: Rows) -> tuple[str, ...]:
    """Name what is not as the record says: milliseconds, no bytes are read."""
    found = _rows(target)
    return tuple(sorted(path for path, row in expected.items() if found.get(path) != row))


def read_export(target: Path, *, shown: Path | None = None) -> tuple[str, Rows]:
    """Return artefact and rows of an earlier export; empty if its record is damaged or gone.

    Raises:
        StoreError: The folder is not one of our exports.
    """
    shown = shown or target
    record, manifest = target / RECORD_NAME, target / MANIFEST_NAME
    if record.is_file():
        try:
            content = json.loads(record.read_bytes())
            return content["artefact"], {row[0]: (row[0], row[1], row[2], row[3]) for row in content["files"]}
        except (ValueError, KeyError, TypeError, IndexError):
            return "", {}
    if manifest.is_file():
        with contextlib.suppress(ValueError):
            content = json.loads(manifest.read_bytes())
            if isinstance(content, dict) and "schema_version" in content:
                return "", {}
    raise StoreError(
        f"{shown} is not empty and not an earlier export; it is left as it is",
        hint="Set output_dir to another folder, or remove this one yourself.",
    )


def _recover(target: Path) -> None:
    """Put right what a killed export left behind."""
    name = glob.escape(target.name)
    for old in target.parent.glob(f".{name}.old-*"):
        if target.exists():
            remove_tree(old)
        else:
            old.rename(target)
    for fresh in target.parent.glob(f".{name}.new-*"):
        remove_tree(fresh)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two folders in one step; False where kernel or file system cannot."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    code = libc.renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    if code == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
        return False
    raise OSError(number, os.strerror(number), str(second))


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Let one process at a time export into ``folder``; file systems that cannot lock a folder go without."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
