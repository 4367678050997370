"""Find the shared libpython that Triton's python stub links against, or fetch it without root.

The stub embeds the interpreter, so it needs ``libpythonX.Y.so.1.0`` of the running version. Debian and Ubuntu keep it
in a package of its own; interpreters built with a shared library carry it beside them.
"""

from __future__ import annotations

import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pipeline.errors import SourceError

_STANDARD_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/local/lib", "/usr/lib", "/lib/x86_64-linux-gnu")
_LD_CACHE = Path("/etc/ld.so.cache")


def python_version() -> str:
    """Return ``X.Y`` of the running interpreter."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def library_name(version: str) -> str:
    """Return the file the stub for python ``version`` asks the loader for."""
    return f"libpython{version}.so.1.0"


def find_libpython(version: str, *, cache: Path) -> Path | None:
    """Return the folder that holds libpython, or None.

    Args:
        version: ``X.Y``.
        cache: The project's cache; :func:`fetch_libpython` puts the library below it.
    """
    name = library_name(version)
    for folder in _candidate_folders(name):
        if (folder / name).is_file():
            return folder
    return next((path.parent for path in sorted(_cached_root(cache, version).rglob(name))), None)


def require_libpython(version: str, *, cache: Path) -> Path:
    """Return the folder that holds libpython.

    Raises:
        SourceError: It is nowhere; the hint is the one line that installs it.
    """
    folder = find_libpython(version, cache=cache)
    if folder is None:
        raise SourceError(
            f"{library_name(version)} was not found; Triton's python backend needs it for Python {version}",
            hint=f"apt-get install -y libpython{version}    (without root: make setup fetches it into {cache})",
        )
    return folder


def fetch_libpython(version: str, *, cache: Path) -> Path:
    """Download the distribution's libpython package and unpack it below ``cache``, without root.

    Returns:
        The folder that holds the library.

    Raises:
        SourceError: apt-get or dpkg is missing, or no package of that name has the library.
    """
    from pipeline.runners.process import run

    if not shutil.which("apt-get") or not shutil.which("dpkg"):
        raise SourceError(
            f"cannot fetch libpython{version} here: apt-get and dpkg are not both installed",
            hint=f"install the package with {library_name(version)} by the system's package manager",
        )
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".libpython-") as scratch:
        packages = Path(scratch, "packages")
        packages.mkdir()
        for package in (f"libpython{version}", f"libpython{version}t64"):  # the second since Ubuntu 24.04
            run(["apt-get", "download", package], cwd=packages, timeout_s=300, check=False)
        unpacked = Path(scratch, "root")
        for archive in sorted(packages.glob("*.deb")):
            run(["dpkg", "-x", str(archive), str(unpacked)], timeout_s=120)
        if not any(unpacked.rglob(library_name(version))):
            raise SourceError(
                f"no package with {library_name(version)} could be downloaded",
                hint=f"apt-get update, then apt-get install -y libpython{version}; or use another Python (3.10-3.13)",
            )
        target = _cached_root(cache, version)
        shutil.rmtree(target, ignore_errors=True)
        unpacked.rename(target)
    return require_libpython(version, cache=cache)


def _cached_root(cache: Path, version: str) -> Path:
    return cache / f"libpython{version}"


def _candidate_folders(name: str) -> Iterator[Path]:
    libdir = sysconfig.get_config_var("LIBDIR")
    if libdir:
        yield Path(libdir)
    yield Path(sys.base_prefix, "lib")
    if _LD_CACHE.is_file():
        # The cache is a binary table followed by NUL-terminated paths; reading it needs no process.
        for match in re.findall(rb"(/[^\0]*)/" + re.escape(name.encode()) + rb"\0", _LD_CACHE.read_bytes()):
            yield Path(match.decode(errors="surrogateescape"))
    yield from map(Path, _STANDARD_FOLDERS)
