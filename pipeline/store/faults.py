"""Turn operating system errors at the store's border into errors that say what to do."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.errors import PipelineError, StoreError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FULL_TEXT = os.strerror(errno.ENOSPC)


@contextmanager
def store_errors(path: Path, doing: str, *, setting: str = "store.root") -> Iterator[None]:
    """Raise :class:`StoreError` in place of an OSError.

    Args:
        path: What is being worked on, unless the error names a file itself.
        doing: For the message: ``write``, ``read`` ….
        setting: The key that names the place.
    """
    try:
        yield
    except OSError as error:
        raise store_error(error, path, doing, setting=setting) from error


def store_error(error: OSError, path: Path, doing: str = "write", *, setting: str = "store.root") -> StoreError:
    """Build the error for ``error``: path, reason, and free space when that is what is missing."""
    # A copy that fails names what it reads first, then what it writes.
    name = error.filename2 or error.filename
    where = Path(os.fsdecode(name)) if isinstance(name, str | bytes) else path
    reason = error.strerror or str(error)
    if error.errno in _FULL:
        return StoreError(
            f"cannot {doing} {where}: {reason} ({free_space(path)} free); what was finished is kept",
            hint=f"Free space, run `python -m pipeline store gc`, or set {setting} to a larger disk; then run again.",
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        hint = f"Give this user (uid {os.getuid()}) write access, or set {setting} to a folder it can write to."
    elif error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
        hint = f"The file system lacks something that is needed (locks, rename); set {setting} to another one."
    elif error.errno in (errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOENT):
        hint = f"Set {setting} to a folder that exists or can be made."
    else:
        hint = "Check the file system; `python -m pipeline store verify` tells what is damaged."
    return StoreError(f"cannot {doing} {where}: {reason}", hint=hint)


def is_disk_full(error: BaseException) -> bool:
    """Tell whether a full disk or quota is behind ``error``, also when a library wrapped it."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in _FULL:
            return True
        # Native libraries carry the text only. Our own errors may quote the output of a program, which has a disk of
        # its own.
        if _FULL_TEXT in str(seen) and not isinstance(seen, PipelineError):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def free_space(path: Path) -> str:
    """Return the free space of the file system that holds ``path`` (or its nearest existing parent)."""
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        return format_bytes(shutil.disk_usage(path).free)
    except OSError:
        return "an unknown amount"


def format_bytes(count: float) -> str:
    """Write a size for people: ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
