"""Stage 2: write the TensorRT-LLM checkpoint, quantized where asked for, and pack the tokenizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config.spec import Spec
from pipeline.errors import SourceError
from pipeline.stages.base import StageContext
from pipeline.stages.sources import named_as_given

if TYPE_CHECKING:
    from pipeline.checkpoint import ConversionReport, ConvertOptions

# ``quant_algo`` of the checkpoint to the name of the native scheme.
_SCHEMES: Mapping[str, str] = {
    "W8A16": "int8",
    "W4A16": "int4",
    "W8A8_SQ_PER_CHANNEL": "int8_sq",
    "FP8": "fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8_rowwise",
    "W4A16_AWQ": "int4_awq",
    "W4A8_AWQ": "w4a8_awq",
    "NVFP4": "nvfp4",
}


class ConvertStage:
    """Output: ``checkpoint/`` (config.json, rank*.safetensors) and ``tokenizer/``."""

    name = "convert"
    version = 2
    inputs: tuple[str, ...] = ("fetch",)

    def identity(self, spec: Spec) -> Mapping[str, Any]:
        """Return the options of the conversion, and which text it is calibrated on."""
        values: dict[str, Any] = dict(spec.identity_of("convert"))
        if spec.calibration is not None:
            from pipeline.calibration.texts import text_digest

            values["calibration_text"] = text_digest(_path(spec))
        return values

    def run(self, context: StageContext) -> None:
        """Convert, calibrating where the scheme needs it, then rebuild or copy the tokenizer."""
        from pipeline.checkpoint import write_tokenizer

        spec, source = context.spec, context.inputs["fetch"] / "model"
        with named_as_given(spec, source):
            tokenizer = write_tokenizer(source, context.out / "tokenizer")
            context.facts["tokenizer"] = dataclasses.asdict(tokenizer)
            for warning in tokenizer.warnings:
                context.log.warning(warning)
            if spec.converter.resolved == "modelopt":
                self._by_modelopt(context, source)
                return
            report = self._convert(context, source)
        for warning in report.warnings:
            context.log.warning(warning)
        facts = dataclasses.asdict(report)
        del facts["seconds"]  # the action record has the time; what an artefact is made of has none
        context.facts["conversion"] = facts

    def _by_modelopt(self, context: StageContext, source: Path) -> None:
        from pipeline.calibration.nvidia_modelopt import modelopt_checkpoint
        from pipeline.calibration.texts import read_calibration
        from pipeline.gate.tokenizer import GateTokenizer
        from pipeline.runners.process import run

        def run_program(argv: Any, env: Any, on_line: Any) -> None:
            run(argv, env=env, on_line=on_line, log_path=context.log_path)

        calibration = context.spec.calibration
        facts = modelopt_checkpoint(
            source,
            context.out / "checkpoint",
            options=conversion_options(context.spec),
            text=read_calibration(_text_options(context.spec), GateTokenizer.load(context.out / "tokenizer").encode),
            alpha=context.spec.precision.alpha,
            interpreter=calibration.modelopt_python if calibration is not None else "",
            run_program=run_program,
            progress=context.progress,
        )
        context.facts["conversion"] = facts

    def _convert(self, context: StageContext, source: Path) -> ConversionReport:
        from pipeline.checkpoint import convert_checkpoint, open_source

        out, options = context.out / "checkpoint", conversion_options(context.spec)
        opened = open_source(source)
        opened.close()
        if context.spec.calibration is None:
            return convert_checkpoint(source, out, options=options, progress=context.progress)
        from pipeline.calibration.quantize import QuantizationRequest, needs_calibration, quantize_checkpoint
        from pipeline.gate.tokenizer import GateTokenizer

        if not needs_calibration(options, opened.tensors):
            return convert_checkpoint(source, out, options=options, progress=context.progress)
        request = QuantizationRequest(
            source=source,
            out=out,
            options=options,
            text=_text_options(context.spec),
            alpha=context.spec.precision.alpha,
            group_size=context.spec.precision.group_size or None,
            work=context.scratch,
            threads=context.spec.runner.threads or None,
        )
        encode = GateTokenizer.load(context.out / "tokenizer").encode
        report = quantize_checkpoint(request, encode, progress=context.progress, log=context.log.info)
        context.facts["calibration"] = dict(report.calibration)
        return report.conversion

    def check(self, path: Path) -> None:
        """Every tensor the configuration calls for is there, in shape and type, on every rank."""
        from pipeline.checkpoint import verify_checkpoint

        findings = verify_checkpoint(path / "checkpoint")
        if any(finding.severity == "error" for finding in findings):
            raise SourceError("the converted checkpoint does not keep its contract", findings=findings)
        if not (path / "tokenizer" / "tokenizer.json").is_file():
            raise SourceError("the source gave no tokenizer.json")


def conversion_options(spec: Spec) -> ConvertOptions:
    """Return the native conversion that a job asks for; ranges are still open."""
    from pipeline.checkpoint import ConvertOptions

    precision = spec.precision
    return ConvertOptions(
        dtype=precision.dtype,
        tp=spec.parallel.tp,
        pp=spec.parallel.pp,
        embedding_sharding=spec.parallel.embedding_sharding,  # type: ignore[arg-type]  # checked there
        quant=scheme_of(spec),  # type: ignore[arg-type]  # checked there
        kv_cache=(precision.kv_cache or "").lower() or None,  # type: ignore[arg-type]  # checked there
        per_channel=precision.per_channel,
        per_token=precision.per_token,
        group_size=precision.group_size or 128,
    )


def scheme_of(spec: Spec) -> str | None:
    """Return the native scheme; None where nothing is quantized, or the source already is and is recognised."""
    algorithm = spec.precision.quant_algo
    if algorithm is None or spec.precision.from_checkpoint:
        return None
    return _SCHEMES.get(algorithm, "smoothquant")


def _text_options(spec: Spec) -> Any:
    from pipeline.calibration.texts import TextOptions

    wanted = spec.calibration
    if wanted is None:
        return TextOptions()
    return TextOptions(_path(spec), wanted.column, wanted.samples, wanted.seq_len, wanted.batch_size)


def _path(spec: Spec) -> Path | None:
    return Path(spec.calibration.path) if spec.calibration is not None and spec.calibration.path else None
