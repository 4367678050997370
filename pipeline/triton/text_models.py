"""The configs of ``preprocessing`` and ``postprocessing``; they are the same for every target."""

from __future__ import annotations

from typing import Protocol

from pipeline.triton import tensors
from pipeline.triton.model_config import ModelConfig, python_model
from pipeline.triton.special_ids import SpecialIds


class TextSettings(Protocol):
    """The part of a repository's settings that text needs."""

    @property
    def max_batch_size(self) -> int:
        """Rows of one request."""

    @property
    def preprocessing_instances(self) -> int:
        """Processes that encode."""

    @property
    def postprocessing_instances(self) -> int:
        """Processes that decode."""

    @property
    def add_special_tokens(self) -> bool:
        """Add what the tokenizer adds to a prompt."""

    @property
    def skip_special_tokens(self) -> bool:
        """Leave special tokens out of the text."""


def text_configs(
    settings: TextSettings,
    ids: SpecialIds,
    vocab_size: int,
    *,
    preprocessing: str = "preprocessing",
    postprocessing: str = "postprocessing",
) -> dict[str, ModelConfig]:
    """Return both configs by model name.

    Args:
        settings: Shared values.
        ids: End and padding ids of the tokenizer.
        vocab_size: Vocabulary of the engine, without padding.
        preprocessing: Name of that model.
        postprocessing: Name of that model.
    """
    end_ids = ",".join(map(str, ids.end_ids))
    return {
        preprocessing: python_model(
            preprocessing,
            inputs=tensors.PREPROCESSING_INPUTS,
            outputs=tensors.PREPROCESSING_OUTPUTS,
            max_batch_size=settings.max_batch_size,
            instances=settings.preprocessing_instances,
            parameters={
                "add_special_tokens": _flag(settings.add_special_tokens),
                "end_ids": end_ids,
                "pad_id": str(ids.pad_id),
                "vocab_size": str(vocab_size),
            },
        ),
        postprocessing: python_model(
            postprocessing,
            inputs=tensors.POSTPROCESSING_INPUTS,
            outputs=tensors.POSTPROCESSING_OUTPUTS,
            max_batch_size=settings.max_batch_size,
            instances=settings.postprocessing_instances,
            parameters={"skip_special_tokens": _flag(settings.skip_special_tokens), "end_ids": end_ids},
        ),
    }


def _flag(value: bool) -> str:
    return "true" if value else "false"
