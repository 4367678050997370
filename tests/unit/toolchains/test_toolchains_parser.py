"""The emulated parsers accept and refuse what argparse with the same declarations does upstream."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.toolchains import upstream_parser
from pipeline.toolchains.release import DATA, load_release
from pipeline.toolchains.upstream_parser import load_table, parse_like_upstream, parse_or_exit

BUILD = load_table(DATA / "flags" / "trtllm-build_1_2_1.json")
LLAMA = load_table(DATA / "flags" / "convert_llama_0_20_0.json")
QWEN = load_table(DATA / "flags" / "convert_qwen_0_20_0.json")
GEMMA = load_table(DATA / "flags" / "convert_gemma_0_20_0.json")
QUANTIZE = load_table(DATA / "flags" / "quantize_0_20_0.json")


def test_parser_gives_values_and_defaults_when_accepted() -> None:
    parsed = parse_like_upstream(BUILD, ["--checkpoint_dir", "/c", "--max_batch_size=4", "--strip_plan"])
    assert parsed.accepted
    assert (parsed.values["checkpoint_dir"], parsed.values["max_batch_size"], parsed.values["strip_plan"]) == (
        "/c",
        4,
        True,
    )
    assert (parsed.values["max_input_len"], parsed.values["gemm_plugin"]) == (1024, None)
    # Suppressed: the attribute exists only when the flag is passed.
    assert "kv_cache_type" not in parsed.values


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--max_output_len", "3"], "unrecognized arguments: --max_output_len 3"),
        (["--gemm_plugin", "fp9"], "argument --gemm_plugin: invalid choice: 'fp9'"),
        (["--max_batch_size", "many"], "argument --max_batch_size: invalid int value: 'many'"),
        (["--max_batch_size"], "argument --max_batch_size: expected one argument"),
        (["--lora_target_modules"], "argument --lora_target_modules: expected at least one argument"),
        (["--context_fmha"], "argument --context_fmha: expected one argument"),
        (["--strip_plan=yes"], "argument --strip_plan: ignored explicit argument 'yes'"),
        (["--kv_cache_type", "ring"], "argument --kv_cache_type: invalid KVCacheType value: 'ring'"),
        (["stray"], "unrecognized arguments: stray"),
        (["--max_", "3"], "ambiguous option: --max_ could match"),
    ],
)
def test_parser_refuses_in_the_words_of_argparse(argv: list[str], part: str) -> None:
    parsed = parse_like_upstream(BUILD, argv)
    assert not parsed.accepted
    assert part in parsed.error


def test_parser_takes_lists_aliases_and_abbreviations_like_upstream() -> None:
    argv = ["--lora_target_modules", "attn_q", "attn_v", "--max_decoder_seq_len", "9", "--max_batch", "2"]
    values = parse_like_upstream(BUILD, argv).values
    assert (values["lora_target_modules"], values["max_seq_len"], values["max_batch_size"]) == (
        ["attn_q", "attn_v"],
        9,
        2,
    )


def test_parser_takes_optional_values_and_short_names() -> None:
    values = parse_like_upstream(LLAMA, ["--weight_only_precision", "-sq", "0.5"]).values
    assert (values["weight_only_precision"], values["smoothquant"]) == ("int8", 0.5)
    assert parse_like_upstream(LLAMA, ["--embedding_sharding_dim", "2"]).error.startswith(
        "argument --embedding_sharding_dim"
    )


def test_parser_demands_required_flags() -> None:
    assert "required: --model_dir" in parse_like_upstream(QWEN, ["--tp_size", "2"]).error
    assert parse_like_upstream(GEMMA, ["--model_dir", "m", "--output_dir", "o", "--ckpt-type", "hf"]).accepted
    assert (
        "invalid choice"
        in parse_like_upstream(GEMMA, ["--model_dir", "m", "--output_dir", "o", "--ckpt-type", "x"]).error
    )


def test_quantize_knows_rowwise_fp8_from_0_20_on() -> None:
    argv = ("--qformat", "fp8_pc_pt")
    assert load_release("1.2.1").table("quantize").parse(argv).accepted
    assert "invalid choice" in load_release("0.19.0").table("quantize").parse(argv).error
    assert parse_like_upstream(QUANTIZE, ["--kv_cache_dtype", "none"]).error


def test_module_runs_alone_without_the_package(tmp_path: Path) -> None:
    """A stand-in image copies the module and a table, nothing else."""
    (tmp_path / "upstream_parser.py").write_text(Path(upstream_parser.__file__).read_text())
    (tmp_path / "table.json").write_text((DATA / "flags" / "trtllm-build_1_2_1.json").read_text())
    code = (
        "from pathlib import Path; from upstream_parser import load_table, parse_like_upstream as p;"
        "t = load_table(Path('table.json')); print(p(t, ['--nope']).error, p(t, ['--dry_run']).values['dry_run'])"
    )
    done = subprocess.run([sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, '.'); {code}"],
                          cwd=tmp_path, capture_output=True, text=True, check=True)  # fmt: skip
    assert done.stdout.strip() == "unrecognized arguments: --nope True"


def test_load_table_refuses_other_json(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(ValueError, match="not a flag table"):
        load_table(tmp_path / "x.json")


def test_parse_or_exit_ends_like_the_tool(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_or_exit(BUILD, ["--dry_run"], prog="trtllm-build")["dry_run"] is True
    with pytest.raises(SystemExit) as ended:
        parse_or_exit(BUILD, ["--nope"], prog="trtllm-build")
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith("usage: trtllm-build [--checkpoint_dir CHECKPOINT_DIR]")
    assert printed.endswith("trtllm-build: error: unrecognized arguments: --nope\n")
