from __future__ import annotations

import pytest

from pipeline.facts.architecture import Architecture
from pipeline.facts.memory import Device, Layout, Load, budget, layers_per_stage

LLAMA_2_7B = Architecture("LlamaForCausalLM", 32, 4096, 32, 32, 128, 11008, 32000, 4096)
LLAMA_405B = Architecture("LlamaForCausalLM", 126, 16384, 128, 8, 128, 53248, 128256, 131072)
GIB = 2**30
LOAD = Load(max_batch_size=8, max_seq_len=4096, max_num_tokens=8192)
H100 = Device(80 * GIB)


def test_weights_at_16_bits_are_two_bytes_per_parameter() -> None:
    (rank,) = budget(LLAMA_2_7B, Layout(2, 2, 2), LOAD, H100).per_gpu
    assert rank.weights_bytes == 2 * LLAMA_2_7B.parameters


def test_tied_head_is_stored_a_second_time() -> None:
    tied = Architecture("LlamaForCausalLM", 30, 576, 9, 3, 64, 1536, 49152, 8192, tie_word_embeddings=True)
    (rank,) = budget(tied, Layout(2, 2, 2), LOAD, H100).per_gpu
    assert rank.weights_bytes == 2 * (tied.parameters + 49152 * 576)


def test_quantization_leaves_embedding_and_head_at_16_bits() -> None:
    (rank,) = budget(LLAMA_2_7B, Layout(1, 2, 2), LOAD, H100).per_gpu
    tables = 2 * 32000 * 4096
    norms = (2 * 32 + 1) * 4096
    assert rank.weights_bytes == (LLAMA_2_7B.parameters - tables - norms) + 2 * (tables + norms)


@pytest.mark.parametrize(
    ("tp", "kv_bytes", "expected"),
    # 2 * layers * ceil(kv heads / tp) * head size * bytes.
    [(1, 2, 2 * 126 * 8 * 128 * 2), (8, 1, 2 * 126 * 1 * 128), (16, 2, 2 * 126 * 1 * 128 * 2)],
)
def test_cache_per_token_follows_heads_of_a_rank(tp: int, kv_bytes: int, expected: int) -> None:
    ranks = budget(LLAMA_405B, Layout(1, 2, kv_bytes, tp=tp), LOAD, H100).per_gpu
    assert len(ranks) == tp
    assert {rank.kv_bytes_per_token for rank in ranks} == {expected}


def test_explicit_head_size_counts() -> None:
    wide = Architecture("LlamaForCausalLM", 4, 64, 4, 2, 32, 128, 101, 512)
    (rank,) = budget(wide, Layout(2, 2, 2), LOAD, H100).per_gpu
    assert rank.kv_bytes_per_token == 2 * 4 * 2 * 32 * 2


def test_total_holds_one_full_sequence() -> None:
    (rank,) = budget(LLAMA_2_7B, Layout(2, 2, 2), LOAD, H100).per_gpu
    fixed = rank.weights_bytes + rank.activations_bytes + rank.logits_bytes + rank.runtime_bytes
    assert rank.total_bytes == fixed + 4096 * rank.kv_bytes_per_token
    assert rank.activations_bytes == round(8192 * (4 * 4096 + 3 * 11008) * 2 * 1.3)
    assert rank.logits_bytes == 8 * 32000 * 4
    assert rank.max_concurrent_sequences == int((80 * GIB - fixed) * 0.9) // (4096 * rank.kv_bytes_per_token)


def test_405b_fits_8_gpus_at_fp8_and_not_at_16_bits() -> None:
    load = Load(8, 8192, 8192)
    assert budget(LLAMA_405B, Layout(1, 2, 2, tp=8), load, H100).fits
    assert not budget(LLAMA_405B, Layout(2, 2, 2, tp=8), load, H100).fits


def test_pipeline_stages_share_layers_and_ends_hold_the_tables() -> None:
    ranks = budget(LLAMA_405B, Layout(1, 2, 2, tp=4, pp=2), LOAD, H100).per_gpu
    assert [rank.rank for rank in ranks] == list(range(8))
    first, last = ranks[0], ranks[7]
    # The embedding is whole on every rank of the first stage, the head split over the last.
    assert first.weights_bytes - last.weights_bytes == 2 * (128256 * 16384 - 128256 // 4 * 16384 - 16384)
    assert first.logits_bytes == 0 < last.logits_bytes


@pytest.mark.parametrize(
    ("layers", "pp", "expected"), [(126, 4, [32, 32, 31, 31]), (32, 2, [16, 16]), (3, 3, [1, 1, 1])]
)
def test_left_over_layers_go_to_the_first_stages(layers: int, pp: int, expected: list[int]) -> None:
    assert layers_per_stage(layers, pp) == expected


def test_nothing_fits_where_there_is_no_room() -> None:
    small = budget(LLAMA_2_7B, Layout(2, 2, 2), LOAD, Device(8 * GIB))
    assert not small.fits
    assert small.max_concurrent_sequences == 0
