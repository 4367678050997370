"""The families, found by the name of the model class. Adding one is one module here and its name in ``_MODULES``."""

from __future__ import annotations

import difflib
from functools import cache
from importlib import import_module

from pipeline.checkpoint.families.base import Family, Layout, Rule
from pipeline.errors import SourceError

__all__ = ["Family", "Layout", "Rule", "family_of", "supported_architectures"]

_MODULES = ("gemma", "gpt", "llama", "phi3", "qwen")


@cache
def _families() -> dict[str, Family]:
    modules = [import_module(f"{__name__}.{module}") for module in _MODULES]
    return {name: family for module in modules for family in module.FAMILIES for name in family.architectures}


def supported_architectures() -> tuple[str, ...]:
    """Return the model classes that can be converted."""
    return tuple(sorted(_families()))


def family_of(architecture: str) -> Family:
    """Return the family of a model class.

    Raises:
        SourceError: No family covers it; names the nearest that one does.
    """
    families = _families()
    if architecture in families:
        return families[architecture]
    near = difflib.get_close_matches(architecture, families, n=1)
    raise SourceError(
        f"architecture {architecture} cannot be converted; expected one of {', '.join(supported_architectures())}",
        hint=f"the nearest is {near[0]}" if near else "",
    )
