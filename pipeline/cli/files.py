"""Verbs on files and folders: ordinary flags, no configuration. Their code lives with what they work on."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.cli.output import Output, findings_json, has_errors
from pipeline.errors import ExitCode


def checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``checkpoint``."""
    from pipeline.checkpoint.commands import add_arguments

    add_arguments(parser)


def checkpoint(args: argparse.Namespace, output: Output) -> int:
    """Run ``checkpoint`` and show its report."""
    from pipeline.calibration.commands import calibrate
    from pipeline.checkpoint.commands import main, render
    from pipeline.graph.console import console
    from pipeline.graph.events import StageProgress

    with console(output.stderr, quiet=output.mode == "quiet") as emit:
        report = main(
            args,
            progress=lambda done, total, unit: emit(StageProgress(args.command, done, total, unit)),
            calibrate=calibrate,
        )
    output.document({"command": report.command, **report.values, "findings": findings_json(report.findings)})
    output.rich(lambda: render(report))
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


def report_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``report``."""
    parser.add_argument("folder", type=Path, help="a result: dist/NAME, or what a failed gate left beside its log")
    parser.add_argument("--out", type=Path, help="write report.html anew into this folder")


def report(args: argparse.Namespace, output: Output) -> int:
    """Run ``report``."""
    from pipeline.report.commands import report as make

    return _answer(make(args.folder, args.out), output)


def compare_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``compare``."""
    parser.add_argument("a", type=Path, help="a result folder")
    parser.add_argument("b", type=Path, help="another one")


def compare(args: argparse.Namespace, output: Output) -> int:
    """Run ``compare``."""
    from pipeline.report.commands import compare as make

    return _answer(make(args.a, args.b), output)


def _answer(answer: tuple[Mapping[str, Any], Sequence[str]], output: Output) -> int:
    document, lines = answer
    output.document(document)
    for line in lines:
        output.line(line)
    return ExitCode.OK
