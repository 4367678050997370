"""Whether a run may write where it is told to: asked before any work, by looking only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from pipeline.errors import Finding, StoreError
from pipeline.graph.export import TEMPORARY_CHARS, read_export

_NAME_BYTES = 255


def obstacles(output_dir: Path, store_root: Path) -> list[Finding]:
    """Return an error for each place that cannot be used, each with the setting that names it.

    Args:
        output_dir: Where the result is to be exported.
        store_root: Where artefacts are to be kept.
    """
    places = (("store.root", store_root, _store), ("output_dir", output_dir, _output))
    found = []
    for setting, path, judge in places:
        real = Path(os.path.realpath(path))
        try:
            problem = next(judge(path, real), "")
        except OSError as error:
            problem = f"cannot be looked at: {error.strerror}"
        if problem:
            found.append(Finding("place", "error", setting, f"{setting}={path} {problem}", f"{setting}=FOLDER"))
    if not found:
        found = _overlap(output_dir, store_root)
    return found


def _store(path: Path, real: Path) -> Iterator[str]:
    yield from _makeable(real)


def _output(path: Path, real: Path) -> Iterator[str]:
    yield from _makeable(real, spare=TEMPORARY_CHARS)
    if Path.cwd().is_relative_to(real):
        yield "holds the folder you are in; an export replaces its folder as a whole"
    if os.path.ismount(real):
        yield "is a mount point, which cannot be replaced in one step; a folder inside it can"
    if real.is_dir() and any(real.iterdir()):
        try:
            read_export(real)
        except StoreError:
            yield "is not empty and not an earlier export; it is left as it is"
        return
    parent = _nearest(real.parent)
    if not os.access(parent, os.W_OK | os.X_OK):
        yield f"cannot be written: this user (uid {os.getuid()}) may not write to {parent}"


def _makeable(real: Path, *, spare: int = 0) -> Iterator[str]:
    """Yield why ``real`` is no folder and cannot become one."""
    if real.is_symlink():
        yield "is a symbolic link that leads back to itself"
    if any(len(os.fsencode(part)) + spare > _NAME_BYTES for part in real.parts):
        yield "has a name that is too long"
    nearest = _nearest(real)
    if not nearest.is_dir():
        yield "is a file, not a folder" if nearest == real else f"lies below {nearest}, which is a file"
    if nearest != real and not os.access(nearest, os.W_OK | os.X_OK):
        yield f"cannot be made: this user (uid {os.getuid()}) may not write to {nearest}"


def _nearest(path: Path) -> Path:
    """Return the path itself or the first folder above it that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _overlap(output_dir: Path, store_root: Path) -> list[Finding]:
    output, store = (Path(os.path.realpath(path)) for path in (output_dir, store_root))
    if output.is_relative_to(store):
        message = f"output_dir={output_dir} lies in the store {store_root}, which holds nothing but artefacts"
    elif store.is_relative_to(output):
        message = f"the store {store_root} lies in output_dir={output_dir}, which is replaced by an export"
    else:
        return []
    return [Finding("place", "error", "output_dir", message, "output_dir=FOLDER beside the store")]
