"""Rules about lengths, batch and tokens per step, and what trtllm-build makes of them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pipeline.config.spec import Spec
from pipeline.errors import Finding

TENSOR_ELEMENTS_MAX = 2**31  # TensorRT's largest volume
TOKENS_WITHOUT_GAIN = 16384  # upstream sees no gain above
TOKENS_PER_BLOCK = 32


def input_length(spec: Spec) -> Iterator[Finding]:
    """A prompt must leave room for an answer."""
    limits = spec.limits
    if limits.max_input_len >= limits.max_seq_len:
        yield Finding(
            "input-length",
            "error",
            "limits.max_input_len",
            f"limits.max_input_len={limits.max_input_len} leaves no room for output in "
            f"limits.max_seq_len={limits.max_seq_len} (input plus output)",
            f"limits.max_input_len={max(1, limits.max_seq_len // 2)}, or a larger limits.max_seq_len",
        )


def context(spec: Spec) -> Iterator[Finding]:
    """Compare with what the model was trained for."""
    shape, seq_len = spec.model.architecture, spec.limits.max_seq_len
    if shape is None:
        return
    if seq_len > shape.context:
        yield Finding(
            "context-exceeded",
            "warning",
            "limits.max_seq_len",
            f"limits.max_seq_len={seq_len} is above the model's context of {shape.context}: answers get worse there",
            f"limits.max_seq_len={shape.context}",
        )
    elif seq_len < shape.context:
        yield Finding(
            "context-shortened",
            "warning",
            "limits.max_seq_len",
            f"limits.max_seq_len={seq_len} is below the model's context of {shape.context}: longer requests fail",
            f"limits.max_seq_len={shape.context} if memory allows",
        )


def tokens_per_step(spec: Spec) -> Iterator[Finding]:
    """Say what upstream changes or what cannot work."""
    limits = spec.limits
    if spec.target.resolved != "engine":
        return
    useful = limits.max_seq_len * limits.max_batch_size
    path, tokens = "limits.max_num_tokens", limits.max_num_tokens
    if tokens > useful:
        message = f"{path}={tokens} is cut to max_seq_len × max_batch_size = {useful} by the builder"
        yield Finding("max-num-tokens-capped", "warning", path, message, f"{path}={useful}")
    if tokens < TOKENS_PER_BLOCK:
        message = f"{path}={tokens} is raised to one cache block of {TOKENS_PER_BLOCK} tokens by the builder"
        yield Finding("max-num-tokens-raised", "warning", path, message, f"{path}={TOKENS_PER_BLOCK}")
    rows = limits.max_batch_size * limits.max_beam_width
    if tokens < rows:
        message = f"{path}={tokens} does not cover one token of each of {rows} sequences (batch × beams)"
        yield Finding("max-num-tokens-batch", "warning", path, message, f"{path}={rows}")
    if limits.max_input_len > tokens:
        message = f"prompts above {path}={tokens} need chunked context, up to max_input_len={limits.max_input_len}"
        yield Finding("chunked-context", "info", path, message, "nothing to do: the emitted repository turns it on")
    if tokens > TOKENS_WITHOUT_GAIN:
        message = f"{path}={tokens}: no gain is expected above {TOKENS_WITHOUT_GAIN}, only memory"
        yield Finding("max-num-tokens-large", "warning", path, message, f"{path}={TOKENS_WITHOUT_GAIN}")
    yield from _tensor_volume(spec)


def beams(spec: Spec) -> Iterator[Finding]:
    """The rehearsal samples; it does not search."""
    if spec.target.resolved == "reference" and spec.limits.max_beam_width > 1:
        message = f"the reference target has no beam search (limits.max_beam_width={spec.limits.max_beam_width})"
        yield Finding("reference-beams", "error", "limits.max_beam_width", message, "limits.max_beam_width=1")


def _tensor_volume(spec: Spec) -> Iterator[Finding]:
    shape, tokens = spec.model.architecture, spec.limits.max_num_tokens
    if shape is None:
        return
    widest = max(shape.hidden_size, 2 * math.ceil(shape.intermediate_size / spec.parallel.tp))
    if tokens * widest >= TENSOR_ELEMENTS_MAX:
        yield Finding(
            "tensor-volume",
            "error",
            "limits.max_num_tokens",
            f"limits.max_num_tokens={tokens} × {widest} (widest tensor of a rank) exceeds TensorRT's 2^31 elements",
            f"limits.max_num_tokens={TENSOR_ELEMENTS_MAX // widest // 256 * 256}",
        )


RULES = (input_length, context, tokens_per_step, beams)
