"""How much memory a served model takes, per rank, from its shape alone.

Shape letters: L layers of the rank, H heads, K key/value heads, d head size, h hidden size, I MLP width, E experts,
V vocabulary. Everything in bytes unless the name says otherwise.

Source: sizing rules of NVIDIA's TensorRT-LLM documentation (KV cache, activations linear in ``max_num_tokens``, free
fraction 0.9 for the cache); the factors of the activation guess and the fixed run-time costs are estimates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipeline.facts.architecture import Architecture

MIB = 1024 * 1024
GIB = 1024 * MIB

KV_FREE_FRACTION = 0.9  # run-time default: share of the free memory given to the cache
ACTIVATION_SLACK = 1.3
CUDA_CONTEXT = GIB // 2
NCCL_BUFFERS = 3 * GIB // 4
HOST_RUNTIME = 300 * MIB  # Python, Triton and the stub process on a CPU


@dataclass(frozen=True, slots=True)
class Layout:
    """How the model is stored and split.

    Attributes:
        weight_bytes: Per weight of the layers' matrices; 0.53 for 4 bits with scales.
        dtype_bytes: Per weight of embedding, head and norms, and per activation.
        kv_bytes: Per cached value.
        tp: Tensor parallel size.
        pp: Pipeline parallel size.
        cp: Context parallel size.
        is_embedding_split: The embedding is split over tp instead of copied.
    """

    weight_bytes: float
    dtype_bytes: int
    kv_bytes: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    is_embedding_split: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """What has to be served.

    Attributes:
        max_batch_size: Sequences in flight.
        max_seq_len: Tokens per sequence.
        max_num_tokens: Tokens per step.
        max_beam_width: Beams per sequence.
    """

    max_batch_size: int
    max_seq_len: int
    max_num_tokens: int
    max_beam_width: int = 1


@dataclass(frozen=True, slots=True)
class Device:
    """The memory of one rank.

    Attributes:
        capacity_bytes: All of it.
        is_gpu: Counts CUDA and NCCL, else the host's run time.
        tokens_per_block: Block size of the paged cache: 32 since release 0.19, 64 before.
    """

    capacity_bytes: int
    is_gpu: bool = True
    tokens_per_block: int = 32


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The budget of one rank.

    Attributes:
        rank: ``(pp_rank * cp + cp_rank) * tp + tp_rank``.
        kv_bytes_per_token: ``2 * L * ceil(K / tp) * d * bytes``.
        total_bytes: Weights, activations, logits, run time and the cache of one sequence of full length.
        max_concurrent_sequences: Sequences of full length that the cache holds.
    """

    rank: int
    weights_bytes: int
    kv_bytes_per_token: int
    activations_bytes: int
    logits_bytes: int
    runtime_bytes: int
    total_bytes: int
    capacity_bytes: int
    max_concurrent_sequences: int


@dataclass(frozen=True, slots=True)
class Budget:
    """The budget of all ranks."""

    per_gpu: tuple[RankMemory, ...]

    @property
    def fits(self) -> bool:
        """Every rank holds the model and one sequence of full length."""
        return all(rank.total_bytes <= rank.capacity_bytes and rank.max_concurrent_sequences for rank in self.per_gpu)

    @property
    def max_concurrent_sequences(self) -> int:
        """Sequences of full length that can be in flight: the tightest rank decides."""
        return min(rank.max_concurrent_sequences for rank in self.per_gpu)


def parameter_count(shape: Architecture) -> int:
    """Return :attr:`Architecture.parameters`."""
    return shape.parameters


def layers_per_stage(num_layers: int, pp: int) -> list[int]:
    """Split layers over pipeline stages; a remainder goes to the first stages, one layer each."""
    share, rest = divmod(num_layers, pp)
    return [share + (stage < rest) for stage in range(pp)]


def budget(shape: Architecture, layout: Layout, load: Load, device: Device) -> Budget:
    """Return the memory budget of every rank."""
    ranks = []
    for pp_rank, layers in enumerate(layers_per_stage(shape.num_layers, layout.pp)):
        first, last = pp_rank == 0, pp_rank == layout.pp - 1
        for inner in range(layout.tp * layout.cp):
            rank = pp_rank * layout.tp * layout.cp + inner
            ranks.append(_rank(rank, shape, layers, (first, last), layout, load, device))
    return Budget(tuple(ranks))


def _rank(
    rank: int,
    shape: Architecture,
    layers: int,
    ends: tuple[bool, bool],
    layout: Layout,
    load: Load,
    device: Device,
) -> RankMemory:
    weights = _weights(shape, layers, ends, layout)
    kv_heads = math.ceil(shape.num_kv_heads / layout.tp)
    kv_per_token = 2 * layers * kv_heads * shape.head_size * layout.kv_bytes
    tokens = min(load.max_num_tokens, load.max_batch_size * load.max_seq_len)
    mlp = 3 * math.ceil(shape.intermediate_size / layout.tp)
    activations = round(tokens * (4 * shape.hidden_size + mlp) * layout.dtype_bytes * ACTIVATION_SLACK)
    rows = load.max_batch_size * load.max_beam_width
    vocab = math.ceil(shape.vocab_size / layout.tp) * layout.tp
    logits = rows * vocab * 4 if ends[1] else 0
    runtime = CUDA_CONTEXT if device.is_gpu else HOST_RUNTIME
    runtime += NCCL_BUFFERS if layout.tp * layout.pp * layout.cp > 1 else 0
    runtime += rows * load.max_seq_len * 8  # decoder: token ids and parents of beams, int32 each
    fixed = weights + activations + logits + runtime
    block = kv_per_token * device.tokens_per_block
    blocks = max(0, int((device.capacity_bytes - fixed) * KV_FREE_FRACTION)) // block
    per_sequence = math.ceil(load.max_seq_len / device.tokens_per_block) * load.max_beam_width
    return RankMemory(
        rank=rank,
        weights_bytes=weights,
        kv_bytes_per_token=kv_per_token,
        activations_bytes=activations,
        logits_bytes=logits,
        runtime_bytes=runtime,
        total_bytes=fixed + per_sequence * block,
        capacity_bytes=device.capacity_bytes,
        max_concurrent_sequences=blocks // per_sequence,
    )


def _weights(shape: Architecture, layers: int, ends: tuple[bool, bool], layout: Layout) -> int:
    matrices = layers * (_attention(shape, layout.tp) + _mlp(shape, layout.tp))
    rest = layers * (2 * shape.hidden_size + _router(shape))
    vocab = math.ceil(shape.vocab_size / layout.tp)
    if ends[0]:
        rest += shape.hidden_size * (vocab if layout.is_embedding_split else shape.vocab_size)
    if ends[1]:
        # A tied head is stored once more: the checkpoint always holds it.
        rest += shape.hidden_size * (vocab + 1)
    return round(matrices * layout.weight_bytes) + rest * layout.dtype_bytes


def _attention(shape: Architecture, tp: int) -> int:
    heads = math.ceil(shape.num_heads / tp) * shape.head_size
    kv = math.ceil(shape.num_kv_heads / tp) * shape.head_size
    return shape.hidden_size * (2 * heads + 2 * kv)


def _mlp(shape: Architecture, tp: int) -> int:
    matrices = (3 if shape.gated_mlp else 2) * max(1, shape.num_experts)
    return matrices * shape.hidden_size * math.ceil(shape.intermediate_size / tp)


def _router(shape: Architecture) -> int:
    return shape.hidden_size * shape.num_experts
