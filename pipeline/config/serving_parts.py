"""The parts of a :class:`pipeline.config.spec.Spec` that say how a result is served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeline.config.identity import identity


@dataclass(frozen=True, slots=True)
class Frontend:
    """The OpenAI server.

    Attributes:
        host: Address it listens on.
        port: Port it listens on.
        triton: ``host:port`` of Triton's gRPC endpoints, for the ``frontend`` verb; empty means the Triton that
            ``serve`` starts.
        model: Name of the model in the Triton repository: one that takes token ids, or an ensemble that takes text.
        served_model: Name that clients use; empty takes the emitted one.
        aliases: Further names.
        tokenizer: Folder of the tokenizer, for the ``frontend`` verb; empty means the emitted one.
        chat_template: Jinja file that replaces the tokenizer's template; empty for none.
        tool_parser: ``none``, ``llama3``, ``mistral`` or ``hermes``.
        lora: Client-side model name to the adapter's task id.
        lora_weights: The same names to folders with the adapter's arrays; without one the engine knows it already.
        gathered_logits: The engine was built with gathered logits, from which alternatives and prompts are scored.
        api_keys_file: One key per line; empty for none.
        api_keys_env: Environment variable with comma-separated keys; empty for none.
        protect_metrics: Whether ``/metrics`` needs a key.
        max_input_len: Prompt tokens at most; None for the context.
        max_body_bytes: Largest request body.
        head_timeout_s: How long a request head may take to arrive.
        body_timeout_s: How long a body may take to arrive.
        max_stop_chars: Longest stop string.
        max_choices: Sequences of one request.
        max_in_flight: Sequences at the same time.
        max_queued: Sequences that wait for a place.
        queue_timeout_s: How long one waits.
        health_period_s: Pause between two looks at each Triton.
        probe_period_s: Silence after which a look asks for a token; 0 never asks.
        stall_timeout_s: How long that token may take.
        connect_timeout_s: How long a look may take.
        drain_s: How long open streams go on after SIGTERM.
        log_format: ``json``, ``text`` or ``none``.
        log_prompts: Whether the access log holds prompts.
    """

    host: str = field(metadata=identity())
    port: int = field(metadata=identity())
    triton: tuple[str, ...] = field(metadata=identity())
    model: str = field(metadata=identity("emit"))
    served_model: str = field(metadata=identity("emit"))
    aliases: tuple[str, ...] = field(metadata=identity())
    tokenizer: str = field(metadata=identity())
    chat_template: str = field(metadata=identity())
    tool_parser: str = field(metadata=identity("emit"))
    lora: Mapping[str, int] = field(metadata=identity())
    lora_weights: Mapping[str, str] = field(metadata=identity())
    gathered_logits: bool = field(metadata=identity())
    api_keys_file: str = field(metadata=identity())
    api_keys_env: str = field(metadata=identity())
    protect_metrics: bool = field(metadata=identity())
    max_input_len: int | None = field(metadata=identity())
    max_body_bytes: int = field(metadata=identity())
    head_timeout_s: float = field(metadata=identity())
    body_timeout_s: float = field(metadata=identity())
    max_stop_chars: int = field(metadata=identity())
    max_choices: int = field(metadata=identity())
    max_in_flight: int = field(metadata=identity())
    max_queued: int = field(metadata=identity())
    queue_timeout_s: float = field(metadata=identity())
    health_period_s: float = field(metadata=identity())
    probe_period_s: float = field(metadata=identity())
    stall_timeout_s: float = field(metadata=identity())
    connect_timeout_s: float = field(metadata=identity())
    drain_s: float = field(metadata=identity())
    log_format: str = field(metadata=identity())
    log_prompts: bool = field(metadata=identity())


@dataclass(frozen=True, slots=True)
class Triton:
    """The Triton server that ``serve`` starts, on the local interface.

    Attributes:
        http_port: HTTP endpoint.
        grpc_port: gRPC endpoint, the one the frontend uses.
        metrics_port: Prometheus endpoint.
        start_timeout_s: How long it may take to become ready.
    """

    http_port: int = field(metadata=identity())
    grpc_port: int = field(metadata=identity())
    metrics_port: int = field(metadata=identity())
    start_timeout_s: float = field(metadata=identity())
