"""Quantization by NVIDIA's ModelOpt in an environment of its own; the result is checked like any other."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.calibration.ranges import Progress
from pipeline.calibration.sanity import check_scales
from pipeline.calibration.texts import CalibrationText
from pipeline.checkpoint.hfconfig import load_config, read_architecture
from pipeline.checkpoint.options import ConvertOptions
from pipeline.errors import ConfigError, SourceError

# (argv, environment, called with every line of output); raises when the program fails.
RunProgram = Callable[[Sequence[str], Mapping[str, str], Callable[[str], None]], object]
QUANTIZATIONS = ("fp8", "fp8_rowwise", "int8_sq", "int4_awq", "w4a8_awq", "nvfp4")
# Model class to ModelOpt's word for it.
_FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen",
    "Qwen3ForCausalLM": "qwen",
    "GemmaForCausalLM": "gemma",
    "Phi3ForCausalLM": "phi3",
}


def modelopt_checkpoint(
    model: Path,
    out: Path,
    *,
    options: ConvertOptions,
    text: CalibrationText,
    alpha: float | None,
    interpreter: str,
    run_program: RunProgram,
    unified: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Let ModelOpt quantize.

    Args:
        model: Hugging Face folder.
        out: Gets the checkpoint.
        options: Scheme, type, tp, pp, group size, KV cache.
        text: What to calibrate on.
        alpha: Smoothing strength; None for ModelOpt's own.
        interpreter: Python with the pins of constraints/modelopt.txt.
        run_program: Starts it.
        unified: Export ModelOpt's unified Hugging Face form instead of a TensorRT-LLM checkpoint.
        progress: Called with (done, total, unit).

    Returns:
        What the report tells: who made it, of what.

    Raises:
        ConfigError: A scheme or cache that ModelOpt does not write, or no interpreter.
        SourceError: The model is no folder, or the result is not sound.
        ToolError: ModelOpt failed.
    """
    if options.quant not in QUANTIZATIONS:
        raise ConfigError(f"ModelOpt: quant is {options.quant!r}; expected one of {', '.join(QUANTIZATIONS)}")
    if options.kv_cache == "int8":
        raise ConfigError("ModelOpt: kv_cache is 'int8'; expected fp8 or none")
    if not interpreter:
        raise ConfigError(
            "converter=modelopt needs an interpreter that has ModelOpt",
            hint="run `make modelopt` and set calibration.modelopt_python=.venv-modelopt/bin/python",
        )
    if not (model / "config.json").is_file():
        raise SourceError(f"{model}: ModelOpt reads Hugging Face folders only", hint="use converter=native")
    architecture = read_architecture(load_config(model / "config.json"), str(model))
    out.mkdir(parents=True, exist_ok=True)
    request = out / "request.json"
    content = {
        "model": str(model.resolve()),
        "out": str(out.resolve()),
        "format": "hf" if unified else "trtllm",
        "family": _FAMILIES.get(architecture.name, architecture.model_type),
        "quant": options.quant,
        "kv_cache": options.kv_cache,
        "alpha": alpha,
        "group_size": options.group_size,
        "dtype": options.dtype if options.dtype != "auto" else architecture.dtype or "bfloat16",
        "tp": options.tp,
        "pp": options.pp,
        "sequences": text.sequences,
    }
    request.write_text(json.dumps(content), encoding="utf-8")
    program = Path(__file__).with_name("modelopt_program.py")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE", "CUDA_VISIBLE_DEVICES": ""}
    # Isolated: with the folder of the program searched, our modules could stand in for those of the same name.
    run_program([interpreter, "-I", str(program), str(request)], environment, _reader(progress))
    request.unlink()
    config = load_config(out / "config.json")
    if not unified:
        _refuse_lost_rotation(config, architecture.rope_theta)
        check_scales(out)
    return {"by": "modelopt", "producer": dict(config.get("producer") or {}), "text": text.facts()}


def _refuse_lost_rotation(config: Mapping[str, Any], theta: float | None) -> None:
    """Some versions of transformers make the exporter leave the rotary base out; readers would then assume 10000."""
    if theta is not None and float(config.get("rotary_base") or 10000.0) != float(theta):
        raise SourceError(
            f"the exported checkpoint has rotary_base {config.get('rotary_base')}, the source {theta}",
            hint="install the pins of constraints/modelopt.txt",
        )


def _reader(progress: Progress | None) -> Callable[[str], None]:
    def read(line: str) -> None:
        if progress is not None and line.startswith("progress "):
            done, total, unit = line.split(" ")[1:4]
            progress(float(done), float(total), unit)

    return read
