"""Writes a model repository with echo models."""

from __future__ import annotations

from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

SOURCE = Path(__file__).parent / "echo_model.py"

_INPUTS = [
    ("input_ids", "TYPE_INT32", [-1], False),
    ("input_lengths", "TYPE_INT32", [1], False),
    ("request_output_len", "TYPE_INT32", [1], False),
    ("end_id", "TYPE_INT32", [1], True),
    ("pad_id", "TYPE_INT32", [1], True),
    ("stop_words_list", "TYPE_INT32", [2, -1], True),
    ("embedding_bias", "TYPE_FP32", [-1], True),
    ("runtime_top_k", "TYPE_INT32", [1], True),
    ("runtime_top_p", "TYPE_FP32", [1], True),
    ("temperature", "TYPE_FP32", [1], True),
    ("repetition_penalty", "TYPE_FP32", [1], True),
    ("presence_penalty", "TYPE_FP32", [1], True),
    ("frequency_penalty", "TYPE_FP32", [1], True),
    ("return_log_probs", "TYPE_BOOL", [1], True),
    ("exclude_input_in_output", "TYPE_BOOL", [1], True),
    ("streaming", "TYPE_BOOL", [1], True),
]
NEW_NAMES = [("min_tokens", "TYPE_INT32", [1], True), ("seed", "TYPE_UINT64", [1], True)]
OLD_NAMES = [("min_length", "TYPE_INT32", [1], True), ("random_seed", "TYPE_UINT64", [1], True)]
_OUTPUTS = [
    ("output_ids", "TYPE_INT32", [-1, -1]),
    ("sequence_length", "TYPE_INT32", [-1]),
    ("output_log_probs", "TYPE_FP32", [-1, -1]),
]


def write_model(
    repository: Path, name: str, *, old_names: bool = False, says_reason: bool = True, **parameters: str
) -> None:
    """Write one model; ``old_names`` gives it the inputs of releases up to 0.19."""
    config = model_config_pb2.ModelConfig(name=name, backend="python", max_batch_size=8)
    config.model_transaction_policy.decoupled = True
    for tensor, kind, dims, optional in _INPUTS + (OLD_NAMES if old_names else NEW_NAMES):
        config.input.add(name=tensor, data_type=kind, dims=dims, optional=optional)
    for tensor, kind, dims in _OUTPUTS + ([("finish_reason", "TYPE_STRING", [1])] if says_reason else []):
        config.output.add(name=tensor, data_type=kind, dims=dims)
    config.instance_group.add(kind="KIND_CPU", count=1)
    for key, value in parameters.items():
        config.parameters[key].string_value = value
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(text_format.MessageToString(config))
    (folder / "1" / "model.py").write_bytes(SOURCE.read_bytes())
