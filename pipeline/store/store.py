"""The content-addressed store: finished work, found by what decided it.

Layout below the root::

    artefacts/<digest>/      read-only folders, named by what is in them
    actions/<key>.json       records; a key has a result exactly when its record is here
    latest/<job>/<stage>     key of the last record a job used: for explanations and for `gc`
    staging/<id>/            work in progress; <id>.lock is held by the process that works there
    locks/<key>.lock         saves two processes from doing the same work
    logs/<job>/              log files of stages

SAFETY: files are flushed, then the folder is renamed into ``artefacts``, then the record is renamed into ``actions``.
A kill between two steps leaves an artefact without a record, which is harmless and found again by its content.
"""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from pipeline.errors import StoreError
from pipeline.store import files, locks
from pipeline.store.digest import Entry, damage, list_tree, tree_digest
from pipeline.store.faults import store_error, store_errors
from pipeline.store.keys import KeyDocument, action_key, content_key
from pipeline.store.record import DamagedRecord, Record, contents, from_bytes, plain, to_bytes

NEVER_BUILT = "never built"

_MAX_KEPT_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Hit:
    """A finished piece of work: its record and its read-only folder."""

    record: Record
    path: Path


@dataclass(frozen=True, slots=True)
class Miss:
    """Nothing usable under a key.

    Attributes:
        reason: ``never built``, or what is damaged.
    """

    reason: str


class Store:
    """Finished work below ``root``. Creating the object touches nothing.

    Safe for any number of processes, also on several machines, as long as the file system has locks and atomic rename.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.artefacts = self.root / "artefacts"
        self.actions = self.root / "actions"
        self.logs = self.root / "logs"
        self._latest = self.root / "latest"
        self._staging = self.root / "staging"
        self._locks = self.root / "locks"
        self.scratches = self.root / "scratch"

    @contextmanager
    def session(self) -> Iterator[None]:
        """Use the store for a run: folders exist, left-overs of dead processes are gone, ``gc`` keeps off.

        A store that is only readable may be used as long as nothing has to be built.

        Raises:
            StoreError: The root cannot be created.
        """
        with contextlib.ExitStack() as stack:
            with store_errors(self.root, "create"):
                for folder in (self.artefacts, self.actions, self.logs, self._latest, self._staging, self._locks):
                    folder.mkdir(parents=True, exist_ok=True)
            with store_errors(self.root, "lock"), contextlib.suppress(PermissionError), _unless_read_only():
                stack.enter_context(locks.hold(self.root / ".lock", shared=True))
                self._sweep()
            yield

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep every run out while the block removes things.

        Raises:
            StoreError: A run is using the store, or the root cannot be written.
        """
        with store_errors(self.root, "lock"):
            try:
                fd = locks.acquire(self.root / ".lock", wait=False)
            except locks.Locked:
                raise StoreError(f"store {self.root} is in use by a run", hint="Try again when it has ended.") from None
        try:
            self._sweep()
            yield
        finally:
            os.close(fd)

    def lookup(self, key: str) -> Hit | Miss:
        """Find the result of a key. Compares names and sizes of its files, reads none: milliseconds.

        Raises:
            StoreError: The store cannot be read.
        """
        record = self.record(key)
        if isinstance(record, Miss):
            return record
        path = self.artefacts / record.artefact
        with store_errors(path, "read"):
            wrong = damage(path, record.entries)
        return Miss(f"artefact damaged: {wrong}") if wrong else Hit(record, path)

    def record(self, key: str) -> Record | Miss:
        """Read the record of a key without looking at its artefact.

        Raises:
            StoreError: The store cannot be read.
        """
        path = self.actions / f"{key}.json"
        try:
            record = from_bytes(path.read_bytes())
        except FileNotFoundError:
            return Miss(NEVER_BUILT)
        except DamagedRecord as error:
            return Miss(f"record damaged: {error}")
        except IsADirectoryError:
            return Miss("record damaged: it is a folder")
        except OSError as error:
            raise store_error(error, path, "read") from error
        if key not in (record.key, record.content_key):
            return Miss(f"record damaged: it belongs to key {record.key[:12]}")
        return record

    def latest(self, job: str, stage: str) -> Record | None:
        """Return the record that a job used last for a stage; None if there is none."""
        key = _read_pointer(self._pointer(job, stage))
        if not key:
            return None
        record = self.record(key)
        return None if isinstance(record, Miss) else record

    def note_use(self, job: str, stage: str, key: str) -> None:
        """Remember that a job uses a record, so that ``gc`` keeps it and a later miss can be explained.

        A store that cannot be written is left as it is: nothing else depends on this.
        """
        pointer = self._pointer(job, stage)
        with contextlib.suppress(OSError):
            if _read_pointer(pointer) != key:
                pointer.parent.mkdir(parents=True, exist_ok=True)
                files.write_atomic(pointer, key.encode("ascii") + b"\n")

    def in_use(self) -> Iterator[tuple[str, str, str]]:
        """Yield job, stage and key of every record that some job used last."""
        for pointer in sorted(self._latest.glob("*/*")):
            if not pointer.name.startswith(".") and (key := _read_pointer(pointer)):
                yield unquote(pointer.parent.name), unquote(pointer.name), key

    @contextmanager
    def building(self, key: str, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
        """Hold the lock of a key, so that the same work is not done twice at once. Look up again inside.

        Args:
            key: The action key.
            on_wait: Called once if another process is at it.

        Raises:
            StoreError: The store cannot be written.
        """
        path = self._locks / f"{key}.lock"
        with store_errors(path, "lock"):
            fd = locks.acquire(path, on_wait=on_wait)
        try:
            yield
        finally:
            os.close(fd)

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """Give an empty folder to write into; what was not published when the block ends is removed.

        Raises:
            StoreError: The store cannot be written.
        """
        folder = self._staging / uuid.uuid4().hex
        lock = folder.with_suffix(".lock")
        with store_errors(folder, "write"):
            # SAFETY: locked before the folder exists, or a sweep could take the folder for a left-over.
            fd = locks.acquire(lock)
        try:
            with store_errors(folder, "write"):
                folder.mkdir()
            yield folder
        finally:
            with contextlib.suppress(OSError):  # the next session sweeps what is left
                files.remove_tree(folder)
                lock.unlink()
            os.close(fd)

    def scratch(self, key: str) -> Path:
        """Return the folder for intermediate results of a key, which is kept until the key has a result.

        Not made here: most work has none. Only one process at a time works at a key (:meth:`building`).
        """
        return self.scratches / key

    def publish(
        self,
        folder: Path,
        document: KeyDocument,
        *,
        job: str,
        inputs: Mapping[str, Record],
        facts: Mapping[str, Any],
        versions: Mapping[str, str],
        seconds: float,
        log: Path | None = None,
    ) -> Hit:
        """Make a checked staging folder the result of its key.

        Args:
            folder: From :meth:`staging`; gone afterwards.
            document: What decided the output.
            job: Name of the job.
            inputs: Record of each input, by stage name.
            facts: What the stage reported.
            versions: Versions of the programs that took part.
            seconds: How long the stage took.
            log: Its log file.

        Raises:
            StoreError: The disk is full, the store cannot be written, or the folder holds links or special files.
        """
        artefacts = {name: record.artefact for name, record in inputs.items()}
        with store_errors(folder, "write"):
            files.make_read_only(folder)
            # Hard links into inputs need no second reading.
            entries = list_tree(folder, known=self._known_files(inputs.values()), sync=True)
            path = self._place(folder, entries)
        record = Record(
            key=action_key(document),
            content_key=content_key(document, contents(inputs)),
            job=job,
            document=document,
            input_artefacts=artefacts,
            artefact=path.name,
            entries=entries,
            facts=plain(facts),
            versions=versions,
            seconds=round(seconds, 3),
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            log=self._relative(log),
        )
        self._commit(record)
        return Hit(record, path)

    def adopt(self, hit: Hit, document: KeyDocument, inputs: Mapping[str, Record]) -> Hit:
        """Make an existing result also the result of another key whose inputs have the same content.

        Raises:
            StoreError: The store cannot be written.
        """
        artefacts = {name: record.artefact for name, record in inputs.items()}
        record = replace(hit.record, key=action_key(document), document=document, input_artefacts=artefacts)
        self._commit(record)
        return Hit(record, hit.path)

    def keep_failed(self, folder: Path, target: Path) -> Path | None:
        """Move a failed stage's output beside its log, if it is small (reports, not weights); None if it is not kept.

        Raises:
            OSError: It cannot be moved.
        """
        entries = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
        if not entries or sum(path.stat().st_size for path in entries) > _MAX_KEPT_BYTES:
            return None
        folder.rename(target)
        return target

    def _commit(self, record: Record) -> None:
        data = to_bytes(record)
        # SAFETY: the content key comes first. It alone changes nothing that the action key says; the other way
        # round, a kill in between would lose early cutoff for good.
        for key in (record.content_key, record.key):
            path = self.actions / f"{key}.json"
            with store_errors(path, "write"):
                files.write_atomic(path, data)

    def _place(self, folder: Path, entries: Sequence[Entry]) -> Path:
        """Rename a finished folder to its digest, unless that is there already and sound."""
        path = self.artefacts / tree_digest(entries)
        while True:
            if path.exists():
                if not damage(path, entries):
                    break
                self.discard(path)
            try:
                folder.rename(path)
                break
            except OSError as error:  # another process was faster
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
        # Not before the rename: an ordinary user cannot rename a read-only folder.
        with contextlib.suppress(PermissionError):  # another user's, in a shared store
            path.chmod(0o555)
        files.fsync_folder(self.artefacts)
        return path

    def discard(self, path: Path) -> None:
        """Take an artefact out of the store in one step, then remove it."""
        trash = self._staging / f"trash-{uuid.uuid4().hex}"
        with contextlib.suppress(FileNotFoundError):
            path.chmod(0o755)
            path.rename(trash)
            files.remove_tree(trash)

    def _known_files(self, inputs: Iterable[Record]) -> dict[tuple[int, int], str]:
        known = {}
        for record in inputs:
            for entry in record.entries:
                if entry.kind != "d":
                    with contextlib.suppress(OSError):
                        st = (self.artefacts / record.artefact / entry.path).stat()
                        if st.st_nlink > 1 and st.st_size == entry.size:
                            known[st.st_dev, st.st_ino] = entry.sha256
        return known

    def _pointer(self, job: str, stage: str) -> Path:
        return self._latest / _file_name(job) / _file_name(stage)

    def _relative(self, log: Path | None) -> str:
        if log is None:
            return ""
        return str(log.relative_to(self.root)) if log.is_relative_to(self.root) else str(log)

    def _sweep(self) -> None:
        """Remove the staging folders of processes that are gone; what cannot be removed stands in nobody's way."""
        for name in {entry.name.removesuffix(".lock") for entry in os.scandir(self._staging)}:
            folder = self._staging / name
            lock = self._staging / f"{name}.lock"
            try:
                with locks.hold(lock, wait=False):
                    files.remove_tree(folder)
                    lock.unlink(missing_ok=True)
            except (locks.Locked, OSError):
                continue


def _read_pointer(path: Path) -> str:
    """Return the key in a pointer of ``latest``; empty if it is missing or damaged."""
    try:
        key = path.read_bytes().decode("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
    return key if key.isalnum() else ""


def _file_name(name: str) -> str:
    """Make any name safe as a file name: no separators, no leading dot."""
    return quote(name, safe="").replace(".", "%2E", 1) if name.startswith(".") else quote(name, safe="")


@contextmanager
def _unless_read_only() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
