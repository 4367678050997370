"""A TensorRT-LLM checkpoint executed on the CPU with numpy.

The folder stands alone: it imports numpy, ml_dtypes and the standard library (threadpoolctl if there), and is copied
as it is into Triton model repositories.
"""

from .engine import ReferenceEngine
from .errors import EngineError
from .loop import EngineLoop
from .request import EngineInfo, Generation, Request, Sampling, TokenEvent, TokenLogprob

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
