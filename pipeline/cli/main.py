"""The command line: takes the verb and the global flags off, runs the verb, turns every ending into an exit code."""

from __future__ import annotations

import argparse
import difflib
import gc
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from pipeline.cli.output import Output, StdoutFailed
from pipeline.cli.verbs import VERBS, Request, Verb, find
from pipeline.errors import ConfigError, ExitCode, Finding, PipelineError
from pipeline.graph.interrupt import Terminated
from pipeline.logs import redact

_FLAGS = {"--json", "--quiet", "--debug", "--help", "-h", "--version", "-m", "--multirun"}


@dataclass(slots=True)
class _Line:
    """The command line, taken apart."""

    verb: Verb
    flags: set[str] = field(default_factory=set)
    config_dir: Path | None = None
    rest: list[str] = field(default_factory=list)
    is_verb_named: bool = False


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code. Never raises but for being killed."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    output = Output("json" if "--json" in arguments else "quiet" if "--quiet" in arguments else "human")
    before = signal.signal(signal.SIGTERM, _terminate)
    # Composition makes many objects and no garbage: without the collector a start is a tenth quicker. It is on again
    # when the job is known.
    gc.disable()
    try:
        _require_folder()
        _hide_secrets(arguments)
        return _run(_take_apart(arguments), output)
    except BrokenPipeError:
        _drop_stdout()  # the reader went away (`plan | head`)
        return ExitCode.OK
    except (Exception, KeyboardInterrupt) as error:
        return _ended(error, output, show_traceback="--debug" in arguments)
    finally:
        gc.enable()
        signal.signal(signal.SIGTERM, before)


def _ended(error: BaseException, output: Output, *, show_traceback: bool) -> int:
    """Say what ended the command line and return its exit code."""
    code = ExitCode.INTERNAL
    try:
        if isinstance(error, StdoutFailed):
            _drop_stdout()
            print(redact(f"error: {error}"), file=output.stderr)
        elif isinstance(error, PipelineError):
            code = error.exit_code
            output.failure(error)
        elif isinstance(error, Terminated):
            code = ExitCode.TERMINATED
            _interrupted(output, code, "terminated")
        elif isinstance(error, KeyboardInterrupt):
            code = ExitCode.INTERRUPTED
            _interrupted(output, code, "interrupted")
        elif isinstance(error, Exception):
            _internal(error, output, show_traceback=show_traceback)
    except (BrokenPipeError, StdoutFailed):
        _drop_stdout()  # nobody hears it; the exit code remains
    return code


def _require_folder() -> None:
    try:
        Path.cwd()
    except FileNotFoundError:
        raise _usage("the folder you are in no longer exists", "cd to another one") from None


def _take_apart(arguments: Sequence[str]) -> _Line:
    words = list(arguments)
    flags: set[str] = set()
    config_dir: str | None = None
    rest: list[str] = []
    while words:
        word = words.pop(0)
        if word in _FLAGS and not (word in ("--help", "-h") and _is_file_verb(rest)):
            flags.add(word)
        elif word == "--config-dir":
            if not words:
                raise _usage("--config-dir needs a folder", "--config-dir ./conf")
            config_dir = words.pop(0)
        elif word.startswith("--config-dir="):
            config_dir = word.partition("=")[2]
        else:
            rest.append(word)
    verb, is_named = _verb(rest)
    if is_named:
        rest = rest[1:]
    line = _Line(verb, flags, Path(config_dir) if config_dir is not None else None, rest, is_named)
    if verb.kind == "recipe":
        _refuse_flags(rest)
    return line


def _is_file_verb(rest: Sequence[str]) -> bool:
    verb = find(rest[0]) if rest else None
    return verb is not None and verb.kind == "file"


def _verb(rest: Sequence[str]) -> tuple[Verb, bool]:
    if not rest or rest[0][:1] in "+~-" or "=" in rest[0]:
        return VERBS[0], False
    verb = find(rest[0])
    if verb is None:
        near = difflib.get_close_matches(rest[0], [verb.name for verb in VERBS], n=1)
        hint = f"did you mean {near[0]}?" if near else "verbs are " + ", ".join(verb.name for verb in VERBS)
        raise _usage(f"there is no verb {rest[0]!r}", hint)
    return verb, True


def _refuse_flags(rest: Sequence[str]) -> None:
    known = sorted({*_FLAGS, "--config-dir"})
    problems = []
    for word in rest:
        if word.startswith("-") and not word.startswith("-="):
            name = word.partition("=")[0]
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"flags are {', '.join(known)}; the rest is key=value"
            problems.append(Finding("config-unknown-flag", "error", name, f"there is no flag {name}", hint))
    if problems:
        raise ConfigError(problems[0].message, hint=problems[0].hint, findings=problems)


def _run(line: _Line, output: Output) -> int:
    if "--version" in line.flags:
        from importlib.metadata import version

        print(version("trtllm-pipeline"))
        return ExitCode.OK
    if line.flags & {"--help", "-h"}:
        print(_help(line.verb) if line.is_verb_named else _overview())
        return ExitCode.OK
    module_name, _, name = line.verb.location.partition(":")
    module = importlib.import_module(module_name)
    if line.verb.kind == "file":
        return _run_file_verb(line.verb, module, name, line.rest, output)
    is_sweep = bool(line.flags & {"-m", "--multirun"})
    if is_sweep and line.verb.name != "run":
        raise _usage(f"{line.verb.name} does not sweep", "-m goes with run")
    function: Callable[[Request], int] = getattr(module, name)
    return function(Request(tuple(line.rest), output, line.config_dir, is_sweep))


def _run_file_verb(verb: Verb, module: Any, name: str, rest: Sequence[str], output: Output) -> int:
    parser = _Parser(
        prog=f"python -m pipeline {verb.name}",
        description=verb.help,
        epilog=_examples(verb),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    getattr(module, f"{name}_arguments")(parser)
    try:
        args = parser.parse_args(rest)
    except SystemExit as done:  # --help
        return int(done.code or 0)
    code: int = getattr(module, name)(args, output)
    return code


class _Parser(argparse.ArgumentParser):
    """Parse errors become ours, so that --json holds for them too."""

    def error(self, message: str) -> NoReturn:
        raise _usage(message, f"{self.prog} --help")


def _overview() -> str:
    width = max(len(verb.name) for verb in VERBS)
    verbs = "\n".join(f"  {verb.name:<{width}}  {verb.help}" for verb in VERBS)
    examples = "\n".join(f"  python -m pipeline {example}" for verb in VERBS[:4] for example in verb.examples[:2])
    return f"""Turn a Hugging Face checkpoint into something a Triton server can serve through an OpenAI API.

usage: python -m pipeline [VERB] [FLAGS] [group=option] [key=value] …

verbs:
{verbs}

flags:
  --json            one JSON document on stdout, also on failure; logs go to stderr
  --quiet           errors only
  --config-dir DIR  look here for options first, then in ./conf, then in the shipped ones
  -m, --multirun    run: one run for each combination of a,b values
  --debug           traceback on internal errors
  --help            this, or the help of a verb: python -m pipeline VERB --help

examples:
{examples}

groups and their options: python -m pipeline plan --help"""


def _help(verb: Verb) -> str:
    from pipeline.config.compose import options, search_path

    groups = options(search_path())
    width = max(len(group) for group in groups)
    listed = "\n".join(f"  {group:<{width}}  {' '.join(names)}" for group, names in groups.items())
    return f"""usage: python -m pipeline {verb.name} [FLAGS] [group=option] [key=value] …

{verb.help}

{_examples(verb)}

groups and options:
{listed}

Keys of an option are set with a dot: limits.max_batch_size=8. Quote for the shell as usual: 'model.path=/a b/c=d'."""


def _examples(verb: Verb) -> str:
    return "examples:\n" + "\n".join(f"  python -m pipeline {example}" for example in verb.examples)


def _hide_secrets(arguments: Sequence[str]) -> None:
    if not any("=" in argument for argument in arguments):
        return
    from pipeline.config.overrides import secrets_in
    from pipeline.logs import register_secret

    for value in secrets_in(arguments):
        register_secret(value)


def _usage(message: str, hint: str) -> ConfigError:
    return ConfigError(message, hint=hint, findings=[Finding("usage", "error", "", message, hint)])


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated


def _drop_stdout() -> None:
    """Let go of stdout; Python would complain again when it flushes it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _interrupted(output: Output, code: ExitCode, word: str) -> None:
    output.document({"exit_code": int(code), "error": {"kind": word, "message": word, "hint": ""}, "findings": []})
    if output.mode != "json":
        print(word, file=output.stderr)


def _internal(error: Exception, output: Output, *, show_traceback: bool) -> None:
    """Report a bug: one line and where the rest is."""
    message = report_internal(error, output, show_traceback=show_traceback)
    if output.mode == "json":
        output.failure(PipelineError(message))


def report_internal(error: Exception, output: Output, *, show_traceback: bool = False) -> str:
    """Write a bug's traceback to a file of its own and say so in one line, which is returned."""
    import tempfile
    import traceback

    text = redact("".join(traceback.format_exception(error)))
    try:
        with tempfile.NamedTemporaryFile("w", prefix="pipeline-error-", suffix=".log", delete=False) as file:
            file.write(text)
        where = f"details in {file.name}"
    except OSError:
        where = "no details could be written; try --debug"
    if show_traceback:
        print(text, file=output.stderr)
    reason = str(error).partition("\n")[0]
    message = f"internal error: {type(error).__name__}: {reason} ({where})"
    print(redact(message), file=output.stderr)
    return message
