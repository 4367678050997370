"""Torch ``.bin`` files: the same bytes as safetensors, and never anything run."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
from checkpoint_reading import digests

from pipeline.checkpoint import ConvertOptions, convert_checkpoint, inspect_source
from pipeline.errors import SourceError

DATA = Path(__file__).parents[2] / "data" / "checkpoint" / "torch"


@pytest.mark.parametrize("layout", ["zip", "stream", "sharded"])
def test_torch_files_convert_to_the_bytes_of_safetensors(tmp_path: Path, layout: str) -> None:
    for name in ("safetensors", layout):
        convert_checkpoint(DATA / name, tmp_path / name, options=ConvertOptions(tp=2))
    assert digests(tmp_path / layout) == digests(tmp_path / "safetensors")
    assert inspect_source(DATA / layout).kind == "torch"


def test_safetensors_win_over_torch_files_beside_them(tmp_path: Path) -> None:
    shutil.copytree(DATA / "safetensors", tmp_path / "m")
    shutil.copy(DATA / "zip" / "pytorch_model.bin", tmp_path / "m")
    summary = inspect_source(tmp_path / "m")
    assert (summary.kind, list(summary.ignored_files)) == ("safetensors", ["pytorch_model.bin"])


class _Runs:
    """An object whose pickle calls a function when it is loaded."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def archive(content: Any) -> bytes:
    """Return a torch zip archive with the given pickle."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps(content, protocol=2))
    return stream.getvalue()


def old_stream(content: Any) -> bytes:
    """Return an old torch file with the given pickle."""
    parts = (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}, content, [])
    return b"".join(pickle.dumps(part, protocol=2) for part in parts)


@pytest.mark.parametrize("layout", [archive, old_stream], ids=["zip", "stream"])
@pytest.mark.parametrize("name", ["os.system", "builtins.eval", "builtins.open", "shutil.rmtree"])
def test_file_that_names_code_is_refused_and_nothing_runs(tmp_path: Path, layout: Any, name: str) -> None:
    marker = tmp_path / "marker"
    victim = tmp_path / "victim"
    victim.mkdir()
    calls = {
        "os.system": _Runs(os.system, f"touch {marker}"),
        "builtins.eval": _Runs(eval, f"open({str(marker)!r}, 'w')"),
        "builtins.open": _Runs(open, str(marker), "w"),
        "shutil.rmtree": _Runs(shutil.rmtree, str(victim)),
    }
    shutil.copytree(DATA / "zip", tmp_path / "m")
    (tmp_path / "m" / "pytorch_model.bin").write_bytes(layout({"weight": calls[name]}))
    # Modules have other names inside a pickle (posix, __builtin__, io).
    function = name.partition(".")[2]
    with pytest.raises(SourceError, match=rf"wants to use \w+\.{function}; refused, and nothing of it was run"):
        inspect_source(tmp_path / "m")
    assert not marker.exists()
    assert victim.exists()


def test_shard_that_names_code_is_refused_before_any_output(tmp_path: Path) -> None:
    shutil.copytree(DATA / "sharded", tmp_path / "m")
    marker = tmp_path / "marker"
    file = tmp_path / "m" / "pytorch_model-00002-of-00002.bin"
    file.write_bytes(archive({"weight": _Runs(os.system, f"touch {marker}")}))
    with pytest.raises(SourceError, match=r"pytorch_model-00002-of-00002\.bin: its pickle wants"):
        convert_checkpoint(tmp_path / "m", tmp_path / "out")
    assert not marker.exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([1, 2], "holds list"),
        ({"weight": 3}, "'weight' is int"),
        ({7: None}, "7 is NoneType"),
    ],
)
def test_file_without_plain_tensors_is_named(tmp_path: Path, content: Any, reason: str) -> None:
    shutil.copytree(DATA / "zip", tmp_path / "m")
    (tmp_path / "m" / "pytorch_model.bin").write_bytes(archive(content))
    with pytest.raises(SourceError, match=reason):
        inspect_source(tmp_path / "m")


@pytest.mark.parametrize("layout", ["zip", "stream"])
@pytest.mark.parametrize("keep", [10, 600, -100])
def test_truncated_torch_file_is_named(tmp_path: Path, layout: str, keep: int) -> None:
    shutil.copytree(DATA / layout, tmp_path / "m")
    file = tmp_path / "m" / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(SourceError, match=r"pytorch_model\.bin"):
        inspect_source(tmp_path / "m")


def test_tensor_that_is_not_in_row_order_is_refused(tmp_path: Path) -> None:
    shutil.copytree(DATA / "zip", tmp_path / "m")
    shutil.copy(DATA / "transposed.bin", tmp_path / "m" / "pytorch_model.bin")
    with pytest.raises(SourceError, match=r"embed_tokens\.weight has strides \(1, 6\) for shape \(6, 4\)"):
        inspect_source(tmp_path / "m")
