"""TensorRT-LLM release numbers: order, and where the engine builder ended."""

from __future__ import annotations

import re

# Source: upstream pull requests 15918 and 16369 (July 2026) removed the builder, its commands and the C++ modules.
LAST_ENGINE_RELEASE = "1.2.1"
FIRST_WITHOUT_ENGINES = "1.3.0rc21"
FIRST_DEPRECATED = "1.3.0rc6"

_PATTERN = re.compile(r"^(\d+)\.(\d+)(?:\.(\d+))?(?:rc(\d+))?(?:\.post(\d+))?$")
_FINAL = 10**6  # a final release sorts behind all its candidates

Version = tuple[int, int, int, int, int]


def parse(release: str) -> Version | None:
    """Return a sortable version, or None for anything that is no release number (``latest``)."""
    match = _PATTERN.match(release)
    if not match:
        return None
    major, minor, patch, candidate, post = match.groups()
    return int(major), int(minor), int(patch or 0), _FINAL if candidate is None else int(candidate), int(post or 0)


def is_at_least(release: str, other: str) -> bool:
    """Compare two releases; ``latest`` and other words count as newer than everything."""
    left, right = parse(release), parse(other)
    if left is None or right is None:
        return left is None
    return left >= right


def has_engine_builder(release: str) -> bool:
    """Say whether ``trtllm-build`` still exists in a release."""
    return not is_at_least(release, FIRST_WITHOUT_ENGINES)
