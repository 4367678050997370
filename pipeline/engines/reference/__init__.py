"""A TensorRT-LLM checkpoint executed on the CPU with numpy.

The folder stands alone: it imports numpy, ml_dtypes and the standard library (threadpoolctl if there), and is copied
as it is into Triton model repositories. The request types are light; the engine is imported when it is first named.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import EngineError
from .request import EngineInfo, Generation, Request, Sampling, TokenEvent, TokenLogprob

if TYPE_CHECKING:
    from .engine import ReferenceEngine
    from .loop import EngineLoop

__all__ = [
    "EngineError",
    "EngineInfo",
    "EngineLoop",
    "Generation",
    "ReferenceEngine",
    "Request",
    "Sampling",
    "TokenEvent",
    "TokenLogprob",
]

_HEAVY = {"EngineLoop": "loop", "ReferenceEngine": "engine"}


def __getattr__(name: str) -> Any:
    if name in _HEAVY:
        return getattr(import_module(f".{_HEAVY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
