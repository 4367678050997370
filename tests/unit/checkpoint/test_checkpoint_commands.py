"""The verb ``checkpoint``: every option works, reports are complete, differences are found."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_models import config, llama_tensors, save, tiny_llama
from checkpoint_reading import bits, load_checkpoint

from pipeline.checkpoint.commands import CommandReport, add_arguments, main, render
from pipeline.errors import SourceError


def run(*argv: object) -> CommandReport:
    """Parse and run a command line."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return main(parser.parse_args([str(word) for word in argv]))


def test_convert_takes_the_options_and_reports_what_it_wrote(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "m")
    options = ["--dtype", "float16", "--tp", 2, "--pp", 3, "--embedding-sharding", "hidden"]
    options += ["--workers", 2, "--quant", "int4", "--kv-cache", "fp8"]
    report = run("convert", source, tmp_path / "out", *options)
    assert len(load_checkpoint(tmp_path / "out")) == 6
    values = json.loads(json.dumps(report.values))
    assert (values["dtype"], values["tp"], values["pp"], values["family"]) == ("float16", 2, 3, "llama")
    assert (values["out"], values["source_digest"]) == (str(tmp_path / "out"), "")
    assert len(run("convert", source, tmp_path / "hashed", "--source-digest").values["source_digest"]) == 64


def test_options_that_do_not_exist_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("convert", "a", "b", "--quant", "int3")
    assert "smoothquant" in capsys.readouterr().err


def test_verify_reports_findings_and_a_missing_folder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run("convert", tiny_llama(tmp_path / "m"), out, "--tp", 2)
    assert run("verify", out).values["sound"] is True
    (out / "rank1.safetensors").unlink()
    report = run("verify", out)
    assert (report.values["sound"], report.findings[0].rule) == (False, "missing-rank")
    with pytest.raises(SourceError, match="is no folder"):
        run("verify", tmp_path / "nothing")


def test_inspect_describes_sources_and_checkpoints_with_digests(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "m")
    run("convert", source, tmp_path / "out")
    import hashlib

    for path, name in ((source, "model.norm.weight"), (tmp_path / "out", "transformer.ln_f.weight")):
        values = json.loads(json.dumps(run("inspect", path, "--digests").values))
        entry = next(tensor for tensor in values["tensor_list"] if tensor["name"] == name)
        norm = llama_tensors(config())["model.norm.weight"]
        assert entry["sha256"] == hashlib.sha256(bits(norm).tobytes()).hexdigest()
    assert values["ledger"] == "balanced"
    assert values["architecture"] == "LlamaForCausalLM"


def test_diff_finds_changed_values_types_tensors_and_config(tmp_path: Path) -> None:
    tensors = llama_tensors(config())
    run("convert", save(tmp_path / "m", config(), tensors), tmp_path / "a")
    run("convert", tmp_path / "m", tmp_path / "same")
    assert run("diff", tmp_path / "a", tmp_path / "same").values["equal"] is True
    tensors["model.norm.weight"][4] += 2.0
    run("convert", save(tmp_path / "n", config(rms_norm_eps=1e-6), tensors), tmp_path / "b")
    report = run("diff", tmp_path / "a", tmp_path / "b")
    found = {entry["what"]: entry for entry in report.values["differences"]}
    assert set(found) == {"norm_epsilon", "transformer.ln_f.weight"}
    assert found["transformer.ln_f.weight"]["b"].startswith("1 of 32 values differ, by 1.99")
    run("convert", tmp_path / "m", tmp_path / "half", "--dtype", "float16", "--pp", 3)
    kinds = {entry["where"] for entry in run("diff", tmp_path / "a", tmp_path / "half").values["differences"]}
    assert {"rank0.safetensors", "rank2.safetensors", "config.json: mapping"} <= kinds


def test_diff_of_something_else_is_refused(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "m")
    with pytest.raises(SourceError, match="holds no rank"):
        run("diff", source, source)


@pytest.mark.parametrize("command", ["convert", "inspect", "verify", "diff"])
def test_reports_are_shown_as_tables(tmp_path: Path, command: str) -> None:
    from rich.console import Console

    source = tiny_llama(tmp_path / "m")
    run("convert", source, tmp_path / "a")
    arguments: dict[str, list[Any]] = {
        "convert": [source, tmp_path / "b"],
        "inspect": [tmp_path / "a"],
        "verify": [tmp_path / "a"],
        "diff": [tmp_path / "a", tmp_path / "a"],
    }
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(render(run(command, *arguments[command])))
    console.file.close()
    assert command in console.export_text()


def test_large_values_in_progress_are_plain_numbers(tmp_path: Path) -> None:
    seen: list[float] = []
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["convert", str(tiny_llama(tmp_path / "m", np.float32)), str(tmp_path / "out")])
    main(args, progress=lambda done, total, unit: seen.append(done))
    assert seen == sorted(seen)
