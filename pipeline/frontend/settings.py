"""What the server is told at start, as one frozen value."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from pipeline.errors import ConfigError, Finding, SourceError

ToolParserName = Literal["none", "llama3", "mistral", "hermes"]
LogFormat = Literal["json", "text", "none"]


@dataclass(frozen=True, slots=True)
class FrontendSettings:
    """Settings of the OpenAI server.

    Attributes:
        tokenizer: Folder with ``tokenizer.json`` and, where they exist, ``tokenizer_config.json``,
            ``generation_config.json`` and chat template files.
        triton: gRPC addresses, ``host:port``. With several, requests go to the healthy one with the least load.
        model: Triton model that takes token ids.
        served_model: The name clients use; the tokenizer folder's name when empty.
        aliases: Further names clients may use.
        lora: Client-side model name to ``lora_task_id``.
        lora_weights: The same names to folders with ``model.lora_weights.npy`` and ``model.lora_config.npy``, which
            are sent with the first request of an adapter. Without one the server must know the adapter already.
        target: What answers, shown in ``/v1/models``: ``engine``, ``llmapi`` or ``reference``.
        created: Unix seconds for ``/v1/models``; 0 means the start of the server.
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        max_seq_len: Prompt plus output tokens at most. None reads the model's config parameters.
        max_input_len: Prompt tokens at most, when smaller than ``max_seq_len``.
        vocab_size: Length of ``embedding_bias``. None reads the model's parameters, then the tokenizer.
        chat_template: Jinja file that replaces the tokenizer's template.
        clean_up_spaces: Overrides ``clean_up_tokenization_spaces`` of the tokenizer; None follows it.
        tool_parser: Format in which the model writes tool calls.
        gathered_logits: The engine was built with gathered context and generation logits, from which log
            probabilities of alternatives and of the prompt can be computed.
        api_keys_file: One key per line, ``#`` starts a comment.
        api_keys_env: Environment variable with comma-separated keys.
        protect_metrics: Whether ``/metrics`` needs a key too.
        max_body_bytes: Larger bodies get 413 before they are read.
        head_timeout_s: A request head that takes longer to arrive gets 408.
        body_timeout_s: A body that takes longer to arrive gets 408.
        max_stop_chars: Longest stop string.
        max_choices: Prompts times n (or best_of) in one request.
        max_in_flight: Sequences generated at the same time.
        max_queued: Sequences that may wait for a place; beyond it 429.
        queue_timeout_s: A sequence that waits longer gets 503.
        health_period_s: Pause between two looks at each Triton server.
        probe_period_s: A server that has answered nothing for so long is asked for one token by the health check;
            0 trusts its own word.
        stall_timeout_s: A server that does not answer that question for so long is not ready.
        connect_timeout_s: How long a look at a Triton server may take.
        drain_s: How long open streams may go on after SIGTERM.
        log_format: Access log: ``json`` lines, ``text`` lines, or ``none``.
        log_prompts: Put prompt text into the access log.
    """

    tokenizer: Path
    triton: tuple[str, ...] = ("127.0.0.1:8001",)
    model: str = "tensorrt_llm"
    served_model: str = ""
    aliases: tuple[str, ...] = ()
    lora: Mapping[str, int] = dataclasses.field(default_factory=dict)
    lora_weights: Mapping[str, Path] = dataclasses.field(default_factory=dict)
    target: str = ""
    created: int = 0
    host: str = "127.0.0.1"
    port: int = 8000
    max_seq_len: int | None = None
    max_input_len: int | None = None
    vocab_size: int | None = None
    chat_template: Path | None = None
    clean_up_spaces: bool | None = None
    tool_parser: ToolParserName = "none"
    gathered_logits: bool = False
    api_keys_file: Path | None = None
    api_keys_env: str = ""
    protect_metrics: bool = False
    max_body_bytes: int = 16 * 1024 * 1024
    head_timeout_s: float = 20.0
    body_timeout_s: float = 60.0
    max_stop_chars: int = 1024
    max_choices: int = 2048
    max_in_flight: int = 4096
    max_queued: int = 4096
    queue_timeout_s: float = 300.0
    health_period_s: float = 2.0
    probe_period_s: float = 30.0
    stall_timeout_s: float = 30.0
    connect_timeout_s: float = 5.0
    drain_s: float = 30.0
    log_format: LogFormat = "json"
    log_prompts: bool = False

    def __post_init__(self) -> None:
        findings = tuple(_problems(self))
        if findings:
            raise ConfigError("The frontend settings do not hold together.", findings=findings)

    @property
    def name(self) -> str:
        """The model name clients use."""
        return self.served_model or self.tokenizer.resolve().name

    @classmethod
    def from_json(cls, path: Path) -> FrontendSettings:
        """Read settings from a JSON file; relative paths in it are relative to the file.

        Raises:
            SourceError: The file is missing or is not JSON.
            ConfigError: A key is unknown or has the wrong type; one finding per problem.
        """
        try:
            document = json.loads(path.read_text("utf-8"))
        except OSError as error:
            raise SourceError(f"Cannot read the frontend settings {path}: {error.strerror}.") from error
        except (ValueError, RecursionError) as error:
            raise SourceError(f"The frontend settings {path} are not JSON: {error}.") from error
        if not isinstance(document, dict):
            raise SourceError(f"The frontend settings {path} hold a {type(document).__name__}, expected an object.")
        return cls.from_mapping(document, base=path.parent)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], *, base: Path = Path()) -> FrontendSettings:
        """Make settings from plain JSON values.

        Args:
            values: Field name to value; addresses and names as lists, paths as text.
            base: Folder that relative paths start from.

        Raises:
            ConfigError: A key is unknown or has the wrong type; one finding per problem.
        """
        missing = () if "tokenizer" in values else (_finding("tokenizer", "no tokenizer folder is given"),)
        try:
            typed = cls.convert(values, base=base)
        except ConfigError as error:
            raise ConfigError(error.message, findings=(*error.findings, *missing)) from error
        if missing:
            raise ConfigError("The frontend settings cannot be read.", findings=missing)
        return cls(**typed)

    @classmethod
    def convert(cls, values: Mapping[str, Any], *, base: Path = Path()) -> dict[str, Any]:
        """Turn plain JSON values into fields, without making settings of them.

        Args:
            values: Field name to value; addresses and names as lists, paths as text.
            base: Folder that relative paths start from.

        Raises:
            ConfigError: A key is unknown or has the wrong type; one finding per problem.
        """
        findings: list[Finding] = []
        known = {field.name: str(field.type) for field in dataclasses.fields(cls)}
        typed: dict[str, Any] = {}
        for key, value in values.items():
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"Did you mean {near[0]}?" if near else ""
                findings.append(_finding(key, f"unknown frontend setting {key!r}", hint))
                continue
            try:
                typed[key] = _convert(known[key], value, base)
            except (TypeError, ValueError):
                findings.append(_finding(key, f"{key} is {value!r}, expected {known[key]}"))
        if findings:
            raise ConfigError("The frontend settings cannot be read.", findings=findings)
        return typed


def _convert(kind: str, value: Any, base: Path) -> Any:
    """Turn a JSON value into the type named by a field annotation."""
    if value is None:
        if "None" in kind:
            return None
        raise TypeError(kind)
    kind = kind.replace(" | None", "")
    if kind == "Path" and isinstance(value, str | Path):
        return base / Path(value).expanduser()
    if kind == "tuple[str, ...]" and isinstance(value, list | tuple) and all(isinstance(v, str) for v in value):
        return tuple(value)
    if kind == "Mapping[str, Path]" and isinstance(value, Mapping):
        return {str(name): base / Path(folder).expanduser() for name, folder in value.items()}
    if kind == "Mapping[str, int]" and isinstance(value, Mapping):
        return {str(name): int(number) for name, number in value.items()}
    if kind in ("str", "ToolParserName", "LogFormat") and isinstance(value, str):
        return value
    if kind == "bool" and isinstance(value, bool):
        return value
    if kind == "int" and isinstance(value, int) and not isinstance(value, bool):
        return value
    if kind == "float" and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise TypeError(kind)


def _finding(key: str, message: str, hint: str = "") -> Finding:
    return Finding(rule="frontend-setting", severity="error", path=f"frontend.{key}", message=message, hint=hint)


def _problems(settings: FrontendSettings) -> list[Finding]:
    """Return what is wrong with the values."""
    found: list[Finding] = []
    if not settings.triton:
        found.append(_finding("triton", "no Triton address is given, expected at least one host:port"))
    for address in settings.triton:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            found.append(_finding("triton", f"{address!r} is not host:port"))
    if settings.tool_parser not in get_args(ToolParserName):
        found.append(_finding("tool_parser", f"{settings.tool_parser!r} is not one of {get_args(ToolParserName)}"))
    if settings.log_format not in get_args(LogFormat):
        found.append(_finding("log_format", f"{settings.log_format!r} is not one of {get_args(LogFormat)}"))
    if not 0 <= settings.port < 65536:
        found.append(_finding("port", f"{settings.port} is not a port, expected 0 to 65535"))
    for key in ("max_seq_len", "max_input_len", "vocab_size", "max_body_bytes", "max_stop_chars", "max_choices"):
        value = getattr(settings, key)
        if value is not None and value < 1:
            found.append(_finding(key, f"{value} is too small, expected at least 1"))
    for name in settings.lora_weights:
        if name not in settings.lora:
            found.append(_finding("lora_weights", f"{name!r} has weights but no task id in lora"))
    return found
