"""The one seam between whatever runs a model and whatever judges, measures or serves it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pipeline.engines.reference.request import Request, TokenLogprob


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Identity of an engine.

    Attributes:
        kind: ``reference``, ``triton``, ``tensorrt_llm``, ``transformers``.
        checkpoint_digest: sha256 over the checkpoint the engine answers from; with ``kind`` it tells whether two
            engines are the same witness.
        vocab_size: Real vocabulary, without padding.
        max_seq_len: Prompt plus output tokens at most.
    """

    kind: str
    checkpoint_digest: str
    vocab_size: int
    max_seq_len: int


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished request."""

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[TokenLogprob, ...] = ()


class Engine(Protocol):
    """Tokens in; tokens, logits and log probabilities out."""

    @property
    def info(self) -> EngineInfo:
        """Say which engine this is."""

    def logits(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Return the logits of every position: [tokens, vocab] float32."""

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Run the requests, batched, and return them in the order given."""
