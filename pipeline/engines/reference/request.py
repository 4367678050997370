"""What goes into an engine and what comes out, shared by every engine implementation.

These types live beside the reference engine because the engine is copied alone into Triton repositories.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: 0 means greedy, whatever the other fields say.
        top_k: 0 means all tokens.
        top_p: In (0, 1]; 1 means all tokens.
        min_p: In [0, 1); tokens below ``min_p`` times the largest probability are dropped.
        repetition_penalty: Over prompt and output, as in CTRL; 1 is off.
        presence_penalty: Subtracted once from the logit of each token generated so far; 0 is off.
        frequency_penalty: Subtracted per occurrence from the logit of each token generated so far; 0 is off.
        seed: Same seed and same request give the same tokens whatever else is in the batch. None draws one.
        logit_bias: Added to the logits; token id to bias.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate.

    Attributes:
        request_id: Unique among live requests.
        token_ids: The prompt, at least one token.
        max_tokens: New tokens at most; 0 only scores the prompt. Clipped to what the context leaves.
        end_ids: Ids that end the sequence; the id itself is reported with its finish reason, not as text.
        stop_sequences: Token sequences that end generation when the output ends with one; they stay in the output.
        min_tokens: ``end_ids`` are masked until this many tokens were made.
        logprobs: None for none, k >= 0 for the chosen token's log probability and k alternatives.
        prompt_logprobs: The same for the prompt (the first token has none).
        allowed: Says which tokens may follow the output so far: bool, [vocab]. None allows all. When nothing may
            follow, the sequence ends with reason ``stop``. It is called once per step, in order; a ``ValueError``
            ends the request with its text.
    """

    request_id: str
    token_ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    end_ids: tuple[int, ...] = ()
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_context_logits: bool = False
    return_generation_logits: bool = False
    allowed: Callable[[Sequence[int]], npt.NDArray[np.bool_]] | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability of a token under the raw model distribution (log-softmax of the unprocessed logits)."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """What one engine step says about one request.

    Attributes:
        token_id: The new token, or None when the step only finished or scored the request.
        finish_reason: Set in the last event of a request. A token from ``end_ids`` comes with ``stop``.
        prompt_logprobs: In the first event when asked for; one entry per prompt token, the first None.
        context_logits: [prompt tokens, vocab] float32, in the first event when asked for.
        generation_logits: [vocab] float32, with each token when asked for.
        error: Text for ``finish_reason == "error"``.
    """

    request_id: str
    token_id: int | None = None
    logprob: TokenLogprob | None = None
    finish_reason: FinishReason | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    context_logits: npt.NDArray[np.float32] | None = None
    generation_logits: npt.NDArray[np.float32] | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished request."""

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[TokenLogprob, ...] = ()


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
