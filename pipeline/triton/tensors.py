"""Names, datatypes and shapes of every model in the repository.

``tensorrt_llm``, ``preprocessing``, ``postprocessing`` and ``ensemble`` speak the tensors of the tensorrtllm backend in
its 1.x form (``min_tokens``, ``seed``, ``return_num_input_tokens``). Tensors marked ``own`` are this project's
additions; clients find out from the model's config whether they exist.

Shapes leave out the batch dimension; on the wire every tensor has it in front. -1 is any length.

Source: tensorrtllm_backend v0.19 configs and the 1.x templates in TensorRT-LLM ``triton_backend/all_models``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Datatype = Literal["INT32", "INT64", "UINT8", "UINT64", "FP16", "BF16", "FP32", "BOOL", "STRING"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One input or output of a model.

    Attributes:
        name: As on the wire.
        datatype: As in ``config.pbtxt`` without ``TYPE_``.
        dims: Shape without the batch dimension.
        optional: For inputs: the request may leave it out.
        own: Not known to upstream.
        reshape: The backend is handed a scalar per row.
        ragged: Requests with different lengths may share a batch.
    """

    name: str
    datatype: Datatype
    dims: tuple[int, ...] = (1,)
    optional: bool = True
    own: bool = False
    reshape: bool = False
    ragged: bool = False


def _scalars(datatype: Datatype, names: str) -> tuple[Tensor, ...]:
    return tuple(Tensor(name, datatype) for name in names.split())


def _lists(datatype: Datatype, names: str) -> tuple[Tensor, ...]:
    return tuple(Tensor(name, datatype, (-1,)) for name in names.split())


LLM_INPUTS: tuple[Tensor, ...] = (
    Tensor("input_ids", "INT32", (-1,)),
    Tensor("input_lengths", "INT32", optional=False),
    Tensor("request_output_len", "INT32", optional=False),
    *_scalars("INT32", "end_id pad_id beam_width num_return_sequences min_tokens"),
    *_scalars("FP32", "temperature runtime_top_p runtime_top_p_min runtime_top_p_decay"),
    *_scalars("INT32", "runtime_top_k runtime_top_p_reset_ids"),
    *_scalars("FP32", "len_penalty repetition_penalty presence_penalty frequency_penalty"),
    *_scalars("FP32", "beam_search_diversity_rate draft_acceptance_threshold"),
    *_scalars("UINT64", "seed lora_task_id"),
    *_scalars("BOOL", "early_stopping stop streaming exclude_input_in_output skip_cross_attn_blocks"),
    *_scalars("BOOL", "return_log_probs return_context_logits return_generation_logits return_perf_metrics"),
    *_scalars("BOOL", "return_num_input_tokens return_num_output_tokens"),
    Tensor("stop_words_list", "INT32", (2, -1)),
    Tensor("bad_words_list", "INT32", (2, -1)),
    Tensor("embedding_bias", "FP32", (-1,)),
    Tensor("prompt_embedding_table", "FP16", (-1, -1)),
    Tensor("prompt_vocab_size", "INT32"),
    Tensor("prompt_table_extra_ids", "UINT64", (-1,)),
    Tensor("draft_input_ids", "INT32", (-1,)),
    Tensor("draft_logits", "FP32", (-1, -1)),
    Tensor("lora_weights", "FP16", (-1, -1)),
    Tensor("lora_config", "INT32", (-1, 3)),
    Tensor("decoder_input_ids", "INT32", (-1,)),
    Tensor("decoder_input_lengths", "INT32"),
    Tensor("context_phase_params", "UINT8", (-1,)),
    Tensor("encoder_input_features", "FP16", (-1, -1)),
    Tensor("encoder_output_lengths", "INT32"),
    Tensor("cross_attention_mask", "BOOL", (-1, -1)),
    *_lists("INT32", "retention_token_range_starts retention_token_range_ends retention_token_range_priorities"),
    *_lists("INT32", "retention_token_range_durations_ms"),
    *_scalars("INT32", "retention_decode_priority retention_decode_duration_ms"),
    Tensor("mrope_rotary_cos_sin", "FP32", (-1,)),
    Tensor("mrope_position_deltas", "INT64"),
    *_scalars("STRING", "guided_decoding_guide_type guided_decoding_guide"),
    *_scalars("INT32", "lookahead_window_size lookahead_ngram_size lookahead_verification_set_size"),
)

OWN_LLM_INPUTS: tuple[Tensor, ...] = (
    Tensor("min_p", "FP32", own=True),
    Tensor("return_top_logprobs", "INT32", own=True),
    Tensor("return_prompt_logprobs", "INT32", own=True),
)

LLM_OUTPUTS: tuple[Tensor, ...] = (
    Tensor("output_ids", "INT32", (-1, -1)),
    Tensor("sequence_length", "INT32", (-1,)),
    Tensor("cum_log_probs", "FP32", (-1,)),
    Tensor("output_log_probs", "FP32", (-1, -1)),
    Tensor("context_logits", "FP32", (-1, -1)),
    Tensor("generation_logits", "FP32", (-1, -1, -1)),
    *_scalars("INT32", "batch_index sequence_index"),
    Tensor("context_phase_params", "UINT8", (-1,)),
    *_scalars("INT32", "kv_cache_alloc_new_blocks kv_cache_reused_blocks kv_cache_alloc_total_blocks"),
    *_scalars("INT64", "arrival_time_ns first_scheduled_time_ns first_token_time_ns last_token_time_ns"),
    *_scalars("FP32", "acceptance_rate"),
    *_scalars("INT32", "total_accepted_draft_tokens total_draft_tokens num_input_tokens num_output_tokens"),
)

# finish_reason is in the last response only, prompt_* in the first only; the others describe this response's new
# tokens. preceding_ids and is_last let postprocessing decode a stream exactly without keeping state.
OWN_LLM_OUTPUTS: tuple[Tensor, ...] = (
    Tensor("finish_reason", "STRING", own=True),
    Tensor("top_logprobs_ids", "INT32", (-1, -1), own=True),
    Tensor("top_logprobs", "FP32", (-1, -1), own=True),
    Tensor("prompt_token_logprobs", "FP32", (-1,), own=True),
    Tensor("prompt_top_ids", "INT32", (-1, -1), own=True),
    Tensor("prompt_top_logprobs", "FP32", (-1, -1), own=True),
    Tensor("preceding_ids", "INT32", (-1,), own=True),
    Tensor("is_last", "BOOL", own=True),
)

PREPROCESSING_INPUTS: tuple[Tensor, ...] = (
    Tensor("QUERY", "STRING", optional=False),
    Tensor("REQUEST_OUTPUT_LEN", "INT32", optional=False),
    *_lists("STRING", "BAD_WORDS_DICT STOP_WORDS_DICT EMBEDDING_BIAS_WORDS"),
    *_lists("FP32", "EMBEDDING_BIAS_WEIGHTS"),
    *_scalars("INT32", "END_ID PAD_ID"),
)

PREPROCESSING_OUTPUTS: tuple[Tensor, ...] = (
    Tensor("INPUT_ID", "INT32", (-1,)),
    Tensor("REQUEST_INPUT_LEN", "INT32"),
    Tensor("BAD_WORDS_IDS", "INT32", (2, -1)),
    Tensor("STOP_WORDS_IDS", "INT32", (2, -1)),
    Tensor("REQUEST_OUTPUT_LEN", "INT32", (-1,)),
    Tensor("EMBEDDING_BIAS", "FP32", (-1,)),
    *_scalars("INT32", "OUT_END_ID OUT_PAD_ID"),
)

POSTPROCESSING_INPUTS: tuple[Tensor, ...] = (
    Tensor("TOKENS_BATCH", "INT32", (-1, -1), optional=False),
    Tensor("SEQUENCE_LENGTH", "INT32", (-1,), optional=False),
    Tensor("PRECEDING_IDS", "INT32", (-1,), own=True),
    Tensor("IS_LAST", "BOOL", own=True),
)

POSTPROCESSING_OUTPUTS: tuple[Tensor, ...] = (Tensor("OUTPUT", "STRING", (-1,)),)

# What the ensemble calls the inputs of its steps. Names that are not here are the same in tensorrt_llm.
ENSEMBLE_TO_PREPROCESSING = {
    "text_input": "QUERY",
    "max_tokens": "REQUEST_OUTPUT_LEN",
    "bad_words": "BAD_WORDS_DICT",
    "stop_words": "STOP_WORDS_DICT",
    "embedding_bias_words": "EMBEDDING_BIAS_WORDS",
    "embedding_bias_weights": "EMBEDDING_BIAS_WEIGHTS",
    "end_id": "END_ID",
    "pad_id": "PAD_ID",
}
_SAME_IN_ENSEMBLE = (
    "temperature",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "seed",
    "beam_width",
    "num_return_sequences",
    "exclude_input_in_output",
    "return_log_probs",
    "return_context_logits",
    "return_generation_logits",
    "return_perf_metrics",
    "return_num_input_tokens",
    "return_num_output_tokens",
    "prompt_embedding_table",
    "prompt_vocab_size",
    "lora_task_id",
    "lora_weights",
    "lora_config",
    "guided_decoding_guide_type",
    "guided_decoding_guide",
)
ENSEMBLE_TO_LLM = {
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "length_penalty": "len_penalty",
    "stream": "streaming",
    **{name: name for name in _SAME_IN_ENSEMBLE},
}
ENSEMBLE_PASSED_OUTPUTS = tuple(
    tensor.name
    for tensor in LLM_OUTPUTS
    if tensor.name not in ("output_ids", "sequence_length", "context_phase_params")
)
PREPROCESSING_TO_LLM = {
    "INPUT_ID": "input_ids",
    "REQUEST_INPUT_LEN": "input_lengths",
    "REQUEST_OUTPUT_LEN": "request_output_len",
    "BAD_WORDS_IDS": "bad_words_list",
    "STOP_WORDS_IDS": "stop_words_list",
    "EMBEDDING_BIAS": "embedding_bias",
    "OUT_END_ID": "end_id",
    "OUT_PAD_ID": "pad_id",
}
LLM_TO_POSTPROCESSING = {
    "output_ids": "TOKENS_BATCH",
    "sequence_length": "SEQUENCE_LENGTH",
    "preceding_ids": "PRECEDING_IDS",
    "is_last": "IS_LAST",
}
