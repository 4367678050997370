"""GGUF sources: the Hugging Face model they were made from comes back."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import numpy as np
import pytest
from checkpoint_models import config, gguf_source_tensors, gguf_tensors, save, tiny_gguf
from checkpoint_reading import digests, load_checkpoint, same
from ml_dtypes import bfloat16

from pipeline.checkpoint import ConvertOptions, convert_checkpoint, inspect_source, open_source, write_tokenizer
from pipeline.checkpoint.readers.gguf_header import GgufHeader, GgufTensor
from pipeline.checkpoint.readers.gguf_model import gguf_config
from pipeline.errors import SourceError


@pytest.mark.parametrize(("kind", "dtype"), [("f32", np.float32), ("f16", np.float16)])
def test_plain_gguf_converts_to_the_bytes_of_the_original(tmp_path: Path, kind: str, dtype: type) -> None:
    tensors = gguf_source_tensors()
    # Norms are float32 in GGUF files; the original has them in its own type.
    original = {name: tensor.astype(dtype if tensor.ndim > 1 else np.float32) for name, tensor in tensors.items()}
    stored = {"rms_norm_eps": float(np.float32(1e-5)), "intermediate_size": 64, "tie_word_embeddings": True}
    folder = save(tmp_path / "hf", config(torch_dtype=np.dtype(dtype).name, **stored), original)
    for tp in (1, 2):
        options = ConvertOptions(tp=tp)
        convert_checkpoint(folder, tmp_path / f"a{tp}", options=options)
        convert_checkpoint(tiny_gguf(tmp_path / f"{tp}.gguf", kind=kind), tmp_path / f"b{tp}", options=options)
        assert digests(tmp_path / f"a{tp}") == digests(tmp_path / f"b{tp}")


@pytest.mark.parametrize("kind", ["q8_0", "q4_1"])
def test_quantized_gguf_is_dequantized_and_rounded_once_to_bfloat16(tmp_path: Path, kind: str) -> None:
    from gguf import GGMLQuantizationType, dequantize, quantize

    number = {"q8_0": GGMLQuantizationType.Q8_0, "q4_1": GGMLQuantizationType.Q4_1}[kind]
    convert_checkpoint(
        tiny_gguf(tmp_path / "m.gguf", kind=kind), tmp_path / "out", options=ConvertOptions(dtype="float16")
    )
    (made,) = load_checkpoint(tmp_path / "out")
    down = gguf_tensors()["blk.1.ffn_down.weight"]
    expected = dequantize(quantize(down, number), number).astype(bfloat16).astype(np.float16)
    assert same(made["transformer.layers.1.mlp.proj.weight"], expected)


def test_rows_of_q_and_k_come_back_in_any_row_range(tmp_path: Path) -> None:
    source = open_source(tiny_gguf(tmp_path / "m.gguf"))
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.2.self_attn.k_proj.weight"):
        whole = gguf_source_tensors()[name]
        for start, stop in ((0, len(whole)), (0, 1), (5, 11), (7, 9), (len(whole) - 3, len(whole))):
            assert same(source.read(name, start, stop), whole[start:stop])
        assert same(source.read(name, 3, 9, 2, 20), np.ascontiguousarray(whole[3:9, 2:20]))
    source.close()


def test_folder_with_one_gguf_is_that_file_and_with_two_asks(tmp_path: Path) -> None:
    tiny_gguf(tmp_path / "a.gguf")
    assert inspect_source(tmp_path).kind == "gguf"
    tiny_gguf(tmp_path / "b.gguf")
    with pytest.raises(SourceError, match=r"holds 2 \.gguf files"):
        inspect_source(tmp_path)


@pytest.mark.parametrize("keep", [3, 30, 700, -50], ids=["magic", "counts", "metadata", "data"])
def test_truncated_gguf_is_named_before_any_work(tmp_path: Path, keep: int) -> None:
    path = tiny_gguf(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(SourceError, match=r"m\.gguf.*truncated"):
        inspect_source(path)


def test_gguf_that_is_something_else_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGML" + bytes(100))
    with pytest.raises(SourceError, match="is no GGUF file"):
        inspect_source(path)
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n")
    with pytest.raises(SourceError, match="Git-LFS pointer"):
        inspect_source(path)


def test_gguf_tensor_without_counterpart_is_named(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", extra={"rope_freqs.weight": np.ones(4, np.float32)})
    with pytest.raises(SourceError, match=r"rope_freqs\.weight"):
        inspect_source(path)


def test_gguf_with_values_that_are_not_finite_is_refused(tmp_path: Path) -> None:
    bad = gguf_tensors()["blk.0.ffn_up.weight"].copy()
    bad[1, 1] = np.nan
    path = tiny_gguf(tmp_path / "m.gguf", extra={"blk.0.ffn_up.weight": bad})
    with pytest.raises(SourceError, match=r"m\.gguf: model\.layers\.0\.mlp\.up_proj\.weight.*NaN"):
        convert_checkpoint(path, tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").exists()


def test_gguf_config_has_the_numbers_as_stored(tmp_path: Path) -> None:
    convert_checkpoint(tiny_gguf(tmp_path / "m.gguf"), tmp_path / "out")
    made = json.loads((tmp_path / "out" / "config.json").read_text())
    assert made["norm_epsilon"] == float(np.float32(1e-5))
    assert (made["rotary_base"], made["vocab_size"], made["num_key_value_heads"]) == (10000.0, 61, 2)


def patched(path: Path, key: str, layout: str, value: float) -> Path:
    """Overwrite a number in the metadata of the tiny file; the value follows the key and four bytes of type."""
    content = bytearray(path.read_bytes())
    at = content.index(key.encode()) + len(key) + 4
    struct.pack_into(layout, content, at, value)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("key", "layout", "value", "expected"),
    [
        ("llama.attention.head_count", "<I", 0, "is 0; expected a whole number from 1"),
        ("llama.attention.head_count_kv", "<I", 0, "is 0; expected a whole number from 1"),
        ("llama.block_count", "<I", 2**31, "is 2147483648; expected no more than the 29 tensors"),
        ("llama.attention.layer_norm_rms_epsilon", "<f", -1.0, "is -1.0; expected a number above 0"),
        ("llama.attention.layer_norm_rms_epsilon", "<f", math.nan, "is nan; expected a number above 0"),
        ("llama.rope.freq_base", "<f", 0.0, "is 0.0; expected a number above 0"),
        ("tokenizer.ggml.eos_token_id", "<I", 99, "is 99; expected 0 to 10"),
    ],
)
def test_number_of_a_gguf_that_no_model_has_is_named(
    tmp_path: Path, key: str, layout: str, value: float, expected: str
) -> None:
    path = patched(tiny_gguf(tmp_path / "m.gguf"), key, layout, value)
    with pytest.raises(SourceError) as caught:
        inspect_source(path)
        write_tokenizer(path, tmp_path / "tokenizer")
    assert f"m.gguf: {key} {expected}" in caught.value.message


def test_linear_scaling_of_a_gguf_without_its_factor_is_named(tmp_path: Path) -> None:
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.attention.head_count": 1,
        "llama.embedding_length": 4,
        "llama.feed_forward_length": 4,
        "llama.context_length": 8,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.scaling.type": "linear",
    }
    embedding = GgufTensor("token_embd.weight", (4, 4), 0, 0)
    with pytest.raises(SourceError, match=r"m: metadata lacks llama\.rope\.scaling\.factor"):
        gguf_config(GgufHeader(metadata, {embedding.name: embedding}), "float32", "m")


def test_arrays_in_arrays_without_end_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    array = struct.pack("<IQ", 9, 1)  # one element, an array
    key = struct.pack("<Q", 1) + b"k" + struct.pack("<I", 9)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + array * 100_000)
    with pytest.raises(SourceError, match="arrays nested over 4 deep"):
        inspect_source(path)
