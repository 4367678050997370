"""The sandbox that chat templates run in, with the names that templates written for transformers expect.

One for the whole program: what the gate asks the model is what the frontend will ask it.
"""

from __future__ import annotations

import json
from collections.abc import Sized
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Longest text or list, and largest power, that one operation of a template may make. Templates repeat a line or a
# space; what asks for more wants to fill the memory.
_MAX_LENGTH = 1 << 20
_MAX_BITS = 1 << 12


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse repetitions and powers that take too much memory or time."""
        if operator == "*":
            for items, times in ((left, right), (right, left)):
                if isinstance(items, Sized) and isinstance(times, int) and len(items) * times > _MAX_LENGTH:
                    raise OverflowError(f"a template repeats {len(items)} items {times} times")
        elif isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _MAX_BITS:
            raise OverflowError(f"a template raises a number to the power {right}")
        return super().call_binop(context, operator, left, right)


class _GenerationTag(jinja2.ext.Extension):
    """Accepts ``{% generation %}`` blocks, which mark assistant text for training; here they change nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja reads it from the class

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> Any:
        return caller()


def chat_environment() -> ImmutableSandboxedEnvironment:
    """Return a new environment; templates are compiled with its ``from_string``."""
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Dump without the HTML escapes of jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
