"""Declarative build pipeline for TensorRT-LLM: from a Hugging Face checkpoint to a served, judged model repository."""

__version__ = "0.1.0"
