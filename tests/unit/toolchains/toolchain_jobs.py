"""Jobs and shorthands that the toolchain tests share."""

from __future__ import annotations

from typing import Any

from pipeline.errors import Finding
from pipeline.toolchains.adapter import commands_for
from pipeline.toolchains.command import Command
from pipeline.toolchains.job import Calibration, Limits, ToolJob
from pipeline.toolchains.release import load_release, release_versions

ENGINE_RELEASES = tuple(v for v in release_versions() if load_release(v).builds_engines)
LIMITS = Limits(max_batch_size=8, max_input_len=2048, max_seq_len=4096, max_num_tokens=8192, max_beam_width=1)


def job(family: str = "llama", precision: str = "fp16", **values: Any) -> ToolJob:
    """Make a job on one H100 with calibration data; every field can be set."""
    defaults: dict[str, Any] = {"sm": 90, "gpu_count": 8, "dtype": "bfloat16", "limits": LIMITS}
    return ToolJob(family=family, precision=precision, **{**defaults, "calibration": Calibration(), **values})


def run(release: str = "1.2.1", **values: Any) -> tuple[list[Command], list[Finding]]:
    """Make the commands of a job in a release."""
    return commands_for(job(**values), load_release(release))


def rules_of(findings: list[Finding], severity: str = "") -> set[str]:
    """Return the ids of the findings, of one severity if given."""
    return {finding.rule for finding in findings if severity in ("", finding.severity)}


def only(findings: list[Finding], rule: str) -> Finding:
    """Return the one finding of a rule."""
    found = [finding for finding in findings if finding.rule == rule]
    assert len(found) == 1, f"{rule}: {[(f.rule, f.message) for f in findings]}"
    return found[0]


def value_after(command: Command, flag: str) -> str:
    """Return the word after a flag."""
    return command.flags[command.flags.index(flag) + 1]
