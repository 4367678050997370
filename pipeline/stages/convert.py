"""Stage 2: write the TensorRT-LLM checkpoint and pack the tokenizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.config.spec import Spec
from pipeline.errors import SourceError
from pipeline.stages.base import StageContext
from pipeline.stages.sources import named_as_given


class ConvertStage:
    """Output: ``checkpoint/`` (config.json, rank*.safetensors) and ``tokenizer/``."""

    name = "convert"
    version = 1
    inputs: tuple[str, ...] = ("fetch",)

    def identity(self, spec: Spec) -> Mapping[str, Any]:
        """Return the options of the conversion."""
        return spec.identity_of("convert")

    def run(self, context: StageContext) -> None:
        """Convert, then rebuild or copy the tokenizer."""
        from pipeline.checkpoint import ConvertOptions, convert_checkpoint, write_tokenizer

        spec, source = context.spec, context.inputs["fetch"] / "model"
        options = ConvertOptions(
            dtype=spec.precision.dtype,
            tp=spec.parallel.tp,
            pp=spec.parallel.pp,
            embedding_sharding=spec.parallel.embedding_sharding,  # type: ignore[arg-type]  # checked there
        )
        with named_as_given(spec, source):
            report = convert_checkpoint(source, context.out / "checkpoint", options=options, progress=context.progress)
            tokenizer = write_tokenizer(source, context.out / "tokenizer")
        for warning in report.warnings:
            context.log.warning(warning)
        facts = dataclasses.asdict(report)
        del facts["seconds"]  # the action record has the time; what an artefact is made of has none
        context.facts["conversion"] = facts
        context.facts["tokenizer"] = dataclasses.asdict(tokenizer)

    def check(self, path: Path) -> None:
        """Every tensor the configuration calls for is there, in shape and type, on every rank."""
        from pipeline.checkpoint import verify_checkpoint

        findings = verify_checkpoint(path / "checkpoint")
        if any(finding.severity == "error" for finding in findings):
            raise SourceError("the converted checkpoint does not keep its contract", findings=findings)
        if not (path / "tokenizer" / "tokenizer.json").is_file():
            raise SourceError("the source gave no tokenizer.json")
