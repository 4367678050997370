"""Turn the tensors of one Triton request into requests for the reference engine, or say why not.

Names and meaning are those of the tensorrtllm backend. What this engine cannot do is refused by name, never ignored.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from guided import Guide, GuideError, Guides
from reference.request import Request, Sampling

# Inputs that change the answer and that the reference engine has no means for. Hints for a real engine's memory or
# schedule (retention_*) and beam settings without beams are accepted and have no effect here.
UNSUPPORTED = {
    "prompt_embedding_table": "prompt embeddings",
    "draft_input_ids": "draft tokens",
    "draft_logits": "draft tokens",
    "lora_task_id": "LoRA",
    "lora_weights": "LoRA",
    "lora_config": "LoRA",
    "decoder_input_ids": "encoder-decoder models",
    "encoder_input_features": "encoder features",
    "cross_attention_mask": "cross attention",
    "context_phase_params": "disaggregated serving",
    "mrope_rotary_cos_sin": "multimodal rotary embeddings",
    "lookahead_window_size": "lookahead decoding",
    "lookahead_ngram_size": "lookahead decoding",
    "lookahead_verification_set_size": "lookahead decoding",
}
MAX_SEQUENCES = 128
_UINT64 = 1 << 64


class RequestError(ValueError):
    """The client asked for something impossible; the text goes back to it."""


@dataclass(frozen=True)
class Limits:
    """What the loaded engine allows.

    Attributes:
        vocab_size: Ids are in [0, vocab_size).
        max_seq_len: Prompt plus new tokens.
        exclude_input: Default of ``exclude_input_in_output``.
    """

    vocab_size: int
    max_seq_len: int
    exclude_input: bool


@dataclass(frozen=True)
class Call:
    """One row of a Triton request.

    Attributes:
        template: The engine request; ids and seeds of the sequences are derived from it.
        sequences: Independent samples wanted.
        streaming: Answer with every token instead of once.
        include_input: Start a non-streaming answer with the prompt.
        log_probs: Log probabilities of the chosen tokens are wanted.
        top_logprobs: Alternatives per new token.
        guide: What every sequence has to match.
    """

    template: Request
    sequences: int = 1
    streaming: bool = False
    include_input: bool = False
    log_probs: bool = False
    top_logprobs: int = 0
    prompt_ids: tuple[int, ...] = field(default=())
    guide: Guide | None = None

    def engine_requests(self, prefix: str) -> list[Request]:
        """Return one engine request per sequence; a given seed gives each a seed of its own."""
        requests = []
        for index in range(self.sequences):
            sampling = self.template.sampling
            if index and sampling.seed is not None:
                sampling = replace(sampling, seed=(sampling.seed + index) % _UINT64)
            request = replace(self.template, request_id=f"{prefix}.{index}", sampling=sampling)
            if self.guide is not None:
                request = replace(request, allowed=self.guide.fresh())
            if index:  # every sequence has the same prompt: score it once
                request = replace(request, prompt_logprobs=None, return_context_logits=False)
            requests.append(request)
        return requests


class Row:
    """Reads the inputs of one row of the batch, with defaults and clear errors."""

    def __init__(self, tensors: Mapping[str, np.ndarray], row: int) -> None:
        self._tensors = tensors
        self._row = row

    def values(self, name: str) -> np.ndarray | None:
        """Return the input without its batch dimension; None when absent or empty."""
        tensor = self._tensors.get(name)
        if tensor is None:
            return None
        if self._row >= tensor.shape[0]:
            raise RequestError(f"{name} has {tensor.shape[0]} rows, input_ids has more")
        return tensor[self._row] if tensor[self._row].size else None

    def integer(self, name: str, default: int) -> int:
        values = self.values(name)
        return default if values is None else int(values.reshape(-1)[0])

    def flag(self, name: str, default: bool = False) -> bool:
        values = self.values(name)
        return default if values is None else bool(values.reshape(-1)[0])

    def text(self, name: str) -> str:
        """Return the text, empty when absent."""
        values = self.values(name)
        if values is None:
            return ""
        value = values.reshape(-1)[0]
        try:
            return value.decode("utf-8") if isinstance(value, bytes) else str(value)
        except UnicodeDecodeError:
            raise RequestError(f"{name} is not UTF-8 text") from None

    def number(self, name: str, default: float, low: float, high: float = math.inf) -> float:
        """Return a finite number in [low, high]."""
        values = self.values(name)
        if values is None:
            return default
        value = float(values.reshape(-1)[0])
        if not (math.isfinite(value) and low <= value <= high):
            limits = f"at least {low:g}" if math.isinf(high) else f"from {low:g} to {high:g}"
            raise RequestError(f"{name} is {value:g}, expected a number {limits}")
        return value


def parse_calls(
    tensors: Mapping[str, np.ndarray], limits: Limits, number: int, guides: Guides | None = None
) -> list[Call]:
    """Return one call per row of ``input_ids``.

    Args:
        tensors: Inputs by name, with batch dimension.
        limits: Of the engine.
        number: Of the request in this process, for error texts.
        guides: Makes guides; None where the repository has no guided decoding.

    Raises:
        RequestError: The request cannot be served.
    """
    ids = tensors.get("input_ids")
    if ids is None or ids.size == 0:
        raise RequestError("input_ids is missing or empty; the reference engine needs at least one prompt token")
    rows = [Row(tensors, row) for row in range(ids.shape[0])]
    return [replace(_parse_row(row, len(rows) > 1, limits, number), guide=_guide(row, guides)) for row in rows]


def _guide(row: Row, guides: Guides | None) -> Guide | None:
    kind, text = row.text("guided_decoding_guide_type"), row.text("guided_decoding_guide")
    if not kind:
        if text:
            raise RequestError("guided_decoding_guide needs guided_decoding_guide_type")
        return None
    if guides is None:
        raise RequestError("input guided_decoding_guide_type: guided decoding is not supported by this repository")
    try:
        return guides.compile(kind, text)
    except GuideError as error:
        raise RequestError(str(error)) from error


def _parse_row(row: Row, padded: bool, limits: Limits, number: int) -> Call:
    _refuse_unsupported(row)
    prompt = _prompt(row, padded, limits)
    wanted = row.integer("request_output_len", 0)
    if wanted < 0:
        raise RequestError(f"request_output_len is {wanted}, expected 0 or more")
    longest = limits.max_seq_len - (1 if wanted else 0)
    if len(prompt) > longest:
        raise RequestError(
            f"Executor failed process requestId {number} due to the following error: Encountered an error when "
            f"fetching new request: Prompt length ({len(prompt)}) exceeds maximum input length ({longest})."
        )
    sequences = row.integer("num_return_sequences", 1)
    if not 1 <= sequences <= MAX_SEQUENCES:
        raise RequestError(f"num_return_sequences is {sequences}, expected 1 to {MAX_SEQUENCES}")
    top_logprobs = row.integer("return_top_logprobs", -1)
    prompt_logprobs = row.integer("return_prompt_logprobs", -1)
    log_probs = row.flag("return_log_probs") or top_logprobs >= 0
    end_id = row.integer("end_id", -1)
    template = Request(
        request_id="",
        token_ids=prompt,
        max_tokens=min(wanted, limits.max_seq_len - len(prompt)),
        sampling=_sampling(row, limits),
        end_ids=(end_id,) if end_id >= 0 else (),
        stop_sequences=word_list(row.values("stop_words_list"), "stop_words_list"),
        min_tokens=max(row.integer("min_tokens", 0), 0),
        logprobs=max(top_logprobs, 0) if log_probs else None,
        prompt_logprobs=prompt_logprobs if prompt_logprobs >= 0 else None,
        return_context_logits=row.flag("return_context_logits"),
        return_generation_logits=row.flag("return_generation_logits"),
    )
    streaming = row.flag("streaming")
    return Call(
        template=template,
        sequences=sequences,
        streaming=streaming,
        include_input=not streaming and not row.flag("exclude_input_in_output", limits.exclude_input),
        log_probs=log_probs,
        top_logprobs=max(top_logprobs, 0),
        prompt_ids=prompt,
    )


def word_list(values: np.ndarray | None, name: str) -> tuple[tuple[int, ...], ...]:
    """Split a [2, n] word list: row 0 holds all ids, row 1 the end of each word, padded with -1.

    Raises:
        RequestError: Offsets fall, exceed the ids, or follow padding.
    """
    if values is None:
        return ()
    if values.ndim != 2 or values.shape[0] != 2:
        raise RequestError(f"{name} has shape {list(values.shape)}, expected [2, n]")
    ids, offsets = values.tolist()
    count = next((index for index, offset in enumerate(offsets) if offset < 0), len(offsets))
    if any(offset >= 0 for offset in offsets[count:]):
        raise RequestError(f"{name} has an offset after the padding")
    words, start = [], 0
    for end in offsets[:count]:
        if not start < end <= len(ids):
            raise RequestError(f"{name} has offset {end}, expected {start + 1} to {len(ids)}")
        words.append(tuple(ids[start:end]))
        start = end
    return tuple(words)


def _prompt(row: Row, padded: bool, limits: Limits) -> tuple[int, ...]:
    values = row.values("input_ids")
    length = row.integer("input_lengths", 0)
    if values is None or not 1 <= length <= values.size:
        size = 0 if values is None else values.size
        raise RequestError(f"input_lengths is {length}, expected 1 to {size}")
    prompt = tuple(values.reshape(-1)[: length if padded else None].tolist())
    wrong = next((token for token in prompt if not 0 <= token < limits.vocab_size), None)
    if wrong is not None:
        raise RequestError(f"input_ids holds {wrong}, expected ids from 0 to {limits.vocab_size - 1}")
    return prompt


def _sampling(row: Row, limits: Limits) -> Sampling:
    """Translate sampling inputs. With neither top-k nor top-p (nor min_p) the backend is greedy, and so are we."""
    top_k = row.integer("runtime_top_k", 0)
    if top_k < 0:
        raise RequestError(f"runtime_top_k is {top_k}, expected 0 or more")
    top_p = row.number("runtime_top_p", 0.0, -math.inf, 1.0)
    min_p = row.number("min_p", 0.0, 0.0, 1.0)
    temperature = row.number("temperature", 1.0, 0.0)
    if row.number("runtime_top_p_decay", 1.0, 0.0, 1.0) != 1.0:
        raise RequestError("runtime_top_p_decay is not supported by the reference engine")
    is_greedy = top_k == 1 or (top_k == 0 and top_p <= 0.0 and min_p == 0.0)
    seed = row.values("seed")
    return Sampling(
        temperature=0.0 if is_greedy else temperature,
        top_k=top_k,
        top_p=top_p if top_p > 0.0 else 1.0,
        min_p=min_p,
        repetition_penalty=row.number("repetition_penalty", 1.0, 1e-6),
        presence_penalty=row.number("presence_penalty", 0.0, -math.inf),
        frequency_penalty=row.number("frequency_penalty", 0.0, -math.inf),
        seed=None if seed is None else int(seed.reshape(-1)[0]),
        logit_bias=_logit_bias(row, limits),
    )


def _logit_bias(row: Row, limits: Limits) -> dict[int, float]:
    bias: dict[int, float] = {}
    values = row.values("embedding_bias")
    if values is not None:
        values = values.reshape(-1)
        if values.size != limits.vocab_size:
            raise RequestError(f"embedding_bias has {values.size} values, expected {limits.vocab_size}")
        if np.isnan(values).any():
            raise RequestError("embedding_bias holds NaN")
        bias = {int(token): float(values[token]) for token in np.flatnonzero(values)}
    for word in word_list(row.values("bad_words_list"), "bad_words_list"):
        if len(word) > 1:
            raise RequestError(
                f"bad_words_list holds a word of {len(word)} tokens; the reference engine bans single tokens only"
            )
        if 0 <= word[0] < limits.vocab_size:
            bias[word[0]] = -math.inf
    return bias


def _refuse_unsupported(row: Row) -> None:
    beams = row.integer("beam_width", 1)
    if beams != 1:
        raise RequestError(f"beam_width is {beams}; the reference engine has no beam search, only 1 is supported")
    for name, feature in UNSUPPORTED.items():
        values = row.values(name)
        if values is None or (values.dtype == np.object_ and not any(values.reshape(-1))):
            continue
        raise RequestError(f"input {name}: {feature} is not supported by the reference engine")
