"""Known failures of the tools: from the last lines of their output to a cause, an action and a config key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.toolchains.release import data


@dataclass(frozen=True, slots=True)
class Advice:
    """What a failure message means.

    Attributes:
        id: Stable id of the entry.
        matched: The line that was recognised.
        cause: What happened, for people.
        action: What to do.
        config_key: Dotted key to change; None when there is none.
    """

    id: str
    matched: str
    cause: str
    action: str
    config_key: str | None


def advise(output_tail: str | Sequence[str]) -> Advice | None:
    """Recognise a failure in the last lines of a tool's output.

    Causes are looked for before the summary lines that follow them; within one entry the last line that matches counts.

    Returns:
        None when no entry matches.
    """
    lines = output_tail.splitlines() if isinstance(output_tail, str) else list(output_tail)
    lowered = [line.lower() for line in lines]
    for entry in data("advice")["entries"]:
        keys = [key.lower() for key in entry["keys"]]
        for line, low in zip(reversed(lines), reversed(lowered), strict=True):
            if any(key in low for key in keys):
                return Advice(entry["id"], line.strip(), entry["cause"], entry["action"], entry["config_key"])
    return None
