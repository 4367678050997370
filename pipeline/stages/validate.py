"""Stage 5: the accuracy gate, on the artefact that will be served."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.config.spec import Spec
from pipeline.stages.base import StageContext
from pipeline.stages.baseline import NAME
from pipeline.stages.engine_faults import engine_faults
from pipeline.stages.gate_options import protocol_of, thresholds_of
from pipeline.stages.parity import parity_section


class ValidateStage:
    """Output: ``gate.json``, ``junit.xml``, ``report.html``. A verdict other than passed ends the run."""

    name = "validate"
    version = 3
    inputs: tuple[str, ...] = ("fetch", "convert", "build", "baseline")

    def identity(self, spec: Spec) -> Mapping[str, Any]:
        """Return protocol and limits, the defaults of the precision filled in."""
        return {**spec.identity_of("validate"), "thresholds": thresholds_of(spec).to_json()}

    def run(self, context: StageContext) -> None:
        """Measure, judge, write the results; they are kept with the log when the verdict is not passed."""
        from pipeline.engines.reference import ReferenceEngine
        from pipeline.gate.baseline import load_baseline
        from pipeline.gate.evaluate import evaluate
        from pipeline.gate.protocol import shipped_text
        from pipeline.gate.results import gate_document, require_passed, summary_lines, write_results
        from pipeline.gate.tokenizer import GateTokenizer
        from pipeline.gate.verdict import judge
        from pipeline.report.html import write_report

        spec = context.spec
        protocol, thresholds = protocol_of(spec.gate), thresholds_of(spec)
        baseline = load_baseline(context.inputs["baseline"] / f"{NAME}.json")
        tokenizer = GateTokenizer.load(context.inputs["convert"] / "tokenizer")
        with engine_faults():
            engine = ReferenceEngine.load(context.inputs["build"] / "engine", threads=spec.runner.threads or None)
            evaluation = evaluate(
                engine,
                source_digest=baseline.source_digest,
                tokenizer_digest=tokenizer.digest,
                token_ids=tokenizer.text_ids(shipped_text(), protocol),
                baseline=baseline,
                protocol=protocol,
                thresholds=thresholds,
                decode=tokenizer.decode,
                generations=spec.gate.generations,
                generation_tokens=spec.gate.generation_tokens,
                bos_id=tokenizer.bos_id,
                progress=context.progress,
            )
            parity = parity_section(context, engine, tokenizer.encode(shipped_text()))
        # The store's record has the time; the result itself is the same on every run.
        document = gate_document(
            dataclasses.replace(evaluation, seconds=0.0), judge(evaluation, thresholds), thresholds
        )
        document["parity"] = dict(parity)
        document["storage"] = list(context.records["build"].facts.get("storage", []))
        write_results(context.out, document)
        write_report(context.out, manifest=_subject(spec), evaluation_json=document)
        for line in summary_lines(document):
            context.log.info(line)
        context.facts["verdict"] = document["verdict"]
        require_passed(document)

    def check(self, path: Path) -> None:
        """Read it back."""
        from pipeline.gate.results import read_results, require_passed

        require_passed(read_results(path / "gate.json"))


def _subject(spec: Spec) -> dict[str, str]:
    """Name what was judged; when the gate refuses it, this report is all there is."""
    return {
        "name": spec.name,
        "target": spec.target.resolved,
        "model": spec.model.name,
        "precision": spec.precision.name,
    }
