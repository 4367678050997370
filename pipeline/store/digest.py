"""Digest of a folder: names, executable bits, sizes and contents; no times, no owners, no order of creation."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import StoreError
from pipeline.store.files import fsync_folder
from pipeline.store.keys import canonical_json

_BUFFER_BYTES = 1 << 22
_MAX_THREADS = 8

# (device, inode) -> sha256 of a file whose content is known because it is a hard link into an artefact.
KnownFiles = Mapping[tuple[int, int], str]


@dataclass(frozen=True, slots=True)
class Entry:
    """One file, or one empty folder, of an artefact.

    Attributes:
        path: Relative, with ``/``.
        kind: ``f`` file, ``x`` executable file, ``d`` empty folder.
        size: Bytes; 0 for a folder.
        sha256: Of the content; empty for a folder.
    """

    path: str
    kind: str
    size: int
    sha256: str


def list_tree(root: Path, *, known: KnownFiles | None = None, sync: bool = False) -> tuple[Entry, ...]:
    """Read a whole folder and return its entries, sorted by path.

    Args:
        root: The folder.
        known: Files that need no reading.
        sync: Also flush every file and folder to the disk.

    Raises:
        StoreError: There is a symbolic link or a special file.
        OSError: Something cannot be read.
    """
    files, empty, folders = _walk(root)
    known = known or {}
    to_read = [(path, st) for path, st in files if (st.st_dev, st.st_ino) not in known]
    digests = _hash_all([path for path, _ in sorted(to_read, key=lambda item: -item[1].st_size)], sync)
    entries = [Entry(folder.relative_to(root).as_posix(), "d", 0, "") for folder in empty]
    for path, st in files:
        sha256 = digests.get(path) or known[st.st_dev, st.st_ino]
        entries.append(Entry(path.relative_to(root).as_posix(), _kind(st), st.st_size, sha256))
    if sync:
        for folder in reversed(folders):
            fsync_folder(folder)
    return tuple(sorted(entries, key=lambda entry: entry.path))


def tree_digest(entries: Sequence[Entry]) -> str:
    """Return the digest that names an artefact: sha256 over its sorted entries, 64 hex digits."""
    rows = [[e.path, e.kind, e.size, e.sha256] for e in sorted(entries, key=lambda entry: entry.path)]
    return hashlib.sha256(canonical_json(["tree", rows])).hexdigest()


def damage(root: Path, entries: Sequence[Entry]) -> str:
    """Compare names, kinds and sizes without reading a byte; return what is wrong, or an empty text.

    Takes milliseconds. :func:`list_tree` finds changed bytes of equal size.
    """
    if not root.is_dir():
        return f"folder {root.name} is missing"
    try:
        files, empty, _ = _walk(root)
    except (OSError, StoreError) as error:
        return str(error)
    found = {str(path.relative_to(root)): (_kind(st), st.st_size) for path, st in files}
    found |= {str(path.relative_to(root)): ("d", 0) for path in empty}
    for entry in entries:
        kind, size = found.pop(entry.path, ("", -1))
        if not kind:
            return f"{entry.path} is missing"
        if size != entry.size:
            return f"{entry.path} has {size} bytes, expected {entry.size}"
        if kind != entry.kind:
            return f"{entry.path} has other permissions or is of another kind than it was"
    return f"{min(found)} does not belong there" if found else ""


def hash_file(path: Path, *, sync: bool = False) -> str:
    """Return the sha256 of a file's content; with ``sync``, flush it to the disk as well."""
    digest = hashlib.sha256()
    buffer = bytearray(_BUFFER_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
        if sync:
            os.fsync(file.fileno())
    return digest.hexdigest()


def _kind(st: os.stat_result) -> str:
    return "x" if st.st_mode & stat.S_IXUSR else "f"


def _hash_all(paths: Sequence[Path], sync: bool) -> dict[Path, str]:
    threads = min(_MAX_THREADS, os.cpu_count() or 1, len(paths))
    if threads <= 1:
        return {path: hash_file(path, sync=sync) for path in paths}
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(threads, thread_name_prefix="hash") as pool:
        return dict(zip(paths, pool.map(lambda path: hash_file(path, sync=sync), paths), strict=True))


def _walk(root: Path) -> tuple[list[tuple[Path, os.stat_result]], list[Path], list[Path]]:
    """Return the files, the empty folders and all folders (parents first) below ``root``."""
    files: list[tuple[Path, os.stat_result]] = []
    empty: list[Path] = []
    folders = [root]
    for folder in folders:  # grows while it runs
        children = [Path(child.path) for child in os.scandir(folder)]
        if not children and folder != root:
            empty.append(folder)
        for child in children:
            st = child.lstat()
            if stat.S_ISDIR(st.st_mode):
                folders.append(child)
            elif stat.S_ISREG(st.st_mode):
                files.append((child, st))
            else:
                kind = "symbolic link" if stat.S_ISLNK(st.st_mode) else "special file"
                raise StoreError(
                    f"{child.relative_to(root)} is a {kind}; an artefact holds regular files and folders only",
                    hint="Copy what the link points to.",
                )
    return files, empty, folders
