"""Files and folders of this machine that a command reads besides its input artefacts, and what identifies them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from pipeline.config.spec import Spec
from pipeline.errors import SourceError
from pipeline.stages.base import Unresolved
from pipeline.stages.sources.files import sha256_file
from pipeline.toolchains.command import Command

# What planning may read to tell a hit from a miss: about a third of a second.
_PLAN_BYTES = 512 << 20

# It saves time and decides nothing.
_UNJUDGED = ("timing_cache",)


def host_inputs(spec: Spec, command: Command) -> dict[str, Path]:
    """Return the host path of each mount of a command that the configuration names, by mount name.

    Calibration is left out: the command sees a prepared copy of it.
    """
    known: dict[str, Path] = {}
    if spec.speculative is not None and spec.speculative.path:
        known["medusa"] = Path(spec.speculative.path)
    if spec.lora is not None:
        known.update({f"lora:{index}": Path(path) for index, path in enumerate(spec.lora.adapters)})
    if spec.build.timing_cache:
        known["timing_cache"] = Path(spec.build.timing_cache)
    known.update({f"file:{name}": Path(str(path)).expanduser().absolute() for name, path in spec.build.flags.items()})
    return {mount.name: known[mount.name] for mount in command.mounts if mount.name in known}


def identities(paths: Mapping[str, Path], *, resolve: bool) -> dict[str, str]:
    """Return the content's digest of each path.

    Args:
        paths: By name.
        resolve: Large folders may be read.

    Raises:
        Unresolved: It would take long and ``resolve`` is False.
        SourceError: A path is missing or cannot be read.
    """
    return {name: content_digest(path, resolve=resolve) for name, path in paths.items() if name not in _UNJUDGED}


def content_digest(path: Path, *, resolve: bool) -> str:
    """Return the sha256 over names and contents below a path; the path itself plays no part."""
    try:
        files = [path] if path.is_file() else sorted(entry for entry in path.rglob("*") if entry.is_file())
        if not files:
            raise SourceError(f"{path} is missing or empty", hint="check the path in the configuration")
        total = sum(file.stat().st_size for file in files)
        if total > _PLAN_BYTES and not resolve:
            raise Unresolved(f"{path} holds {total / 1e9:.1f} GB that only a run reads to identify it")
        base = path.parent if path.is_file() else path
        digests = {file.relative_to(base).as_posix(): sha256_file(file) for file in files}
    except OSError as error:
        raise SourceError(f"{error.filename or path} cannot be read: {error.strerror}") from error
    if path.is_file():
        digests = {"": digests[path.name]}
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()
