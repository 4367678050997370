"""Verbs on files and folders: ordinary flags, no configuration. Their code lives with what they work on."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from pipeline.cli.output import Output, findings_json, has_errors
from pipeline.errors import ExitCode


def checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``checkpoint``."""
    from pipeline.checkpoint.commands import add_arguments

    add_arguments(parser)


def checkpoint(args: argparse.Namespace, output: Output) -> int:
    """Run ``checkpoint`` and show its report."""
    from pipeline.checkpoint.commands import main
    from pipeline.graph.console import console
    from pipeline.graph.events import StageProgress

    with console(output.stderr, quiet=output.mode == "quiet") as emit:
        report = main(args, progress=lambda done, total, unit: emit(StageProgress(args.command, done, total, unit)))
    output.document({"command": report.command, **report.values, "findings": findings_json(report.findings)})
    for text in describe(report.values):
        output.line(text)
    output.findings(report.findings)
    return ExitCode.FINDING if has_errors(report.findings) else ExitCode.OK


def store_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``store``."""
    from pipeline.store.commands import add_arguments

    add_arguments(parser)


def store(args: argparse.Namespace, output: Output) -> int:
    """Run ``store``, which writes its answer itself."""
    from pipeline.store.commands import main

    args.json = output.mode == "json"
    return main(args, output.stdout)


def describe(values: Mapping[str, Any], indent: str = "") -> list[str]:
    """Return JSON values as indented lines for people."""
    lines: list[str] = []
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            lines += [f"{indent}{key}:", *describe(value, indent + "  ")]
        elif isinstance(value, (list, tuple)) and any(isinstance(item, Mapping) for item in value):
            lines.append(f"{indent}{key}:")
            for item in value:
                inner = describe(item, indent + "    ") if isinstance(item, Mapping) else [f"{indent}    {item}"]
                lines += [f"{indent}  - {inner[0].strip()}", *inner[1:]] if inner else []
        elif isinstance(value, (list, tuple)):
            lines.append(f"{indent}{key}: {', '.join(map(str, value)) or 'none'}")
        else:
            lines.append(f"{indent}{key}: {value}")
    return lines
