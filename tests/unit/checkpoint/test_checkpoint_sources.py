"""Damaged, mixed-up and unsupported sources: refused by file and tensor, with nothing left that looks complete."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from checkpoint_models import config, llama_tensors, save, tiny_llama
from checkpoint_reading import digests, load_checkpoint, same
from ml_dtypes import bfloat16

from pipeline.checkpoint import ConvertOptions, convert_checkpoint, inspect_source
from pipeline.errors import SourceError, StoreError


def refused(source: Path, out: Path, dtype: str = "auto") -> SourceError:
    """Convert, expect a refusal, and check that nothing looks complete."""
    with pytest.raises(SourceError) as caught:
        convert_checkpoint(source, out, options=ConvertOptions(dtype=dtype))
    assert not (out / "config.json").exists()
    assert not list(out.glob("rank*")) if out.exists() else True
    return caught.value


def test_inspection_names_the_file_when_a_shard_is_a_pointer(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "m", shards=3)
    pointer = source / "model-00002-of-00003.safetensors"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123\n")
    with pytest.raises(SourceError, match=r"model-00002-of-00003\.safetensors: is a Git-LFS pointer") as caught:
        inspect_source(source)
    assert "git lfs pull" in caught.value.hint


@pytest.mark.parametrize("cut", [100, 10**6], ids=["data", "header"])
def test_inspection_names_the_file_when_a_shard_is_cut(tmp_path: Path, cut: int) -> None:
    source = tiny_llama(tmp_path / "m", shards=3)
    shard = source / "model-00003-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[: max(60, shard.stat().st_size - cut)])
    with pytest.raises(SourceError, match=r"model-00003-of-00003\.safetensors.*truncated"):
        inspect_source(source)


@pytest.mark.parametrize(
    "content", [b"", b"<!DOCTYPE html><html>", b"PK\x03\x04" + bytes(100)], ids=["empty", "html", "zip"]
)
def test_inspection_refuses_what_is_no_safetensors(tmp_path: Path, content: bytes) -> None:
    source = tiny_llama(tmp_path / "m")
    (source / "model.safetensors").write_bytes(content)
    with pytest.raises(SourceError, match=r"model\.safetensors"):
        inspect_source(source)


def test_inspection_names_a_shard_that_is_missing(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "m", shards=2)
    (source / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(SourceError, match=r"model-00001-of-00002\.safetensors: is missing"):
        inspect_source(source)


def test_inspection_names_a_tensor_that_a_shard_lacks(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "m", shards=2)
    index = source / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.layers.9.extra.weight"] = "model-00002-of-00002.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(SourceError, match=r"model-00002.*lacks model\.layers\.9\.extra\.weight"):
        inspect_source(source)


def test_index_refuses_a_path_outside_the_folder(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "m", shards=2)
    index = source / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))
    with pytest.raises(SourceError, match="expected a file name in the same folder"):
        inspect_source(source)


def test_ledger_names_missing_and_unused_tensors(tmp_path: Path) -> None:
    tensors = llama_tensors(config())
    tensors["model.layers.1.self_attn.extra.weight"] = tensors.pop("model.layers.1.self_attn.k_proj.weight")
    source = save(tmp_path / "m", config(), tensors)
    error = refused(source, tmp_path / "out")
    assert "missing tensors: model.layers.1.self_attn.k_proj.weight" in error.message
    assert "nothing takes: model.layers.1.self_attn.extra.weight" in error.message
    assert {finding.rule for finding in error.findings} == {"missing-source-tensor", "unused-source-tensor"}


def test_biases_that_the_config_does_not_mention_are_an_error(tmp_path: Path) -> None:
    tensors = llama_tensors(config(attention_bias=True, mlp_bias=True))
    source = save(tmp_path / "m", config(), tensors)
    assert "self_attn.q_proj.bias" in refused(source, tmp_path / "out").message


def test_rotary_tables_of_old_checkpoints_are_ignored_and_reported(tmp_path: Path) -> None:
    tensors = llama_tensors(config())
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    report = convert_checkpoint(save(tmp_path / "m", config(), tensors), tmp_path / "out")
    assert list(report.ignored_tensors) == ["model.layers.0.self_attn.rotary_emb.inv_freq"]


def test_shape_that_does_not_fit_the_config_names_target_and_source(tmp_path: Path) -> None:
    tensors = llama_tensors(config())
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:-1]
    error = refused(save(tmp_path / "m", config(), tensors), tmp_path / "out")
    assert "transformer.vocab_embedding.weight is bfloat16 [60, 32]; expected bfloat16 [61, 32]" in error.message
    assert "model.embed_tokens.weight" in error.message


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [bfloat16, np.float16, np.float32], ids=["bf16", "fp16", "fp32"])
def test_values_that_are_not_finite_are_refused(tmp_path: Path, value: float, dtype: object) -> None:
    tensors = llama_tensors(config(), dtype)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    error = refused(save(tmp_path / "m", config(), tensors), tmp_path / "out", "bfloat16")
    assert "model.safetensors: model.layers.1.mlp.up_proj.weight" in error.message
    assert "NaN or infinite" in error.message


def test_value_beyond_float16_is_refused_there_and_kept_in_bfloat16(tmp_path: Path) -> None:
    tensors = llama_tensors(config())
    tensors["model.layers.2.mlp.down_proj.weight"][0, 0] = 1e5
    source = save(tmp_path / "m", config(), tensors)
    error = refused(source, tmp_path / "half", "float16")
    assert "model.layers.2.mlp.down_proj.weight" in error.message
    assert "does not fit float16" in error.message
    convert_checkpoint(source, tmp_path / "bf16")
    assert float(load_checkpoint(tmp_path / "bf16")[0]["transformer.layers.2.mlp.proj.weight"][0, 0]) == 99840.0


@pytest.mark.parametrize(("value", "fits"), [(65519.0, True), (65520.0, False)])
def test_float16_limit_is_where_rounding_gives_infinity(tmp_path: Path, value: float, fits: bool) -> None:
    tensors = llama_tensors(config(), np.float32)
    tensors["model.norm.weight"][0] = value
    source = save(tmp_path / "m", config(), tensors)
    if fits:
        convert_checkpoint(source, tmp_path / "out", options=ConvertOptions(dtype="float16"))
        assert load_checkpoint(tmp_path / "out")[0]["transformer.ln_f.weight"][0] == np.float16(65504)
    else:
        assert "model.norm.weight" in refused(source, tmp_path / "out", "float16").message


def test_weights_of_a_quantized_type_are_refused(tmp_path: Path) -> None:
    tensors = llama_tensors(config())
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = np.ones(tensors[name].shape, np.int8)
    assert f"{name} is int8" in refused(save(tmp_path / "m", config(), tensors), tmp_path / "out").message


def test_mixed_source_types_become_one_target_type(tmp_path: Path) -> None:
    chosen = config(attention_bias=True)
    tensors = llama_tensors(chosen)
    for name in [name for name in tensors if name.endswith(".bias")]:
        tensors[name] = tensors[name].astype(np.float32)
    convert_checkpoint(save(tmp_path / "m", chosen, tensors), tmp_path / "out", options=ConvertOptions(dtype="float16"))
    assert {tensor.dtype.name for tensor in load_checkpoint(tmp_path / "out")[0].values()} == {"float16"}


def test_float32_source_with_dtype_auto_becomes_float16(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "m", np.float32, torch_dtype="float32")
    report = convert_checkpoint(source, tmp_path / "out")
    assert "float16" in report.warnings[0]
    made = load_checkpoint(tmp_path / "out")[0]["lm_head.weight"]
    assert same(made, llama_tensors(config(), np.float32)["lm_head.weight"].astype(np.float16))


def test_vendor_leftovers_beside_the_index_are_ignored_and_reported(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "m", shards=2)
    plain = convert_checkpoint(tiny_llama(tmp_path / "plain"), tmp_path / "expected")
    shutil.copy(source / "model-00001-of-00002.safetensors", source / "consolidated.safetensors")
    (source / "pytorch_model.bin").write_bytes(b"never read")
    report = convert_checkpoint(source, tmp_path / "out")
    assert set(report.ignored_files) == {"consolidated.safetensors", "pytorch_model.bin"}
    assert digests(tmp_path / "out") == digests(tmp_path / "expected")
    assert plain.ignored_files == {}


def test_folder_without_weights_says_what_is_there(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "m")
    (source / "model.safetensors").rename(source / "weights.onnx")
    with pytest.raises(SourceError, match="no recognised weights") as caught:
        inspect_source(source)
    assert "weights.onnx" in caught.value.hint


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCasualLM"]}, "LlamaForCasualLM cannot be converted"),
        ({"architectures": None}, "architectures is None"),
        ({"hidden_size": "32"}, "hidden_size is '32'"),
        ({"num_key_value_heads": 3}, "4 attention heads over 3 key/value heads"),
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, "rope scaling type is 'su'"),
        ({"rope_scaling": 4}, "rope_scaling is 4"),
        ({"torch_dtype": "int8"}, "dtype is 'int8'"),
        ({"head_dim": 0}, ": head_dim is 0"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05; expected a number above 0"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"rope_theta": 10**400}, "rope_theta is 1000"),
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_parameters: rope_theta is 'x'"),
        ({"rope_parameters": {"full_attention": 3}}, "rope_parameters.full_attention is 3"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling of type 'linear' lacks factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "rope_scaling: factor is 0"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}},
            "lacks low_freq_factor, original_max_position_embeddings",
        ),
        ({"num_hidden_layers": 10**7}, "states 10000000 layers"),
    ],
)
def test_config_that_cannot_be_used_is_named(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    source = save(tmp_path / "m", config(**changes), llama_tensors(config()))
    assert message in refused(source, tmp_path / "out").message


@pytest.mark.parametrize("stated", [{"quant_method": "gptq", "bits": 4}, "x"])
def test_quantization_that_the_weights_do_not_have_is_a_warning(tmp_path: Path, stated: object) -> None:
    source = tiny_llama(tmp_path / "m", quantization_config=stated)
    assert any("states a quantization_config" in warning for warning in inspect_source(source).warnings)
    assert not any("quantization_config" in w for w in inspect_source(tiny_llama(tmp_path / "plain")).warnings)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_json_nested_without_end_is_named(tmp_path: Path, name: str) -> None:
    source = tiny_llama(tmp_path / "m", shards=2)
    (source / name).write_text("[" * 100_000)
    with pytest.raises(SourceError, match=name.replace(".", r"\.")):
        inspect_source(source)


def test_config_with_a_byte_order_mark_gets_advice(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "m")
    (source / "config.json").write_text((source / "config.json").read_text(), encoding="utf-8-sig")
    with pytest.raises(SourceError) as caught:
        inspect_source(source)
    assert "without a byte order mark" in caught.value.hint


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("[" * 100_000, "its header cannot be read"),
        (json.dumps({"a": {}})[:-1] + ', "a": {}}', "a is there twice"),
    ],
    ids=["nested", "repeated"],
)
def test_safetensors_header_that_cannot_be_trusted_is_named(tmp_path: Path, header: str, message: str) -> None:
    source = tiny_llama(tmp_path / "m")
    (source / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode())
    with pytest.raises(SourceError, match=message):
        inspect_source(source)


def test_safetensors_of_three_bytes_is_said_to_have_three(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "m")
    (source / "model.safetensors").write_bytes(b"abc")
    with pytest.raises(SourceError, match="3 bytes; its header alone takes 8"):
        inspect_source(source)


def test_missing_config_and_missing_folder_are_named(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "m")
    (source / "config.json").unlink()
    with pytest.raises(SourceError, match=r"config\.json: does not exist"):
        inspect_source(source)
    with pytest.raises(SourceError, match="nothing: does not exist"):
        inspect_source(tmp_path / "nothing")


def test_tied_model_without_head_stores_one(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "m", tie_word_embeddings=True)
    convert_checkpoint(source, tmp_path / "out")
    made = load_checkpoint(tmp_path / "out")[0]
    assert same(made["lm_head.weight"], made["transformer.vocab_embedding.weight"])


def test_tied_model_with_an_equal_head_reports_it_and_with_another_refuses(tmp_path: Path) -> None:
    tensors = llama_tensors(config())
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tied = config(tie_word_embeddings=True)
    report = convert_checkpoint(save(tmp_path / "m", tied, tensors), tmp_path / "out")
    assert list(report.ignored_tensors) == ["lm_head.weight"]
    tensors["lm_head.weight"] = tensors["lm_head.weight"][::-1].copy()
    assert "lm_head.weight differs" in refused(save(tmp_path / "n", tied, tensors), tmp_path / "other").message


def test_output_folder_with_a_config_is_not_touched(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "m")
    before = digests(source)
    with pytest.raises(StoreError, match=r"already holds a config\.json"):
        convert_checkpoint(source, source)
    assert digests(source) == before


def test_remains_of_an_aborted_run_are_replaced(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "m")
    convert_checkpoint(source, tmp_path / "clean")
    out = tmp_path / "out"
    out.mkdir()
    (out / "rank7.safetensors").write_bytes(b"old")
    (out / "rank0.safetensors.partial").write_bytes(b"half")
    convert_checkpoint(source, out)
    assert digests(out) == digests(tmp_path / "clean")
