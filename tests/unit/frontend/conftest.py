"""Fixtures of the frontend's tests."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from frontend_fakes import Bench


@pytest.fixture
def make_bench(tmp_path: Path) -> Callable[..., Bench]:
    """Return a maker of benches."""

    def make(**values: Any) -> Bench:
        return Bench(tmp_path, **values)

    return make


@pytest.fixture
def bench(make_bench: Callable[..., Bench]) -> Bench:
    """Return a bench with a byte-level tokenizer."""
    return make_bench()
