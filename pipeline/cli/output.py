"""The one way to the user: text for people, one JSON document for programs, or errors only. Everything is redacted.

Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, TextIO, cast

from pipeline.errors import Finding, PipelineError, Severity
from pipeline.logs import redact

SCHEMA_VERSION = 1

_PIPE_COLUMNS = 160

Mode = Literal["human", "json", "quiet"]


class StdoutFailed(Exception):
    """Stdout does not take the result: a full disk behind it, most likely."""


class _Unbreakable:
    """A stream that takes everything, whether or not somebody reads it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, or do not."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush, or do not."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _tolerant(stream: TextIO | None) -> TextIO:
    """Return a stream of the interpreter that takes any character; nowhere to write to if it was closed."""
    if stream is None:
        return Path(os.devnull).open("w", encoding="utf-8")
    if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
        # A terminal that cannot show a letter of a name gets its number.
        stream.reconfigure(errors="backslashreplace")
    return stream


_COLOURS: Mapping[str, str] = {"error": "31", "warning": "33", "info": "36", "bold": "1", "good": "32"}


class Output:
    """Where a verb writes. In ``json`` mode exactly one document is written, whatever happens."""

    def __init__(self, mode: Mode = "human", *, stdout: TextIO | None = None, stderr: TextIO | None = None) -> None:
        self.mode = mode
        self._stdout, self._stderr = stdout, stderr

    @property
    def stdout(self) -> TextIO:
        """Results."""
        return self._stdout or _tolerant(sys.stdout)

    @property
    def stderr(self) -> TextIO:
        """Everything else: progress, notes, errors. Never fails: nobody reading them is no reason to stop the work."""
        return cast(TextIO, _Unbreakable(self._stderr or _tolerant(sys.stderr)))

    def line(self, text: str = "") -> None:
        """Write a line of the result for people."""
        if self.mode == "human":
            self._result(text)

    def note(self, text: str) -> None:
        """Write a line beside the result."""
        if self.mode != "quiet":
            print(redact(text), file=self.stderr, flush=True)

    def table(self, rows: Sequence[Sequence[str]], *, header: bool = False) -> None:
        """Write rows as aligned columns; numbers to the right, the last column free."""
        if self.mode == "human":
            for line in aligned(rows, self.paint if header else None):
                self.line(line)

    def rich(self, make: Callable[[], Any]) -> None:
        """Write what rich can print, made only when people read; into a file or pipe with room for long names."""
        if self.mode == "human":
            from rich.console import Console

            width = None if self.stdout.isatty() else _PIPE_COLUMNS
            console = Console(file=self.stdout, width=width, highlight=False)
            console.print(make())

    def findings(self, findings: Sequence[Finding], *, beside: bool = True) -> None:
        """Write findings: beside the result, or as part of it. Quiet mode leaves the errors."""
        for finding in findings:
            if self.mode == "quiet" and finding.severity != "error":
                continue
            lines = self._finding(finding)
            if beside or self.mode == "quiet":
                print(redact("\n".join(lines)), file=self.stderr, flush=True)
            else:
                for line in lines:
                    self.line(line)

    def document(self, values: Mapping[str, Any]) -> None:
        """Write the JSON document; other modes ignore it."""
        if self.mode == "json":
            text = json.dumps({"schema_version": SCHEMA_VERSION, **values}, indent=2, ensure_ascii=False)
            self._result(text)

    def failure(self, error: PipelineError) -> None:
        """Say what ended the verb, with every finding."""
        if self.mode == "json":
            self.document(failure_document(error))
            return
        shown = [finding for finding in error.findings if finding.severity == "error"] or list(error.findings)
        if len(shown) == 1 and shown[0].message == error.message:
            self._error_line(f"{_place(shown[0])}{error.message}", error.hint)
            return
        self._error_line(error.message, error.hint)
        for finding in shown:
            for line in self._finding(finding):
                print(redact(line), file=self.stderr, flush=True)

    def paint(self, text: str, style: str) -> str:
        """Colour text for a terminal; leave it alone elsewhere."""
        wanted = self.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        return f"\x1b[{_COLOURS[style]}m{text}\x1b[0m" if wanted else text

    def _result(self, text: str) -> None:
        try:
            print(redact(text), file=self.stdout, flush=True)
        except BrokenPipeError:  # the reader has seen enough
            raise
        except OSError as error:
            raise StdoutFailed(f"the result cannot be written to stdout: {error.strerror}") from error

    def _error_line(self, message: str, hint: str) -> None:
        print(redact(f"{self.paint('error', 'error')}: {message}"), file=self.stderr, flush=True)
        if hint:
            print(redact(f"  → {hint}"), file=self.stderr, flush=True)

    def _finding(self, finding: Finding) -> list[str]:
        label = self.paint(f"{finding.severity:<7}", finding.severity)
        lines = [f"  {label}  {_place(finding)}{finding.message}  [{finding.rule}]"]
        return [*lines, f"           → {finding.hint}"] if finding.hint else lines


def failure_document(error: PipelineError) -> dict[str, Any]:
    """Return the JSON of a failed verb."""
    return {
        "exit_code": int(error.exit_code),
        "error": {"kind": type(error).__name__, "message": error.message, "hint": error.hint},
        "findings": findings_json(error.findings),
    }


def findings_json(findings: Sequence[Finding]) -> list[dict[str, str]]:
    """Return findings as JSON values."""
    return [asdict(finding) for finding in findings]


def has_errors(findings: Sequence[Finding]) -> bool:
    """Say whether any finding stops a run."""
    stops: Severity = "error"
    return any(finding.severity == stops for finding in findings)


def aligned(rows: Sequence[Sequence[str]], paint: Any = None) -> list[str]:
    """Return rows as text with aligned columns. With ``paint`` the first row is a header."""
    if not rows:
        return []
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    numeric = [all(row[column][:1].isdigit() or not row[column] for row in rows[1:]) for column in range(len(rows[0]))]
    lines = []
    for number, row in enumerate(rows):
        cells = []
        for column, cell in enumerate(row):
            is_last = column == len(row) - 1 and not numeric[column]
            right = numeric[column] and len(rows) > 1
            cells.append(cell if is_last else f"{cell:>{widths[column]}}" if right else f"{cell:<{widths[column]}}")
        line = "  " + "  ".join(cells).rstrip()
        lines.append(paint(line, "bold") if paint and number == 0 else line)
    return lines


def _place(finding: Finding) -> str:
    return f"{finding.path}: " if finding.path and not finding.message.startswith(finding.path) else ""
