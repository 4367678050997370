"""Check the machine before a virtual environment is made: one list of what is missing, one line that installs it.

Run by ``make setup`` with the system's Python; needs nothing but the standard library.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def main() -> int:
    """Return 0 when ``make setup`` can go on."""
    if not (3, 10) <= sys.version_info[:2] <= (3, 13):
        print(f"Python {platform.python_version()} found; 3.10 to 3.13 are supported. Set PYTHON=python3.x for make.")
        return 1

    from pipeline.triton.libpython import fetch_libpython, find_libpython, python_version

    version, cache = python_version(), ROOT / ".tritonserver"
    packages = []
    if importlib.util.find_spec("ensurepip") is None:
        packages.append("python3-venv")
    if find_libpython(version, cache=cache) is None:
        if os.geteuid() == 0:
            packages.append(f"libpython{version}")
        else:
            print(f"libpython{version} is not installed: fetching it into {cache}")
            fetch_libpython(version, cache=cache)
    if packages:
        print("This machine lacks packages that the set-up needs. Install them, then run the same command again:")
        print(f"  {'' if os.geteuid() == 0 else 'sudo '}apt-get install -y {' '.join(packages)}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
