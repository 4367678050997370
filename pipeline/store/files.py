"""File operations that survive a kill: write beside, flush to the disk, rename."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import uuid
from pathlib import Path

_DIGEST = re.compile(r"[0-9a-f]{64}")
_NO_KERNEL_COPY = {errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF}


def write_atomic(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data`` in one step: readers see the old bytes or the new ones, also after a power cut."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def fsync_folder(path: Path) -> None:
    """Flush a folder's list of names to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove_tree(path: Path) -> None:
    """Remove a folder with everything in it, read-only folders included, or a file; a missing one is fine.

    Raises:
        OSError: Something could not be removed.
    """
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    for folder, _, _ in os.walk(path):
        with contextlib.suppress(FileNotFoundError):
            Path(folder).chmod(0o700)
    shutil.rmtree(path, ignore_errors=True)  # another process may be removing the same left-overs
    if path.exists():
        shutil.rmtree(path)


def make_read_only(path: Path) -> None:
    """Take write permission off every file and folder below ``path``, but not off ``path`` itself.

    A folder without write permission cannot be renamed by an ordinary user.
    """
    for folder, folders, names in os.walk(path):
        for name in names:
            file = Path(folder, name)
            mode = file.lstat().st_mode
            wanted = 0o555 if mode & stat.S_IXUSR else 0o444
            if stat.S_ISREG(mode) and stat.S_IMODE(mode) != wanted:
                file.chmod(wanted)
        for name in folders:
            Path(folder, name).chmod(0o755)
    for folder, _, _ in os.walk(path, topdown=False):
        if Path(folder) != path:
            Path(folder).chmod(0o555)


def link_or_copy(source: Path, target: Path) -> None:
    """Make ``target`` a file with the content of ``source``, without a second copy on the disk where that is safe.

    Files of the store never change, so they are hard-linked; anything else is copied, because its owner may change it.

    Raises:
        OSError: ``source`` is no file, ``target`` exists, or the disk is full.
    """
    source = source.resolve(strict=True)
    if any(_DIGEST.fullmatch(parent.name) and parent.parent.name == "artefacts" for parent in source.parents):
        try:
            os.link(source, target)
            return
        except OSError as error:
            # Another file system, too many links, a file system without links, or links protected by the kernel.
            if error.errno not in (errno.EXDEV, errno.EMLINK, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
    copy_file(source, target)


def copy_file(source: Path, target: Path) -> None:
    """Copy content and executable bit into a new, writable file; blocks are shared where the file system can."""
    with source.open("rb") as reader, target.open("xb") as writer:
        size = os.fstat(reader.fileno()).st_size
        done = 0
        while done < size:
            try:
                count = os.copy_file_range(reader.fileno(), writer.fileno(), size - done)
            except OSError as error:
                if done or error.errno not in _NO_KERNEL_COPY:
                    raise
                shutil.copyfileobj(reader, writer, 1 << 22)
                break
            if count == 0:
                raise OSError(errno.EIO, "file became shorter while it was copied", str(source))
            done += count
        executable = os.fstat(reader.fileno()).st_mode & stat.S_IXUSR
        os.fchmod(writer.fileno(), 0o755 if executable else 0o644)


def copy_tree(source: Path, target: Path) -> None:
    """Copy a folder's content into a folder, which may exist. Permissions stay behind: the copy can be written to.

    Raises:
        OSError: A file exists there already, or the disk is full.
    """
    target.mkdir(parents=True, exist_ok=True)
    for folder, folders, names in os.walk(source):
        there = target / Path(folder).relative_to(source)
        for name in folders:
            (there / name).mkdir(exist_ok=True)
        for name in names:
            copy_file(Path(folder, name), there / name)
