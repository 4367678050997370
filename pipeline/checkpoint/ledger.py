"""The books of a conversion: every source tensor is used or known to be needless, every expected target is made."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from pipeline.errors import Finding, SourceError

_SHOWN = 8


class Ledger:
    """Accounts for the tensors of one conversion."""

    def __init__(self, source_names: Iterable[str]) -> None:
        """Open the books with all source tensors unaccounted for."""
        self._open = dict.fromkeys(source_names)
        self._names = set(self._open)
        self._missing: dict[str, str] = {}
        self.ignored: dict[str, str] = {}

    def consume(self, name: str, target: str) -> bool:
        """Book a source tensor as used for a target; return whether the source has it."""
        if name not in self._names:
            self._missing[name] = target
            return False
        self._open.pop(name, None)
        return True

    def ignore(self, patterns: Iterable[tuple[str, str]]) -> None:
        """Book the unused tensors that match a pattern as needless, with the pattern's reason."""
        for pattern, reason in patterns:
            for name in [n for n in self._open if re.fullmatch(pattern, n)]:
                self.ignore_one(name, reason)

    def ignore_one(self, name: str, reason: str) -> None:
        """Book one unused tensor as needless."""
        if name in self._open:
            del self._open[name]
            self.ignored[name] = reason

    def close(self, where: str) -> None:
        """Close the source side.

        Raises:
            SourceError: Tensors are missing, or left over; one finding per tensor.
        """
        findings = [
            Finding("missing-source-tensor", "error", name, f"the source lacks {name}, needed for {target}")
            for name, target in self._missing.items()
        ] + [
            Finding("unused-source-tensor", "error", name, f"nothing in the checkpoint takes {name}")
            for name in self._open
        ]
        if not findings:
            return
        parts = []
        if self._missing:
            parts.append(f"missing tensors: {_shown(self._missing)}")
        if self._open:
            parts.append(f"tensors that nothing takes: {_shown(self._open)}")
        raise SourceError(
            f"{where}: {'; '.join(parts)}",
            hint="config.json and weights do not belong together, or the model is a variant that is not supported",
            findings=findings,
        )


def compare_targets(
    produced: Mapping[str, tuple[tuple[int, ...], str]], expected: Mapping[str, tuple[tuple[int, ...], str]], where: str
) -> list[Finding]:
    """Compare tensors with what a checkpoint must hold.

    Args:
        produced: Name to shape and type.
        expected: The same, from the contract.
        where: Rank file, for the findings.
    """
    findings = []
    for name, wanted in expected.items():
        if name not in produced:
            findings.append(Finding("missing-tensor", "error", where, f"{name} is missing; expected {_text(wanted)}"))
        elif produced[name][0] != wanted[0]:
            found = f"{name} is {_text(produced[name])}; expected {_text(wanted)}"
            findings.append(Finding("wrong-shape", "error", where, found))
        elif produced[name][1] != wanted[1]:
            found = f"{name} is {_text(produced[name])}; expected {_text(wanted)}"
            findings.append(Finding("wrong-dtype", "error", where, found))
    for name in produced:
        if name not in expected:
            findings.append(Finding("unexpected-tensor", "error", where, f"{name} is not part of this model"))
    return findings


def _text(spec: tuple[tuple[int, ...], str]) -> str:
    return f"{spec[1]} {list(spec[0])}"


def _shown(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + more
