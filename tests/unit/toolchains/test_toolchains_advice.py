"""Failure messages become advice."""

from __future__ import annotations

import pytest

from pipeline.toolchains.advice import advise
from pipeline.toolchains.release import data

ENTRIES = data("advice")["entries"]
KEYS = [(entry["id"], key) for entry in ENTRIES for key in entry["keys"]]


@pytest.mark.parametrize(("entry", "key"), KEYS)
def test_advice_is_found_for_every_key_in_any_case(entry: str, key: str) -> None:
    for text in (key, key.upper()):
        advice = advise(f"some line\n[rank 0] error: {text} (more)\nlast line")
        assert advice is not None and advice.id == entry
        assert text in advice.matched
        assert advice.cause and advice.action


def test_advice_prefers_the_cause_to_the_summary() -> None:
    tail = [
        "[TensorRT] CUDA error: out of memory",
        "Traceback",
        "RuntimeError: Engine building failed, please check error log.",
    ]
    advice = advise(tail)
    assert advice is not None and advice.id == "out-of-memory"
    assert advice.config_key == "limits.max_num_tokens"


def test_advice_is_none_for_output_it_does_not_know() -> None:
    assert advise("all is well") is None
    assert advise([]) is None


@pytest.mark.parametrize(
    ("line", "entry"),
    # Lines as the tools print them.
    [
        ("trtllm-build: error: unrecognized arguments: --max_output_len 3", "unknown-flag"),
        ("convert_checkpoint.py: error: argument --dtype: invalid choice: 'fp16' (choose from ...)", "flag-choice"),
        ("AssertionError: moe_tp_size * moe_ep_size must equal to tp_size, but got 2 * 2 != 8", "moe-sizes"),
        ("ValueError: array split does not result in an equal division", "unequal-split"),
        ("RuntimeError: INT8/INT4 quantization is not supported on SM>=100.", "blackwell-integer"),
        ("RuntimeError: SmoothQuant is not supported on SM>=100.", "blackwell-integer"),
        ("plan file generated on an incompatible device, expecting compute 8.6 got compute 8.0", "compute-capability"),
        ("bash: line 1: trtllm-build: command not found", "builder-missing"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "out-of-memory"),
        ("ValueError: max_workers must be greater than 0", "no-gpu-visible"),
    ],
)  # fmt: skip
def test_advice_recognises_real_lines(line: str, entry: str) -> None:
    advice = advise(line)
    assert advice is not None and advice.id == entry


def test_advice_ids_are_unique_and_keys_are_short() -> None:
    ids = [entry["id"] for entry in ENTRIES]
    assert len(set(ids)) == len(ids)
    assert all(0 < len(key) <= 60 for _, key in KEYS)
