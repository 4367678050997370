"""What was typed on the command line: group choices and values, checked one by one so that all mistakes show at once.

Values of text keys are taken literally behind the first ``=``, so plain shell quoting is enough for any character.
Hydra's grammar is used where it adds something: lists and sweeps.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.config.fields import groups, leaves, nearest, nearest_key, open_section, sections
from pipeline.errors import ConfigError, Finding

# More runs in one sweep are a slip of the keyboard.
MAX_POINTS = 1000
SECRET_KEYS = ("source.token",)
_SECRET_WORD = re.compile(r"token|secret|passw|api_?key|credential", re.IGNORECASE)
_PLAIN_LIST = re.compile(r"^\[[^\[\]{}'\"\\]+\]$")
_SECRET_VALUE = re.compile(r"^hf_[A-Za-z0-9]{10,}$")


@dataclass(frozen=True, slots=True)
class Overrides:
    """A checked command line.

    Attributes:
        choices: Option per group.
        values: Typed value per dotted key.
        problems: What is wrong with the rest.
    """

    choices: Mapping[str, str]
    values: Mapping[str, Any]
    problems: tuple[Finding, ...]


def secrets_in(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the values that must never be shown, whether or not their keys exist."""
    for argument in arguments:
        key, _, text = argument.partition("=")
        key, value = key.lstrip("+"), _unquote(text)
        is_known = key in leaves() or open_section(key)
        sounds_secret = _SECRET_WORD.search(key.rpartition(".")[2]) and not is_known
        if value and (key in SECRET_KEYS or sounds_secret or _SECRET_VALUE.match(value)):
            yield value


def parse(arguments: Sequence[str], options: Mapping[str, Sequence[str]]) -> Overrides:
    """Check ``group=option`` and ``key=value`` arguments; the last of several for one key wins.

    Args:
        arguments: As they came from the shell.
        options: Names of the options of each group, for checking and for nearest matches. Groups beyond the schema's
            (``experiment``) are allowed.
    """
    choices: dict[str, str] = {}
    values: dict[str, Any] = {}
    problems: list[Finding] = []
    for index, argument in enumerate(arguments):
        key, equals, text = argument.partition("=")
        key = key.lstrip("+").strip()
        try:
            if not equals or not key or argument.startswith("~"):
                raise _Problem(_not_an_override(arguments, index))
            if key in options:
                choices[key] = _option(key, _unquote(text), options[key])
            else:
                values[key] = _value(key, text)
        except _Problem as problem:
            problems.append(problem.finding)
    return Overrides(choices, values, tuple(problems))


def expand_sweep(arguments: Sequence[str]) -> list[list[str]]:
    """Return one argument list for each point of a sweep: ``tp=1,2`` gives two, products multiply.

    Hydra's sweep forms are understood (``a,b``, ``range(1,4)``, ``choice(a,b)``); text with a comma is quoted to
    stay one value.

    Raises:
        ConfigError: There are more than :data:`MAX_POINTS`.
    """
    from itertools import islice, product
    from math import prod

    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    axes: list[list[str]] = []
    for argument in arguments:
        try:
            override = parser.parse_override(argument)
        except HydraException:
            axes.append([argument])
            continue
        if override.is_sweep_override() and override.is_discrete_sweep():
            key = argument.partition("=")[0]
            axes.append([f"{key}={value}" for value in islice(override.sweep_string_iterator(), MAX_POINTS + 1)])
        else:
            axes.append([argument])
    if prod(map(len, axes)) > MAX_POINTS:
        message = f"the sweep has more than {MAX_POINTS} points"
        raise ConfigError(message, findings=[Finding("sweep-size", "error", "", message, "sweep fewer values")])
    return [list(point) for point in product(*axes)]


class _Problem(Exception):
    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.message)
        self.finding = finding


def _option(group: str, option: str, known: Sequence[str]) -> str:
    if option in known:
        return option
    near = nearest(option, known)
    raise _Problem(
        Finding(
            "config-unknown-option",
            "error",
            group,
            f"{group} has no option {option!r}; expected one of {', '.join(sorted(known))}",
            f"did you mean {group}={near}?" if near else "",
        )
    )


def _value(key: str, text: str) -> Any:
    if "_target_" in key.split("."):
        raise _Problem(
            Finding("config-names-code", "error", key, "'_target_' is refused: a configuration never names code")
        )
    if open_section(key):
        return _free_value(key, text)
    leaf = leaves().get(key)
    if leaf is None:
        raise _Problem(unknown_key(key))
    try:
        if leaf.kind is list:
            return _list(key, text)
        if leaf.kind is dict:
            raise ValueError(f"holds several names; set one by one: {key}.NAME=VALUE")
        bare = _unquote(text)
        if "${" in bare:
            return bare  # resolved and typed by OmegaConf
        value = leaf.parse(bare)
        problem = leaf.problem(value)
    except ValueError as error:
        problem = str(error)
    if problem:
        raise _Problem(Finding("config-bad-value", "error", key, f"{key}: {problem}"))
    return value


def unknown_key(key: str, where: str = "") -> Finding:
    """Return the finding for a key that does not exist. The value is not shown: it may be a secret."""
    near = nearest_key(key)
    place = f" in {where}" if where else ""
    if key in sections():
        keys = ", ".join(path for path in leaves() if path.rpartition(".")[0] == key)
        return Finding("config-bad-value", "error", key, f"{key}{place} is not one value; its keys are {keys}")
    hint = f"did you mean {near}?" if near else f"groups are {', '.join(groups())}"
    return Finding("config-unknown-key", "error", key, f"there is no key or group {key!r}{place}", hint)


def _free_value(key: str, text: str) -> Any:
    """Type a value whose name only a release knows: true and false, numbers, lists, else text. Quotes keep it text."""
    bare = _unquote(text)
    if bare != text:
        return bare
    if text.startswith("["):
        return _list(key, text)
    words: Mapping[str, bool | None] = {"true": True, "false": False, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        return number if math.isfinite(number) else text
    return text


def _list(key: str, text: str) -> list[str]:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        value = OverridesParser.create().parse_override(f"{key}={text}").value()
    except HydraException:
        value = None
    if isinstance(value, list):
        return [str(item) for item in value]
    if _PLAIN_LIST.match(text.strip()):
        # Hydra wants quotes around items with '=' or spaces; there is only one way to read them.
        return [item.strip() for item in text.strip()[1:-1].split(",")]
    items = [item.strip() for item in text.strip().strip("[]").split(",")]
    quoted = "[" + ",".join(f'"{item}"' for item in items) + "]"
    raise _Problem(
        Finding(
            "config-syntax",
            "error",
            key,
            f"cannot read {f'{key}={text}'!r}: expected a list [a,b]",
            f"quote it: {shlex.quote(f'{key}={quoted}')}",
        )
    )


def _not_an_override(arguments: Sequence[str], index: int) -> Finding:
    argument = arguments[index]
    shown = argument.partition("=")[0]
    if argument.startswith("~"):
        return Finding(
            "config-syntax", "error", shown, f"{shown!r} would remove a part that is needed; choose another option"
        )
    hint = "arguments are group=option or key=value"
    before = arguments[index - 1] if index else ""
    key, equals, _ = before.partition("=")
    leaf = leaves().get(key)
    if equals and leaf is not None and leaf.kind is str and key not in SECRET_KEYS:
        hint = f"if it belongs to the argument before it, quote the whole: {shlex.quote(f'{before} {argument}')}"
    elif argument in groups():
        hint = f"choose an option: {argument}=NAME"
    elif near := nearest_key(shown):
        hint = f"did you mean {near}=…?"
    return Finding("config-syntax", "error", shown, f"{shown!r} has no '='", hint)


def _unquote(text: str) -> str:
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1].replace("\\" + text[0], text[0])
    return text
