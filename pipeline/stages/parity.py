"""The parity section of the gate's result: the emitted checkpoint against the source model, logit by logit."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.stages.base import StageContext

if TYPE_CHECKING:
    from pipeline.engines.reference import ReferenceEngine


def parity_section(context: StageContext, engine: ReferenceEngine, token_ids: list[int]) -> Mapping[str, Any]:
    """Convert the source to 16 bits and compare.

    Args:
        context: Of the validating stage, with ``fetch`` among its inputs.
        engine: On the emitted checkpoint.
        token_ids: Text to run.
    """
    from pipeline.checkpoint import ConvertOptions, convert_checkpoint, open_source
    from pipeline.engines.reference import ReferenceEngine
    from pipeline.gate.parity import measure_parity
    from pipeline.gate.parity_source import TransformersSource
    from pipeline.runners.process import run

    spec, source = context.spec, context.inputs["fetch"] / "model"
    opened = open_source(source, dequantize=True)
    opened.close()
    stated = str(opened.config.get("dtype") or opened.config.get("torch_dtype") or "")
    dtype = stated if stated in ("float16", "bfloat16") else spec.precision.dtype
    plain = context.scratch / "source16"
    shutil.rmtree(plain, ignore_errors=True)
    convert_checkpoint(source, plain, options=ConvertOptions(dtype=dtype, dequantize=True, digest_source=False))

    def run_program(argv: Any, env: Any, on_line: Any) -> None:
        run(argv, env=env, on_line=on_line, log_path=context.log_path)

    python, witness = spec.gate.baseline_python, None
    if TransformersSource.is_available(source, python) and not isinstance(_quantization(source), Mapping):
        witness = TransformersSource(source, context.scratch, python, run_program)
    reference = ReferenceEngine.load(plain, max_seq_len=engine.max_seq_len, threads=spec.runner.threads or None)
    try:
        found = measure_parity(
            engine.model,
            reference.model,
            token_ids,
            engine.workers,
            source_logits=witness,
            progress=context.progress,
        )
    finally:
        reference.close()
        shutil.rmtree(plain)
    return {"source_dtype": dtype, **found}


def _quantization(source: Path) -> Any:
    from pipeline.checkpoint.hfconfig import load_config

    return load_config(source / "config.json").get("quantization_config")
