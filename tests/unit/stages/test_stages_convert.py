"""The convert stage with quantized precisions: calibrated on the text the job names, going on after a kill."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest

from pipeline.config.compose import compose
from pipeline.config.spec import Spec
from pipeline.errors import SourceError
from pipeline.stages.base import StageContext
from pipeline.stages.convert import ConvertStage

TINY = Path(__file__).parents[2] / "data" / "models" / "tiny-llama"


def job(*arguments: str) -> Spec:
    given = ["target=reference", "hardware=cpu", "model=hf", "source=local", f"model.path={TINY}", "calibration=short"]
    return compose((*given, *arguments))


def context(spec: Spec, folder: Path) -> StageContext:
    fetched = folder / "fetched"
    if not fetched.exists():
        shutil.copytree(TINY, fetched / "model")
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    return StageContext(
        spec=spec,
        inputs={"fetch": fetched},
        records={},
        out=out,
        scratch=folder / "scratch",
        log=logging.getLogger("test"),
        log_path=folder / "log",
        progress=lambda done, total, unit: None,
    )


@pytest.mark.parametrize("precision", ["fp8", "smoothquant", "int8", "int4_awq", "int8_sq", "w4a8_awq", "nvfp4"])
def test_precision_becomes_the_algorithm_it_stands_for(precision: str, tmp_path: Path) -> None:
    spec = job(f"precision={precision}")
    running = context(spec, tmp_path)
    ConvertStage().run(running)
    ConvertStage().check(running.out)
    config = json.loads((running.out / "checkpoint" / "config.json").read_text())
    assert config["quantization"]["quant_algo"] == spec.precision.quant_algo
    assert ("calibration" in running.facts) == (precision != "int8")


def test_calibration_facts_name_text_samples_and_no_padding(tmp_path: Path) -> None:
    text = tmp_path / "whatever.jsonl"
    text.write_text("".join(json.dumps({"body": f"text number {i} of some words"}) + "\n" for i in range(5)))
    running = context(job("precision=fp8", f"calibration.path={text}", "calibration.column=body"), tmp_path)
    ConvertStage().run(running)
    facts = running.facts["calibration"]["text"]
    assert (facts["text"], facts["samples"], len(facts["digest"])) == ("whatever.jsonl", 5, 64)
    assert facts["padding"].startswith("none")


def test_missing_field_names_the_fields_there_are(tmp_path: Path) -> None:
    text = tmp_path / "t.jsonl"
    text.write_text('{"body": "words", "title": "more"}\n')
    with pytest.raises(SourceError, match="no field 'text'; available fields: body, title"):
        ConvertStage().run(context(job("precision=fp8", f"calibration.path={text}"), tmp_path))


def test_other_text_is_another_result_and_another_path_is_not(tmp_path: Path) -> None:
    def identity(path: Path) -> object:
        return ConvertStage().identity(job("precision=fp8", f"calibration.path={path}"))

    for name, content in (("a.txt", "one"), ("b.txt", "one"), ("c.txt", "two")):
        (tmp_path / name).write_text(content)
    assert identity(tmp_path / "a.txt") == identity(tmp_path / "b.txt") != identity(tmp_path / "c.txt")


def test_second_try_takes_up_what_the_first_left(tmp_path: Path) -> None:
    spec = job("precision=fp8")
    ConvertStage().run(context(spec, tmp_path))
    measured = tmp_path / "scratch" / "measured.safetensors"
    stamp = measured.stat().st_mtime_ns
    first = (tmp_path / "out" / "checkpoint" / "rank0.safetensors").read_bytes()
    ConvertStage().run(context(spec, tmp_path))
    assert measured.stat().st_mtime_ns == stamp
    assert (tmp_path / "out" / "checkpoint" / "rank0.safetensors").read_bytes() == first
