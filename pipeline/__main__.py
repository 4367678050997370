"""``python -m pipeline``."""

import importlib.util
import sys


def _missing() -> str:
    """Name a dependency that this interpreter lacks: then it is not the one that the project was installed for."""
    return next((name for name in ("omegaconf", "hydra", "numpy") if importlib.util.find_spec(name) is None), "")


if __name__ == "__main__":
    if _missing():
        print(
            f"error: {sys.executable} lacks {_missing()}: the project is not installed for this interpreter\n"
            "  → use .venv/bin/python (made by `make setup`), or pip install the project",
            file=sys.stderr,
        )
        raise SystemExit(2)
    from pipeline.cli.main import main

    raise SystemExit(main())
