"""Request bodies as pydantic models: types and ranges, and the OpenAPI description.

Unknown fields are refused, as OpenAI's API does. Fields of OpenAI's API that change nothing here are accepted; what
cannot be honoured is refused where the request is used, never left out silently.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
StopString = Annotated[str, Field(min_length=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Body(BaseModel):
    """Base of all request bodies."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())


def _list_of(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class StreamOptions(Body):
    """How a stream ends."""

    include_usage: bool = False
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool = False


class JsonSchema(Body):
    """A schema for ``response_format``."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=(), populate_by_name=True)

    name: str = "schema"
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """What the answer must look like. ``grammar`` and ``regex`` go beyond OpenAI's API."""

    type: Literal["text", "json_object", "json_schema", "grammar", "regex"]
    json_schema: JsonSchema | None = None
    grammar: str | None = None
    regex: str | None = None


class Generation(Body):
    """Fields that both generating endpoints share."""

    model: str = Field(min_length=1, max_length=512)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Finite | None = Field(default=None, ge=0, le=2)
    top_p: Finite | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    min_p: Finite | None = Field(default=None, ge=0, lt=1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    n: int | None = Field(default=None, ge=1, le=128)
    stop: Annotated[list[StopString] | None, BeforeValidator(_list_of)] = Field(default=None, max_length=4)
    stop_token_ids: list[TokenId] | None = Field(default=None, max_length=64)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int | None = Field(default=None, ge=0, lt=2**31)
    presence_penalty: Finite | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: Finite | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: Finite | None = Field(default=None, gt=0, le=10)
    logit_bias: dict[str, Annotated[Finite, Field(ge=-100, le=100)]] | None = None
    response_format: ResponseFormat | None = None
    user: str | None = None
    request_id: str | None = Field(default=None, max_length=128)
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class CompletionRequest(Generation):
    """Body of ``/v1/completions``."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]] = Field(union_mode="left_to_right")
    suffix: str | None = None
    max_tokens: int | None = Field(default=None, ge=0, lt=2**31)
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=20)
    best_of: int | None = Field(default=None, ge=1, le=128)
    add_special_tokens: bool = True


class ContentPart(Body):
    """One part of a message; only text can be served."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    type: str
    text: str | None = None


class FunctionCall(Body):
    """A call the model made earlier."""

    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(Body):
    """A call the model made earlier, with its id."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    """One message of a conversation."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None


class Function(Body):
    """A function the model may call."""

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool the model may call."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """Name of a function."""

    name: str


class NamedTool(Body):
    """The one tool the model must call."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(Generation):
    """Body of ``/v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1, max_length=4096)
    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: list[Tool] | None = Field(default=None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    modalities: list[str] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None


class TokenizeRequest(Body):
    """Body of ``/tokenize``: a prompt or a conversation."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        protected_namespaces=(),
        json_schema_extra={"oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}]},
    )

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1, max_length=4096)
    tools: list[Tool] | None = Field(default=None, max_length=128)
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    """Body of ``/detokenize``."""

    model: str | None = None
    tokens: list[TokenId] = Field(max_length=1_000_000)
    skip_special_tokens: bool = False
