"""From flag values to an argument list that the release's table accepts, or findings that say why not."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from pipeline.errors import Finding
from pipeline.toolchains.job import FlagValue
from pipeline.toolchains.release import Flag, FlagTable, data


def render(
    table: FlagTable, values: Mapping[str, FlagValue], *, prefix: str, paths: Mapping[str, str] | None = None
) -> tuple[tuple[str, ...], list[Finding]]:
    """Turn flag values into arguments, in the order given.

    A value of None leaves the flag out; a switch is given by True; ``enable``/``disable`` flags also take a boolean.

    Args:
        table: Flags of the tool in the release.
        values: Value by flag name, with or without dashes.
        prefix: Config path of free flags, ``build.flags``; used in findings.
        paths: Config path of the flags that come from elsewhere, by name without dashes.

    Returns:
        The arguments of every flag that is right, and one error finding for each that is not.
    """
    arguments: list[str] = []
    findings: list[Finding] = []
    for name, value in values.items():
        key = name.lstrip("-")
        path = (paths or {}).get(key, f"{prefix}.{key}")
        flag = table.find(name if name.startswith("-") else f"--{name}")
        if flag is None:
            findings.append(_unknown(table, f"--{key}", path))
            continue
        if value is None or (flag.is_switch and value is False):
            continue
        texts, problem = _texts(flag, value)
        if problem:
            findings.append(_wrong(table, flag, value, path, problem))
            continue
        arguments += [flag.name, *texts]
        findings += _remarks(table, flag, texts, path)
    return tuple(arguments), findings


def accepts(table: FlagTable, name: str, value: FlagValue) -> bool:
    """Say whether the table has the flag and takes the value."""
    flag = table.find(name)
    return flag is not None and not _texts(flag, value)[1]


def _texts(flag: Flag, value: FlagValue) -> tuple[list[str], str]:
    """Return the words after the flag, and what is wrong with the value if anything is."""
    if flag.is_switch:
        return ([], "") if value is True else ([], "is a switch: expected true or false")
    if flag.takes_many:
        many = [value] if isinstance(value, str) else value
        if not isinstance(many, Sequence) or not many:
            return [], "takes a list of words"
        return _checked(flag, [str(item) for item in many])
    if isinstance(value, bool):
        if not flag.is_toggle:
            return [], f"takes {_expected(flag)}, not a boolean"
        value = "enable" if value else "disable"
    if not isinstance(value, (str, int, float)):
        return [], f"takes one {_expected(flag)}"
    return _checked(flag, [repr(value) if isinstance(value, float) else str(value)])


def _checked(flag: Flag, texts: list[str]) -> tuple[list[str], str]:
    for text in texts:
        if not text or (text.startswith("-") and flag.type not in ("int", "float")):
            return [], "must not be empty or begin with a dash"
        if flag.type == "int" and not _is(int, text):
            return [], "takes a whole number"
        if flag.type == "float" and not _is(float, text):
            return [], "takes a number"
        if flag.choices and text not in {str(choice) for choice in flag.choices}:
            return [], f"takes one of: {', '.join(str(c) for c in flag.choices)}"
    return texts, ""


def _is(kind: type[int] | type[float], text: str) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True


def _expected(flag: Flag) -> str:
    return "one of: " + ", ".join(str(c) for c in flag.choices) if flag.choices else flag.type


def _unknown(table: FlagTable, name: str, path: str) -> Finding:
    moved = data("index")["moved"].get(table.tool.partition("/")[0], {}).get(name)
    near = (moved["to"] or "") if moved else table.nearest(name)
    message = f"{table.tool} of release {table.release} has no flag {name}"
    if moved:
        message += f": {moved['note']}"
    hint = f"use {near}" if moved and near else (f"did you mean {near}?" if near else "remove it")
    return Finding("unknown-flag", "error", path, message, hint)


def _wrong(table: FlagTable, flag: Flag, value: FlagValue, path: str, problem: str) -> Finding:
    rule = "flag-choice" if flag.choices else "flag-type"
    near = difflib.get_close_matches(str(value), [str(c) for c in flag.choices], n=1, cutoff=0.5)
    message = f"{flag.name}={value!r}: {table.tool} of release {table.release} {problem}"
    return Finding(rule, "error", path, message, f"did you mean {near[0]!r}?" if near else f"{flag.name} {problem}")


def _remarks(table: FlagTable, flag: Flag, texts: Sequence[str], path: str) -> list[Finding]:
    remarks = []
    if flag.deprecated:
        message = f"{flag.name} is deprecated in release {table.release}" + (f": {flag.note}" if flag.note else "")
        remarks.append(Finding("flag-deprecated", "warning", path, message, "leave it out"))
    doubt = table.doubts.get(" ".join((flag.name, *texts)))
    if doubt:
        remarks.append(Finding("flag-unverified", "warning", path, f"{flag.name} {' '.join(texts)}: {doubt}"))
    return remarks
