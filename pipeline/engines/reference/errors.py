"""The engine's own error type: the folder runs alone, without the project's error tree."""

from __future__ import annotations


class EngineError(ValueError):
    """A checkpoint or a request the engine cannot run; the message names it, its value and what was expected."""
