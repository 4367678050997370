"""The error tree, findings and exit codes.

An error says what happened, with the value, what was expected, and what to do (``hint``). Everything a user can cause
is a :class:`PipelineError`; anything else that escapes is a bug and ends with exit code 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

Severity = Literal["error", "warning", "info"]


class ExitCode(IntEnum):
    """Process exit codes; part of the command line contract."""

    OK = 0
    INTERNAL = 1
    CONFIG = 2
    FINDING = 3
    GATE = 4
    TOOL = 5
    STORE = 6
    DEPLOY = 7
    INTERRUPTED = 130
    TERMINATED = 143


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing a rule noticed.

    Attributes:
        rule: Stable id of the rule, kebab-case (``max-num-tokens-capped``).
        severity: ``error`` stops the run before any work; ``warning`` and ``info`` are shown.
        path: Dotted config path or file that the finding is about.
        message: What was found, with the value, and what was expected.
        hint: A command or an override that helps; may be empty.
    """

    rule: str
    severity: Severity
    path: str
    message: str
    hint: str = ""


class PipelineError(Exception):
    """Root of everything a user can cause or must act on."""

    exit_code: ExitCode = ExitCode.INTERNAL

    def __init__(self, message: str, *, hint: str = "", findings: Sequence[Finding] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.findings = tuple(findings)


class ConfigError(PipelineError):
    """The configuration cannot be composed or typed. One finding per problem."""

    exit_code = ExitCode.CONFIG


class PreflightError(PipelineError):
    """A rule found an error before work began."""

    exit_code = ExitCode.FINDING


class SourceError(PipelineError):
    """A source file or model is missing, damaged, of the wrong kind, or not accessible."""

    exit_code = ExitCode.FINDING


class GateFailed(PipelineError):
    """The gate judged the artefact as failed, inconclusive or invalid; nothing is emitted."""

    exit_code = ExitCode.GATE


class ToolError(PipelineError):
    """A started program failed."""

    exit_code = ExitCode.TOOL


class StoreError(PipelineError):
    """The store cannot be read or written."""

    exit_code = ExitCode.STORE


class DeployError(PipelineError):
    """A release could not be switched."""

    exit_code = ExitCode.DEPLOY
