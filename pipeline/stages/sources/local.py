"""A model in a local folder or file, identified by the digest of its content."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.config.spec import Spec
from pipeline.errors import SourceError
from pipeline.stages.base import StageContext, Unresolved
from pipeline.stages.sources.files import TEMPLATES, copy_file, sha256_file, wanted

# What planning may read to tell a hit from a miss: about a third of a second.
_PLAN_BYTES = 512 << 20


class LocalSource:
    """Copy a folder's model files (links followed) or one file into the store."""

    def __init__(self, spec: Spec) -> None:
        self._path = Path(spec.source.path)
        self._digests: dict[str, str] | None = None

    def identity(self, *, resolve: bool) -> Mapping[str, Any]:
        """Return the digest over names and contents; the path itself plays no part."""
        with self._readable():
            if self._digests is None and not resolve:
                total = sum(path.stat().st_size for path in self._files().values())
                if total > _PLAN_BYTES:
                    raise Unresolved(f"{self._path} holds {total / 1e9:.1f} GB that only a run reads to identify it")
            content = json.dumps(self._identify(), sort_keys=True).encode()
        return {"kind": "local", "content": hashlib.sha256(content).hexdigest()}

    def fetch(self, context: StageContext) -> None:
        """Copy the files and make sure that they are the ones that were identified."""
        digests = self._identify()
        files = self._files()
        total = sum(path.stat().st_size for path in files.values())
        done = 0
        for name, path in files.items():
            target = context.out / "model" / name
            copy_file(path, target)
            if digests.get(name) != sha256_file(target):
                raise SourceError(f"{path} changed while it was read", hint="run again when nothing writes to it")
            done += target.stat().st_size
            context.progress(done, total, "bytes")
        context.facts["source"] = {"kind": "local", "files": digests}

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            where = error.filename or self._path
            raise SourceError(
                f"{where} cannot be read: {error.strerror or error}",
                hint=f"give this user (uid {os.getuid()}) read access to the model's files",
            ) from error

    def _identify(self) -> dict[str, str]:
        if self._digests is None:
            self._digests = {name: sha256_file(path) for name, path in self._files().items()}
        return self._digests

    def _files(self) -> dict[str, Path]:
        if self._path.is_file():
            return {self._path.name: self._path}
        if not self._path.is_dir():
            raise SourceError(
                f"model.path={self._path} is not a file or folder", hint="give the folder that holds config.json"
            )
        entries = [*self._path.iterdir(), *(self._path / TEMPLATES).glob("*")]
        found = {entry.relative_to(self._path).as_posix(): entry for entry in entries if not entry.is_dir()}
        names = wanted(found)
        for name in names:
            if not found[name].is_file():
                what = "a link that leads nowhere" if found[name].is_symlink() else "no regular file"
                raise SourceError(f"{found[name]} is {what}", hint="copy the file itself: cp -L, rsync -L")
        if not names:
            raise SourceError(
                f"{self._path} holds no model files (config.json, *.safetensors, *.gguf)",
                hint="give the folder that holds config.json and the weights",
            )
        return {name: self._path / name for name in names}
