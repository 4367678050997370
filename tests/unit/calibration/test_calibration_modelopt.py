"""ModelOpt in an environment of its own: what it is asked, and what of its answer is refused. A stand-in answers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from calibration_models import TINY, quantize

from pipeline.calibration.nvidia_modelopt import modelopt_checkpoint
from pipeline.calibration.texts import CalibrationText
from pipeline.checkpoint import ConvertOptions
from pipeline.errors import ConfigError, SourceError

TEXT = CalibrationText("t.jsonl", "d1", ((1, 2, 3), (4, 5)), 0)
FP8 = ConvertOptions(dtype="bfloat16", quant="fp8", kv_cache="fp8", tp=1)


class Standin:
    """Plays the other interpreter: keeps the request and puts a ready checkpoint in place."""

    def __init__(self, answer: Path, **changes: Any) -> None:
        self.answer, self.changes = answer, changes
        self.request: dict[str, Any] = {}
        self.argv: Sequence[str] = ()

    def __call__(self, argv: Sequence[str], env: Mapping[str, str], on_line: Callable[[str], None]) -> None:
        self.argv = argv
        self.request = json.loads(Path(argv[-1]).read_text())
        assert env["HF_HUB_OFFLINE"] == "1"
        on_line("progress 1 2 sequences")
        out = Path(self.request["out"])
        shutil.copy(self.answer / "rank0.safetensors", out)
        config = json.loads((self.answer / "config.json").read_text())
        (out / "config.json").write_text(json.dumps({**config, "producer": {"name": "modelopt"}, **self.changes}))


def ask(standin: Standin, out: Path, options: ConvertOptions = FP8, **changes: Any) -> dict[str, Any]:
    values = {"alpha": None, "interpreter": "/env/bin/python", "run_program": standin, "text": TEXT, **changes}
    return modelopt_checkpoint(values.pop("model", TINY), out, options=options, **values)


def test_request_carries_everything_and_the_result_is_checked(tmp_path: Path) -> None:
    standin = Standin(quantize(tmp_path / "answer", quant="fp8", kv_cache="fp8"))
    seen: list[tuple[float, float | None, str]] = []
    facts = ask(standin, tmp_path / "out", progress=lambda *step: seen.append(step))
    assert standin.argv[:2] == ["/env/bin/python", "-I"]
    del standin.request["out"]
    assert standin.request == {
        "model": str(TINY),
        "format": "trtllm",
        "family": "llama",
        "quant": "fp8",
        "kv_cache": "fp8",
        "alpha": None,
        "group_size": 128,
        "dtype": "bfloat16",
        "tp": 1,
        "pp": 1,
        "sequences": [[1, 2, 3], [4, 5]],
    }
    assert seen == [(1.0, 2.0, "sequences")]
    assert (facts["by"], facts["producer"], facts["text"]["samples"]) == ("modelopt", {"name": "modelopt"}, 2)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "rank0.safetensors"]


def test_lost_rotary_base_is_refused(tmp_path: Path) -> None:
    standin = Standin(quantize(tmp_path / "answer", quant="fp8"), rotary_base=50000.0)
    with pytest.raises(SourceError, match=r"has rotary_base 50000.0, the source 10000.0"):
        ask(standin, tmp_path / "out")


def test_tensors_that_the_scheme_demands_and_the_export_lacks_are_named(tmp_path: Path) -> None:
    quantization = {"quant_algo": "W8A8_SQ_PER_CHANNEL"}
    standin = Standin(quantize(tmp_path / "answer", quant="fp8"), quantization=quantization)
    with pytest.raises(SourceError, match="the scales of the checkpoint cannot be meant") as caught:
        ask(standin, tmp_path / "out")
    lacking = "transformer.layers.1.attention.qkv.prequant_scaling_factor"
    assert f"rank0.safetensors: {lacking}" in {finding.path for finding in caught.value.findings}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"options": ConvertOptions(quant="int8")}, "quant is 'int8'; expected one of fp8"),
        ({"options": ConvertOptions(quant="fp8", kv_cache="int8")}, "kv_cache is 'int8'; expected fp8"),
        ({"interpreter": ""}, "needs an interpreter that has ModelOpt"),
    ],
    ids=["scheme", "cache", "interpreter"],
)
def test_what_modelopt_cannot_do_is_refused_before_it_starts(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        ask(Standin(tmp_path), tmp_path / "out", **changes)


def test_gguf_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="reads Hugging Face folders only"):
        ask(Standin(tmp_path), tmp_path / "out", model=tmp_path)
