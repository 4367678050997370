"""LoRA adapters as the TensorRT-LLM backend takes them: two arrays with the first request, a task id ever after."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.errors import SourceError

_log = logging.getLogger(__name__)

WEIGHTS_FILE = "model.lora_weights.npy"
CONFIG_FILE = "model.lora_config.npy"
# What an engine says of an adapter that it has not seen, or has dropped for others.
NOT_CACHED = re.compile(r"(?i)lora task \d+ not found in cache")


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """One adapter.

    Attributes:
        weights: [modules, values], as the converter wrote them.
        config: [modules, 3 or more] int32: module, layer, rank.
    """

    weights: npt.NDArray[Any]
    config: npt.NDArray[np.int32]


def read_adapter(folder: Path) -> Adapter:
    """Read the two files that TensorRT-LLM's LoRA converter writes.

    Raises:
        SourceError: A file is missing, is no array, or the two do not belong together.
    """
    arrays = []
    for name in (WEIGHTS_FILE, CONFIG_FILE):
        try:
            array = np.load(folder / name, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise SourceError(
                f"the LoRA adapter file {folder / name} cannot be read: {error}",
                hint="frontend.lora_weights names folders made by TensorRT-LLM's hf_lora_convert.py",
            ) from error
        arrays.append(array.reshape(array.shape[-2:]) if array.ndim >= 2 else array)
    weights, config = arrays
    if weights.ndim != 2 or config.ndim != 2 or len(weights) != len(config):
        raise SourceError(
            f"the LoRA adapter in {folder} has weights {list(weights.shape)} and config {list(config.shape)}, "
            "expected as many rows in both"
        )
    return Adapter(weights, config.astype(np.int32))
