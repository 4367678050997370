"""Where the folders are that the project ships beside its code (``conf``, ``triton_repo``)."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


def shipped(name: str) -> Path:
    """Return the folder ``name``: inside an installed wheel, or at the top of a checkout.

    Raises:
        FileNotFoundError: The installation is incomplete.
    """
    for candidate in (_PACKAGE / "_shipped" / name, _PACKAGE.parent / name):
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"the shipped folder {name!r} is missing beside {_PACKAGE}: reinstall the package")
