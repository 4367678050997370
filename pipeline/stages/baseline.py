"""Stage 3: what a trusted witness says about the same model; shared by all precisions of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any

from pipeline.config.spec import Spec
from pipeline.errors import PreflightError, SourceError
from pipeline.gate.available import transformers_available
from pipeline.stages.base import StageContext
from pipeline.stages.engine_faults import engine_faults
from pipeline.stages.gate_options import protocol_of, recorded_names
from pipeline.stages.sources import named_as_given

if TYPE_CHECKING:
    from pipeline.gate.baseline import Baseline
    from pipeline.gate.protocol import Protocol

NAME = "baseline"


class BaselineStage:
    """Output: ``baseline.json`` and ``baseline.safetensors``."""

    name = "baseline"
    version = 1
    inputs: tuple[str, ...] = ("fetch",)

    def identity(self, spec: Spec) -> Mapping[str, Any]:
        """Return the protocol and which witnesses there are to choose from."""
        return {
            **spec.identity_of("baseline"),
            "recorded": recorded_names(),
            "transformers": bool(spec.gate.baseline_python) or transformers_available(),
        }

    def run(self, context: StageContext) -> None:
        """Find or make the best baseline: recorded, then transformers, then the unquantized conversion."""
        from pipeline.checkpoint.digest import weights_digest
        from pipeline.gate.baseline import save_baseline

        source = context.inputs["fetch"] / "model"
        wanted = context.spec.gate.baseline
        digest = weights_digest(source)
        protocol = protocol_of(context.spec.gate)
        with named_as_given(context.spec, source), engine_faults():
            baseline = self._choose(context, wanted, source, digest, protocol)
        save_baseline(baseline, context.out, NAME)
        context.facts["baseline"] = {"kind": baseline.kind, "source_digest": digest, "versions": baseline.versions}

    def _choose(self, context: StageContext, wanted: str, source: Path, digest: str, protocol: Protocol) -> Baseline:
        from pipeline.gate.baseline import find_recorded

        python = context.spec.gate.baseline_python
        if wanted in ("auto", "recorded"):
            recorded = find_recorded(digest)
            if recorded is not None and recorded.protocol.covers(protocol):
                return recorded
            if wanted == "recorded":
                raise SourceError(
                    f"no values are recorded for these weights ({digest[:12]}) under this protocol",
                    hint="use gate.baseline=auto, transformers or unquantized",
                )
        can_ask = bool(python) or transformers_available()
        is_folder = (source / "config.json").is_file()
        if wanted == "transformers" and not is_folder:
            raise PreflightError(
                "gate.baseline=transformers needs a Hugging Face folder; the source is a GGUF file",
                hint="use source=hub or source=local with a folder, or gate.baseline=unquantized",
            )
        if wanted == "transformers" or (wanted == "auto" and can_ask and is_folder):
            return _ask_transformers(context, source, digest, protocol, python)
        return _unquantized(context, source, digest, protocol)

    def check(self, path: Path) -> None:
        """Read it back."""
        from pipeline.gate.baseline import load_baseline

        load_baseline(path / f"{NAME}.json")


def _ask_transformers(context: StageContext, source: Path, digest: str, protocol: Protocol, python: str) -> Baseline:
    from pipeline.gate.oracle import transformers_baseline
    from pipeline.runners.process import run

    def run_program(argv: Any, env: Any, on_line: Any) -> None:
        run(argv, env=env, on_line=on_line, log_path=context.log_path)

    return transformers_baseline(
        source,
        context.out,
        source_digest=digest,
        protocol=protocol,
        interpreter=python or None,
        run_program=run_program,
        progress=context.progress,
    )


def _unquantized(context: StageContext, source: Path, digest: str, protocol: Protocol) -> Baseline:
    """Let the reference engine answer for a conversion in the source's own type."""
    from pipeline.checkpoint import ConvertOptions, convert_checkpoint, open_source, write_tokenizer
    from pipeline.engines.reference import ReferenceEngine
    from pipeline.gate.protocol import shipped_text
    from pipeline.gate.tokenizer import GateTokenizer
    from pipeline.gate.witness import take_baseline

    scratch = context.out / ".unquantized"
    opened = open_source(source)
    dtype = str(opened.config.get("dtype") or opened.config.get("torch_dtype") or "float32")
    opened.close()
    convert_checkpoint(source, scratch / "checkpoint", options=ConvertOptions(dtype=dtype, dequantize=True))
    write_tokenizer(source, scratch / "tokenizer")
    tokenizer = GateTokenizer.load(scratch / "tokenizer")
    engine = ReferenceEngine.load(scratch / "checkpoint", threads=context.spec.runner.threads or None)
    baseline = take_baseline(
        engine,
        kind="unquantized",
        source_digest=digest,
        tokenizer_digest=tokenizer.digest,
        protocol=protocol,
        token_ids=tokenizer.text_ids(shipped_text(), protocol),
        prompts=tokenizer.prompts(),
        decode=tokenizer.decode,
        end_ids=tokenizer.end_ids,
        bos_id=tokenizer.bos_id,
        made_by="stage baseline",
        progress=context.progress,
    )
    rmtree(scratch)
    return baseline
