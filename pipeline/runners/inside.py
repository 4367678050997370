"""Look around inside an image and print one line of JSON. Runs there, so it imports the standard library only.

Started as ``python3 inside.py QUESTIONS.json``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

MARK = "PIPELINE-PROBE "

# Names in a folder that are compared with what is seen outside.
MOST_ENTRIES = 20

_GPU_FIELDS = "name,uuid,compute_cap,memory.total,driver_version"


def version_of(package: str) -> str | None:
    """Return a package's version from its metadata; importing it would take half a minute and a GPU."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def gpus() -> list[dict[str, str]]:
    """Return what nvidia-smi says of each GPU that it was given; none when it fails."""
    command = ["nvidia-smi", f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    return [dict(zip(_GPU_FIELDS.split(","), row, strict=False)) for row in rows]


def entries(path: Path) -> list[str] | int | None:
    """Return some names in a folder, or the size of a file; None when it is not there."""
    try:
        return sorted(entry.name for entry in path.iterdir())[:MOST_ENTRIES] if path.is_dir() else path.stat().st_size
    except OSError:
        return None


def can_write(path: str) -> bool:
    """Make an empty file, for the owner it gets outside."""
    try:
        Path(path).write_bytes(b"")
    except OSError:
        return False
    return True


def main() -> None:
    """Answer the questions of the file named on the command line."""
    questions = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    answers = {
        "token": questions["token"],
        "python": "{}.{}.{}".format(*sys.version_info),
        "uid": os.getuid(),
        "tools": {tool: shutil.which(tool) for tool in questions["tools"]},
        "files": {path: Path(path).is_file() for path in questions["files"]},
        "versions": {package: version_of(package) for package in questions["versions"]},
        "mounts": {path: entries(Path(path)) for path in questions["mounts"]},
        "written": [path for path in questions["write"] if can_write(path)],
        "gpus": gpus(),
    }
    sys.stdout.write(MARK + json.dumps(answers) + "\n")


if __name__ == "__main__":
    main()
