"""Token counts of a request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pipeline.frontend.generation import Answer


def usage(prompt_tokens: int, answers: Iterable[Answer], cached_tokens: int = 0) -> dict[str, Any]:
    """Return OpenAI's ``usage``: each prompt counts once, every generated sequence counts."""
    completion = sum(answer.completion_tokens for answer in answers)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
