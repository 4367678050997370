"""Lay out the test programs as NVIDIA's image of one release has its tools.

``python3 overlay.py RELEASE FOLDER`` fills FOLDER with the files that go over a bare system. A release that has lost
the engine builder gets no tools, as upstream. Needs the standard library and this repository only.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TOOLCHAINS = HERE.parents[1] / "pipeline" / "toolchains"
HOME = Path("opt/standin")
PROGRAMS = Path("usr/local/bin")

_SHIM = """#!/usr/bin/env python3
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[{up}] / "{home}"))
import standin

standin.main({tool!r})
"""


def lay_out(release: str, root: Path) -> None:
    """Write the programs and their data below ``root``.

    Raises:
        FileNotFoundError: There is no data for the release.
    """
    facts = json.loads((TOOLCHAINS / "data" / f"trtllm_{release.replace('.', '_')}.json").read_text(encoding="utf-8"))
    home = root / HOME
    (home / "flags").mkdir(parents=True)
    for module in (HERE / "standin.py", TOOLCHAINS / "upstream_parser.py"):
        shutil.copy(module, home / module.name)
    (home / "release.json").write_text(json.dumps({"release": release, "driver": facts["driver"]["floor"]}))
    _install(root / PROGRAMS / "nvidia-smi", root, "nvidia-smi")
    for tool, table in facts["tables"].items():
        name = tool.replace("/", "_")
        shutil.copy(TOOLCHAINS / "data" / "flags" / f"{table['flags']}.json", home / "flags" / f"{name}.json")
        _install(root / _place(tool, facts), root, tool)
    _write_metadata(root, release)


def _place(tool: str, facts: dict[str, Any]) -> Path:
    """Return where the image has a tool, relative to its root."""
    if tool == "trtllm-build":
        return PROGRAMS / tool
    paths, scripts = facts["paths"], facts["convert_scripts"]
    script = paths["quantize"] if tool == "quantize" else scripts[tool.removeprefix("convert/")]["script"]
    return Path(paths["examples"].lstrip("/"), script)


def _install(path: Path, root: Path, tool: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_SHIM.format(up=len(path.relative_to(root).parts) - 1, home=HOME, tool=tool), encoding="utf-8")
    path.chmod(0o755)


def _write_metadata(root: Path, release: str) -> None:
    """Make the version known the way an installed package does."""
    folder = root / "usr/lib/python3/dist-packages" / f"tensorrt_llm-{release}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tensorrt_llm\nVersion: {release}\n")


if __name__ == "__main__":
    lay_out(sys.argv[1], Path(sys.argv[2]))
