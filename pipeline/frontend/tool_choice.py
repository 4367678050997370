"""What ``tools`` and ``tool_choice`` mean for prompt, decoding and reading the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from pipeline.frontend.api_errors import bad_request, unsupported
from pipeline.frontend.backend import Features, Guide
from pipeline.frontend.schema import ChatRequest, NamedTool, Tool
from pipeline.frontend.tool_calls import (
    TOOL_MARKS,
    JsonCallsParser,
    Part,
    ToolDelta,
    ToolParser,
    new_call_id,
    tool_parser,
)


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """How one request handles tools.

    Attributes:
        shown: Tools the template sees.
        reading: Name of the format to read: a parser, ``list`` for a guided list of calls, or none.
        named: The one function whose arguments are the whole answer.
        guide: What forces the answer to be a call.
        single: Whether calls after the first are left out.
    """

    shown: Sequence[Tool] | None = None
    reading: str = "none"
    named: str | None = None
    guide: Guide | None = None
    single: bool = False

    @property
    def kept_tokens(self) -> tuple[str, ...]:
        """Special tokens by which the model marks calls; the parser has to see them."""
        return TOOL_MARKS.get(self.reading, ())

    def parser(self) -> ToolParser | None:
        """Return a fresh parser for one answer."""
        if self.named is not None:
            return _ArgumentsParser(self.named)
        if self.reading == "list":
            return JsonCallsParser("[", bare_objects=True, listed=True)
        return None if self.reading == "none" else tool_parser(self.reading)


def plan_tools(body: ChatRequest, features: Features, parser: str) -> ToolPlan:
    """Return the plan.

    Raises:
        ApiError: 400 when the choice does not fit the tools or the deployment.
    """
    tools, choice = body.tools, body.tool_choice
    if not tools:
        if choice not in (None, "none"):
            raise bad_request("tool_choice is only allowed when tools are given.", "tool_choice")
        return ToolPlan()
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise bad_request("Two tools have the same name.", "tools")
    if choice == "none":
        return ToolPlan(shown=tools)
    if choice in (None, "auto"):
        if parser == "none":
            raise unsupported("Tool calls are off: the server was started without a tool parser.", "tools")
        return ToolPlan(shown=tools, reading=parser, single=body.parallel_tool_calls is False)
    if not features.guided:
        raise unsupported("This model has no guided decoding, so a tool call cannot be forced.", "tool_choice")
    if isinstance(choice, NamedTool):
        wanted = choice.function.name
        if wanted not in names:
            raise bad_request(f"tool_choice names {wanted[:64]!r}, which is not among the tools.", "tool_choice")
        schema = _parameters(tools[names.index(wanted)])
        return ToolPlan(shown=tools, named=wanted, guide=_schema_guide(schema))
    calls: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": [_call_schema(tool) for tool in tools]}}
    if body.parallel_tool_calls is False:
        calls["maxItems"] = 1
    return ToolPlan(shown=tools, reading="list", guide=_schema_guide(calls))


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object", "properties": {}}


def _call_schema(tool: Tool) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, "arguments": _parameters(tool)},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _schema_guide(schema: dict[str, Any]) -> Guide:
    return Guide("json_schema", orjson.dumps(schema).decode())


class _ArgumentsParser:
    """The whole answer is the arguments of one known function."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def push(self, text: str) -> list[Part]:
        name, self._name = self._name, None
        if name is not None:
            return [ToolDelta(0, name, text, new_call_id())]
        return [ToolDelta(0, arguments=text)]

    def finish(self) -> list[Part]:
        return []
