"""What the real tools would say to an argument list, without the real tools.

A flag table (``data/flags/*.json``) is turned into the :mod:`argparse` parser that the upstream script builds, so
choices, types, switches, ``nargs``, aliases, required flags and abbreviations are treated exactly as upstream treats
them. The module needs the standard library only and can be copied alone, with the tables, into a container image.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

_TYPES: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "path": Path, "str": str, "list[str]": str}


class Rejected(Exception):
    """The argument list is not accepted; the message is what the tool prints after ``error:``."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """Outcome of parsing an argument list as the tool would.

    Attributes:
        values: Destination name to value, defaults included; empty when rejected.
        error: What the tool would print before it exits with code 2; empty when accepted.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def accepted(self) -> bool:
        """Say whether the tool would start working."""
        return not self.error


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Rejected(message)


def load_table(path: Path) -> dict[str, Any]:
    """Read a flag table: ``{"tool": ..., "flags": {"--name": {"type": ..., ...}}}``.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not a flag table.
    """
    table = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(table, dict) or not isinstance(table.get("flags"), dict):
        raise ValueError(f"{path} is not a flag table: expected an object with 'flags'")
    return table


def build_parser(table: Mapping[str, Any], prog: str = "") -> argparse.ArgumentParser:
    """Build the parser that the tool builds. A rejected argument list raises :class:`Rejected` instead of exiting."""
    parser = _Parser(prog=prog or str(table["tool"]), add_help=False)
    for name, facts in table["flags"].items():
        parser.add_argument(name, *facts.get("aliases", ()), **_argument(facts))
    return parser


def parse_like_upstream(table: Mapping[str, Any], argv: Sequence[str], *, prog: str = "") -> Parsed:
    """Parse ``argv`` (without the program name) as the tool of ``table`` would.

    Returns:
        The values, or the rejection in the tool's words.
    """
    return parse_with(build_parser(table, prog), argv)


def parse_with(parser: argparse.ArgumentParser, argv: Sequence[str]) -> Parsed:
    """Parse with a parser that :func:`build_parser` made; cheaper when many lists go through one table."""
    try:
        return Parsed(values=vars(parser.parse_args(list(argv))))
    except Rejected as rejected:
        return Parsed(error=str(rejected))


def parse_or_exit(table: Mapping[str, Any], argv: Sequence[str], *, prog: str) -> Mapping[str, Any]:
    """Parse as the tool does on a command line: a rejection goes to standard error and ends the process with code 2."""
    parsed = parse_like_upstream(table, argv, prog=prog)
    if not parsed.accepted:
        sys.stderr.write(f"{build_parser(table, prog).format_usage()}{prog}: error: {parsed.error}\n")
        raise SystemExit(2)
    return parsed.values


def _argument(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Turn the facts of one flag into the keywords of ``add_argument``."""
    if facts.get("action") == "store_true":
        return {"action": "store_true", "default": bool(facts.get("default", False))}
    keywords: dict[str, Any] = {"default": facts.get("default")}
    if facts.get("suppressed_default"):
        keywords["default"] = argparse.SUPPRESS
    if facts.get("required"):
        keywords["required"] = True
    for key in ("nargs", "const"):
        if key in facts:
            keywords[key] = facts[key]
    kind = facts["type"]
    if kind.startswith("enum:"):
        # Upstream converts with a function and gives no choice list, so the message differs from that of a choice.
        keywords["type"] = _enum(kind.removeprefix("enum:"), facts["choices"])
        return keywords
    if facts.get("choices"):
        keywords["choices"] = facts["choices"]
    if kind in _TYPES:
        keywords["type"] = _TYPES[kind]
    return keywords


def _enum(name: str, choices: Sequence[str]) -> Callable[[str], str]:
    def convert(text: str) -> str:
        if text.lower() not in choices:
            raise ValueError(f"{text!r} is not a valid {name}")
        return text.lower()

    convert.__name__ = name
    return convert
