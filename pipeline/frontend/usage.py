"""Token counts of a request, for its client and for the log."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pipeline.frontend.generation import Answer
from pipeline.frontend.schema import Generation


def usage(prompt_tokens: int, answers: Iterable[Answer], cached_tokens: int = 0) -> dict[str, Any]:
    """Return OpenAI's ``usage``: each prompt counts once, every generated sequence counts."""
    completion = sum(answer.completion_tokens for answer in answers)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def access_record(
    body: Generation, counts: dict[str, Any], reasons: Sequence[str | None], prompts: Sequence[str]
) -> dict[str, Any]:
    """Return a generating request's part of its line in the access log; ``prompts`` is shown on demand only."""
    known = sorted({reason for reason in reasons if reason is not None})
    return {
        "model": body.model,
        "stream": bool(body.stream),
        "prompt_tokens": counts["prompt_tokens"],
        "completion_tokens": counts["completion_tokens"],
        "finish_reason": ",".join(known) or None,
        "prompts": list(prompts),
    }
