"""Which witnesses this interpreter has. Looks, and imports nothing heavy."""

from __future__ import annotations

import importlib.util


def transformers_available() -> bool:
    """Say whether this interpreter can make the ``transformers`` baseline itself, without importing torch."""
    return all(importlib.util.find_spec(name) is not None for name in ("torch", "transformers"))
