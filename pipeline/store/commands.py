"""The verb ``store``: look at finished work, check it, and free space. The command line gives it flags and a stream."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from pipeline.errors import ExitCode, StoreError
from pipeline.logs import redact
from pipeline.store import inspect
from pipeline.store.explain import describe_changes
from pipeline.store.faults import format_bytes
from pipeline.store.record import Record, plain
from pipeline.store.store import Store

DEFAULT_ROOT = ".pipeline/store"


@dataclass(slots=True)
class _Answer:
    """What a command has to say, for programs and for people."""

    document: dict[str, Any]
    lines: list[str] = field(default_factory=list)
    exit_code: ExitCode = ExitCode.OK


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands and their flags to the parser of the verb."""
    parser.add_argument("--root", type=Path, default=Path(DEFAULT_ROOT), help=f"the store (default {DEFAULT_ROOT})")
    # The flag may stand on either side of the command; suppressed there, it does not undo what stood before.
    root = argparse.ArgumentParser(add_help=False)
    root.add_argument("--root", type=Path, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    commands = parser.add_subparsers(dest="store_command", required=True, metavar="ls|show|why|verify|du|gc")
    commands.add_parser("ls", parents=[root], help="list finished work")
    show = commands.add_parser("show", parents=[root], help="everything about one result")
    show.add_argument("what", help="first digits of a key or artefact, or JOB/STAGE")
    why = commands.add_parser(
        "why", parents=[root], help="what differs between a job's last two results of a stage, or any two"
    )
    why.add_argument("what", help="first digits of a key or artefact, or JOB/STAGE")
    why.add_argument("other", nargs="?", help="what to compare with; default: the one before it")
    verify = commands.add_parser("verify", parents=[root], help="read every byte again and compare digests")
    verify.add_argument("--remove", action="store_true", help="remove what is damaged, so that it is built again")
    commands.add_parser("du", parents=[root], help="where the space goes")
    gc = commands.add_parser("gc", parents=[root], help="remove what no job's last run needs")
    gc.add_argument("--yes", action="store_true", help="remove; without it, only say what would go")


def main(args: argparse.Namespace, out: TextIO) -> int:
    """Run a sub-command and write its answer to ``out``: text, or one JSON document with ``args.json``.

    Returns:
        0, or 6 when ``verify`` found damage that is still there.

    Raises:
        StoreError: There is no store, or it cannot be read or written.
    """
    store = Store(args.root)
    if not store.actions.is_dir():
        raise StoreError(f"there is no store at {store.root}", hint="Give --root, the folder that store.root names.")
    command: Callable[[Store, argparse.Namespace], _Answer] = _COMMANDS[args.store_command]
    answer = command(store, args)
    if getattr(args, "json", False):
        out.write(json.dumps(plain({"schema_version": 1, **answer.document}), indent=2) + "\n")
    else:
        out.writelines(redact(line) + "\n" for line in answer.lines)
    return int(answer.exit_code)


def _ls(store: Store, args: argparse.Namespace) -> _Answer:
    used: dict[str, list[str]] = {}
    for job, _, key in store.in_use():
        used.setdefault(key, []).append(job)
    rows: list[dict[str, Any]] = [
        {
            "key": r.key,
            "job": r.job,
            "stage": r.document.stage,
            "artefact": r.artefact,
            "size_bytes": r.size_bytes,
            "created": r.created,
            "used_by": used.get(r.key, []),
        }
        for r in inspect.records(store)
    ]
    lines = [f"{'KEY':<12}  {'STAGE':<9} {'SIZE':>10}  {'CREATED':<25}  JOBS"]
    for row in rows:
        jobs = ", ".join(row["used_by"]) or f"({row['job']}, no longer used)"
        size = format_bytes(row["size_bytes"])
        lines.append(f"{row['key'][:12]}  {row['stage']:<9} {size:>10}  {row['created']}  {jobs}")
    return _Answer({"records": rows}, lines)


def _show(store: Store, args: argparse.Namespace) -> _Answer:
    record = inspect.find_record(store, args.what)
    document = {
        "key": record.key,
        "stage": record.document.stage,
        "stage_version": record.document.version,
        "job": record.job,
        "created": record.created,
        "seconds": record.seconds,
        "identity": record.document.identity,
        "inputs": record.document.inputs,
        "artefact": record.artefact,
        "path": str(store.artefacts / record.artefact),
        "log": str(store.root / record.log) if record.log else "",
        "facts": record.facts,
        "versions": record.versions,
        "files": [{"path": e.path, "kind": e.kind, "size": e.size, "sha256": e.sha256} for e in record.entries],
    }
    lines = []
    for name, value in document.items():
        if isinstance(value, Mapping):
            lines += [f"{name}:", *(f"  {key}: {item}" for key, item in value.items())]
        elif name != "files":
            lines.append(f"{name}: {value}")
    lines.append("files:")
    lines += [f"  {e.kind} {format_bytes(e.size):>10}  {e.sha256[:12]:<12}  {e.path}" for e in record.entries]
    return _Answer(document, lines)


def _why(store: Store, args: argparse.Namespace) -> _Answer:
    record = inspect.find_record(store, args.what)
    other = inspect.find_record(store, args.other) if args.other else _before(store, record)
    if other is None:
        reason = "never built before"
        return _Answer({"key": record.key, "other": None, "reason": reason}, [reason])
    if other.document.stage != record.document.stage:
        raise StoreError(f"{args.what} is of stage {record.document.stage}, {args.other} of {other.document.stage}")
    reason = describe_changes(other.document, record.document) or "nothing: the same work"
    line = f"{other.key[:12]} → {record.key[:12]}: {reason}"
    return _Answer({"key": record.key, "other": other.key, "reason": reason}, [line])


def _before(store: Store, record: Record) -> Record | None:
    same = [r for r in inspect.records(store) if (r.job, r.document.stage) == (record.job, record.document.stage)]
    earlier = [r for r in same if r.created <= record.created and r.key != record.key]
    return earlier[-1] if earlier else None


def _verify(store: Store, args: argparse.Namespace) -> _Answer:
    problems = inspect.verify(store)
    removed = bool(args.remove and problems)
    if removed:
        inspect.remove_damaged(store, problems)
    lines = [f"{problem.path}: {problem.reason}" for problem in problems]
    if removed:
        lines.append(f"{len(problems)} removed; the next run builds what it needs of them")
    elif problems:
        lines.append(f"{len(problems)} damaged; `store verify --remove` lets the next run build them again")
    else:
        lines.append("every record and every byte is as it was written")
    document = {
        "problems": [{"path": str(p.path), "reason": p.reason, "artefact": p.artefact} for p in problems],
        "removed": removed,
    }
    return _Answer(document, lines, ExitCode.STORE if problems and not removed else ExitCode.OK)


def _du(store: Store, args: argparse.Namespace) -> _Answer:
    usage = inspect.usage(store)
    stages = {record.artefact: record.document.stage for record in inspect.records(store)}
    rows = sorted(usage.artefacts.items(), key=lambda item: -item[1])
    lines = [f"{format_bytes(size):>10}  {digest[:12]}  {stages.get(digest, '(no record)')}" for digest, size in rows]
    lines.append(f"{format_bytes(usage.logs_bytes):>10}  logs")
    lines.append(f"{format_bytes(usage.total_bytes):>10}  in all (shared files once)")
    document = {"artefacts": usage.artefacts, "logs_bytes": usage.logs_bytes, "total_bytes": usage.total_bytes}
    return _Answer(document, lines)


def _gc(store: Store, args: argparse.Namespace) -> _Answer:
    found = inspect.collect(store) if args.yes else inspect.garbage(store)
    lines = [str(path.relative_to(store.root)) for path in found.paths if path.parent == store.artefacts]
    size = format_bytes(found.freed_bytes)
    if args.yes:
        lines.append(f"{len(found.paths)} removed, {size} freed")
    elif found.paths:
        lines.append(f"{len(found.paths)} can go, {size}; `store gc --yes` removes them")
    else:
        lines.append("nothing to remove")
    document = {
        "paths": [str(path.relative_to(store.root)) for path in found.paths],
        "freed_bytes": found.freed_bytes,
        "removed": bool(args.yes),
    }
    return _Answer(document, lines)


_COMMANDS: dict[str, Callable[[Store, argparse.Namespace], _Answer]] = {
    "ls": _ls,
    "show": _show,
    "why": _why,
    "verify": _verify,
    "du": _du,
    "gc": _gc,
}
