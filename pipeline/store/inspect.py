"""Look at the store, check it, and free space in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import StoreError
from pipeline.store import files
from pipeline.store.digest import list_tree, tree_digest
from pipeline.store.faults import store_errors
from pipeline.store.record import Record
from pipeline.store.store import Miss, Store

# Logs of failed stages are what people look for in the days after.
_KEEP_LOGS_S = 7 * 24 * 3600


@dataclass(frozen=True, slots=True)
class Problem:
    """Something damaged.

    Attributes:
        path: What.
        reason: How.
        artefact: Digest of the artefact concerned; empty for a record.
    """

    path: Path
    reason: str
    artefact: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """Where the space goes, in bytes. Files that several artefacts share count once in ``total_bytes``."""

    artefacts: dict[str, int]
    logs_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Garbage:
    """What no job's last run needs.

    Attributes:
        paths: Records, artefacts, locks and old logs.
        freed_bytes: Space their removal gives back.
    """

    paths: tuple[Path, ...]
    freed_bytes: int


def records(store: Store) -> list[Record]:
    """Return every sound record, oldest first.

    Raises:
        StoreError: The store cannot be read.
    """
    found = [store.record(path.stem) for path in _action_files(store)]
    own = {record.key: record for record in found if isinstance(record, Record)}
    return sorted(own.values(), key=lambda record: (record.created, record.job, record.document.stage))


def find_record(store: Store, prefix: str) -> Record:
    """Return the record whose key or artefact begins with ``prefix``, or the last one of ``job/stage``.

    Raises:
        StoreError: None or several fit.
    """
    job, _, stage = prefix.rpartition("/")
    if job and (last := store.latest(job, stage)):
        return last
    fits = [r for r in records(store) if r.key.startswith(prefix) or r.artefact.startswith(prefix)]
    if len({record.artefact for record in fits}) == 1:
        return fits[-1]
    what = f"{len(fits)} records fit" if fits else "no record fits"
    raise StoreError(f"{what} {prefix!r}", hint="`python -m pipeline store ls` shows keys; give more digits.")


def verify(store: Store, on_artefact: Callable[[str], None] | None = None) -> list[Problem]:
    """Read every byte of every artefact again and check every record.

    Args:
        store: The store.
        on_artefact: Called with each digest before it is read.

    Raises:
        StoreError: The store cannot be read.
    """
    problems = []
    for path in _action_files(store):
        record = store.record(path.stem)
        if isinstance(record, Miss):
            problems.append(Problem(path, record.reason))
        elif not (store.artefacts / record.artefact).is_dir():
            problems.append(Problem(path, f"its artefact {record.artefact[:12]} is missing", record.artefact))
    for folder in _artefact_folders(store):
        if on_artefact:
            on_artefact(folder.name)
        try:
            with store_errors(folder, "read"):
                digest = tree_digest(list_tree(folder))
        except StoreError as error:
            problems.append(Problem(folder, error.message, folder.name))
            continue
        if digest != folder.name:
            problems.append(Problem(folder, f"its content has digest {digest[:12]}", folder.name))
    return problems


def remove_damaged(store: Store, problems: list[Problem]) -> None:
    """Remove what :func:`verify` found, so that the next run builds it again.

    Raises:
        StoreError: A run is using the store, or it cannot be written.
    """
    with store.exclusive(), store_errors(store.root, "remove from"):
        for problem in problems:
            if problem.path.suffix == ".json":
                files.remove_tree(problem.path)
            else:
                store.discard(problem.path)


def usage(store: Store) -> Usage:
    """Measure the store.

    Raises:
        StoreError: The store cannot be read.
    """
    seen: set[tuple[int, int]] = set()
    with store_errors(store.root, "read"):
        sizes = {folder.name: _size(folder, set()) for folder in _artefact_folders(store)}
        return Usage(sizes, _size(store.logs, set()), _size(store.root, seen))


def garbage(store: Store) -> Garbage:
    """Find what can go: everything that the last records of all jobs do not need, directly or as an input.

    Raises:
        StoreError: The store cannot be read.
    """
    by_key = {record.key: record for record in records(store)}
    pending = [key for _, _, key in store.in_use()]
    live: set[str] = set()
    while pending:
        key = pending.pop()
        if key in by_key and key not in live:
            live.add(key)
            pending += by_key[key].document.inputs.values()
    kept = [by_key[key] for key in live]
    keys = {key for record in kept for key in (record.key, record.content_key)}
    artefacts = {record.artefact for record in kept}
    logs = {store.root / record.log for record in kept}

    with store_errors(store.root, "read"):
        paths = [path for path in _action_files(store) if path.stem not in keys]
        paths += [path for path in store.actions.glob(".*.tmp")]
        paths += [folder for folder in _artefact_folders(store) if folder.name not in artefacts]
        paths += [path for path in (store.root / "locks").glob("*.lock") if path.stem not in keys]
        paths += list(store.scratches.glob("*"))
        oldest = time.time() - _KEEP_LOGS_S
        paths += [p for p in store.logs.glob("*/*") if p not in logs and p.stat().st_mtime < oldest]
        # A file that a kept artefact shares gives nothing back.
        shared: set[tuple[int, int]] = set()
        for digest in artefacts:
            _size(store.artefacts / digest, shared)
        return Garbage(tuple(paths), sum(_size(path, shared) for path in paths))


def collect(store: Store) -> Garbage:
    """Remove what :func:`garbage` finds and return it.

    Raises:
        StoreError: A run is using the store, or it cannot be written.
    """
    with store.exclusive():
        found = garbage(store)
        with store_errors(store.root, "remove from"):
            # SAFETY: records first; an artefact without a record is harmless, a record without its artefact is a
            # miss that says "damaged".
            for path in sorted(found.paths, key=lambda path: path.parent == store.artefacts):
                if path.parent == store.artefacts:
                    store.discard(path)
                else:
                    files.remove_tree(path)
    return found


def _action_files(store: Store) -> list[Path]:
    return sorted(path for path in store.actions.glob("*.json") if not path.name.startswith("."))


def _artefact_folders(store: Store) -> Iterator[Path]:
    return iter(sorted(store.artefacts.glob("*")))


def _size(path: Path, seen: set[tuple[int, int]]) -> int:
    """Return the bytes below ``path``, each inode once; ``seen`` is added to."""
    total = 0
    for file in [path] if path.is_file() else path.rglob("*"):
        st = file.lstat()
        if file.is_file() and (st.st_dev, st.st_ino) not in seen:
            seen.add((st.st_dev, st.st_ino))
            total += st.st_size
    return total
