"""The seam between the HTTP side and whatever generates tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from pipeline.engines.reference.request import Sampling


@dataclass(frozen=True, slots=True)
class Guide:
    """What the output must match.

    Attributes:
        kind: ``json``, ``json_schema``, ``regex`` or ``ebnf_grammar``, as the TensorRT-LLM backend names them.
        text: The schema, expression or grammar; empty for ``json``.
    """

    kind: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One sequence to generate.

    Attributes:
        request_id: Unique and starting with a letter.
        token_ids: The prompt.
        max_tokens: New tokens at most; 0 only scores the prompt.
        sampling: How tokens are chosen; always complete, nothing is left to the backend's defaults.
        end_id: Ends the sequence and does not appear in the output. None runs to the limit.
        stop_words: Token sequences that end the output and appear in it.
        min_tokens: No end before this many tokens.
        logprobs: None for none, k >= 0 for the chosen token's log probability and k alternatives.
        prompt_logprobs: The same for the prompt.
        guide: Constrains the output.
        lora_task_id: Adapter to use.
        stream: Whether tokens are wanted as they are made; otherwise one chunk at the end will do.
        text: The prompt for models that take text.
    """

    request_id: str
    token_ids: Sequence[int]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    end_id: int | None = None
    stop_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    guide: Guide | None = None
    lora_task_id: int | None = None
    stream: bool = True
    text: str = ""


class Logprob(NamedTuple):
    """Log probability of one token, with the alternatives that were asked for, most likely first."""

    token_id: int
    logprob: float
    top: Sequence[tuple[int, float]] = ()


class Chunk(NamedTuple):
    """Part of an answer.

    Attributes:
        token_ids: New tokens only, without the end id.
        logprobs: One entry per new token when asked for.
        prompt_logprobs: In the first chunk when asked for: one entry per prompt token, the first None.
        finish_reason: In the last chunk, where the backend says so: ``stop``, ``length`` or ``cancelled``.
        cached_tokens: Prompt tokens taken from a cache, where known.
        text: New text, from models that give text instead of ids.
        text_tokens: New tokens behind ``text``, where the model says it.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[Logprob] = ()
    prompt_logprobs: Sequence[Logprob | None] | None = None
    finish_reason: str | None = None
    cached_tokens: int | None = None
    text: str | None = None
    text_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Features:
    """What a model can do, read from its configuration.

    Attributes:
        inputs: Names of the inputs the model takes.
        max_seq_len: Prompt plus output tokens at most, where the model says so.
        vocab_size: Length of a logit bias, where the model says so.
        logprobs: Log probabilities of chosen tokens.
        top_logprobs: Log probabilities of alternatives.
        prompt_logprobs: Log probabilities of the prompt's tokens.
        min_p: Sampling above a share of the largest probability.
        logit_bias: Bias per token.
        guided: Guided decoding.
        lora: Adapters by task id.
        takes_text: The model takes and gives text; token ids stay on its side.
    """

    inputs: frozenset[str] = frozenset()
    max_seq_len: int | None = None
    vocab_size: int | None = None
    logprobs: bool = False
    top_logprobs: bool = False
    prompt_logprobs: bool = False
    min_p: bool = False
    logit_bias: bool = False
    guided: bool = False
    lora: bool = False
    takes_text: bool = False


class BackendError(Exception):
    """Generation failed. ``str()`` is for the log and may hold the backend's own words."""


class BackendUnavailable(BackendError):
    """Nothing answers, or the model is not loaded."""


class BackendOverloaded(BackendError):
    """The backend's queue is full."""


class PromptRejected(BackendError):
    """The backend refused the request itself; the text is fit for the client."""


class Backend(Protocol):
    """Generates tokens. Closing the iterator of ``generate`` early cancels the sequence."""

    async def features(self) -> Features:
        """Say what the model can do.

        Raises:
            BackendUnavailable: It cannot be asked.
        """

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Yield the answer in parts.

        Raises:
            BackendError: Before or between parts.
        """

    async def is_ready(self) -> bool:
        """Say whether a request would be answered now."""

    async def close(self) -> None:
        """End connections."""
