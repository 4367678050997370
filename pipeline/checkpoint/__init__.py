"""Convert Hugging Face and GGUF models to TensorRT-LLM checkpoints, and check the result.

The parts, from source to target: ``readers`` (tensors of a source, by row ranges), ``families`` (which source
tensors make which target tensor), ``ledger`` (nothing left over, nothing missing), ``sharder`` (tensor and pipeline
parallel pieces), ``writer`` (rank files, streamed), ``contract`` (what a finished checkpoint must hold).
``tokenizer`` packs what serving needs besides.

Names are loaded on first use, so that reading a config does not import numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.checkpoint.contract import expected_tensors
    from pipeline.checkpoint.convert import convert_checkpoint
    from pipeline.checkpoint.hfconfig import Architecture, read_architecture
    from pipeline.checkpoint.inspection import inspect_source
    from pipeline.checkpoint.options import ConversionReport, ConvertOptions
    from pipeline.checkpoint.readers import open_source
    from pipeline.checkpoint.tokenizer import TokenizerReport, write_tokenizer
    from pipeline.checkpoint.verification import verify_checkpoint

_HOME = {
    "Architecture": "hfconfig",
    "ConversionReport": "options",
    "ConvertOptions": "options",
    "TokenizerReport": "tokenizer",
    "convert_checkpoint": "convert",
    "expected_tensors": "contract",
    "inspect_source": "inspection",
    "open_source": "readers",
    "read_architecture": "hfconfig",
    "verify_checkpoint": "verification",
    "write_tokenizer": "tokenizer",
}

__all__ = [
    "Architecture",
    "ConversionReport",
    "ConvertOptions",
    "TokenizerReport",
    "convert_checkpoint",
    "expected_tensors",
    "inspect_source",
    "open_source",
    "read_architecture",
    "verify_checkpoint",
    "write_tokenizer",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
