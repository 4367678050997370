"""The one seam between whatever runs a model and whatever judges, measures or serves it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pipeline.engines.reference.request import EngineInfo, Generation, Request

__all__ = ["Engine", "EngineInfo", "Generation", "Request"]


class Engine(Protocol):
    """Tokens in; tokens, logits and log probabilities out."""

    @property
    def info(self) -> EngineInfo:
        """Say which engine this is."""

    def logits(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Return the logits of every position: [tokens, vocab] float32."""

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Run the requests, batched, and return them in the order given."""
