"""What must hold between values. Each rule is a pure function from a Spec to findings; nothing is raised.

All rules run and all findings are shown at once. A rule's id is stable: people silence and search by it.

Sources: the builder's own guards and documented limits of TensorRT-LLM 0.17 to 1.2.1. Where a limit is an estimate, the
finding is a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from pipeline.config.rules import engine, jobs, limits, memory, parallel, precision
from pipeline.errors import Finding

if TYPE_CHECKING:
    from pipeline.config.spec import Spec

Rule = Callable[["Spec"], Iterator[Finding]]

RULES: tuple[Rule, ...] = (
    *jobs.RULES,
    *precision.RULES,
    *parallel.RULES,
    *limits.RULES,
    *engine.RULES,
    *memory.RULES,
)

_ORDER = {"error": 0, "warning": 1, "info": 2}


def check(spec: Spec) -> list[Finding]:
    """Return what all rules find, errors first."""
    found = [finding for rule in RULES for finding in rule(spec)]
    return sorted(found, key=lambda finding: _ORDER[finding.severity])
