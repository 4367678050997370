"""Stage 6: the tree that ``dist/<name>/`` becomes: Triton repository, frontend, report, manifest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.config.spec import Spec
from pipeline.errors import SourceError
from pipeline.stages.base import StageContext
from pipeline.stages.manifest import NAME, file_digests, manifest, write_json
from pipeline.store.files import copy_tree

REPOSITORY = "model_repository"
FRONTEND_SETTINGS = "frontend/frontend.json"


class EmitStage:
    """Output: everything that is exported, one relocatable folder."""

    name = "emit"
    version = 3
    inputs: tuple[str, ...] = ("fetch", "convert", "build", "baseline", "validate")

    def identity(self, spec: Spec) -> Mapping[str, Any]:
        """Return what the emitted files say besides the model itself."""
        return {**spec.identity_of("emit"), "serving": {**_serving_limits(spec), "threads": spec.runner.threads}}

    def run(self, context: StageContext) -> None:
        """Write the tree; the manifest last."""
        from pipeline.gate.results import read_results
        from pipeline.report.html import write_report
        from pipeline.stages.compose import compose_file
        from pipeline.triton.repository import RepositorySettings, emit_repository

        spec, out = context.spec, context.out
        tokenizer = context.inputs["convert"] / "tokenizer"
        limits = _serving_limits(spec)
        emit_repository(
            out / REPOSITORY,
            checkpoint=context.inputs["build"] / "engine",
            tokenizer=tokenizer,
            settings=RepositorySettings(
                max_batch_size=limits["max_batch_size"],
                max_seq_len=limits["max_seq_len"],
                threads=spec.runner.threads or None,
            ),
        )
        copy_tree(tokenizer, out / "tokenizer")
        copy_tree(context.inputs["validate"], out)
        (out / "frontend").mkdir()
        write_json(out / FRONTEND_SETTINGS, _frontend_settings(spec, limits["max_seq_len"]))
        (out / "compose.yaml").write_text(compose_file(spec), encoding="utf-8")
        gate = read_results(out / "gate.json")
        document = manifest(spec, context.records, gate)
        stages = [{"name": name, "artefact": record.artefact} for name, record in context.records.items()]
        write_report(out, manifest=document, evaluation_json=gate, stages=stages)
        linked = {
            f"{REPOSITORY}/tensorrt_llm/1/{Path(entry.path).name}": ("build", entry.path)
            for entry in context.records["build"].entries
        }
        document["files"] = file_digests(out, context.records, linked)
        write_json(out / NAME, document)

    def check(self, path: Path) -> None:
        """Re-read the repository as Triton would."""
        from pipeline.triton.verify import verify_repository

        errors = [f for f in verify_repository(path / REPOSITORY) if f.severity == "error"]
        if errors:
            raise SourceError("the emitted model repository does not hold together", findings=errors)


def _serving_limits(spec: Spec) -> dict[str, int]:
    return {"max_batch_size": spec.limits.max_batch_size, "max_seq_len": spec.limits.max_seq_len}


def _frontend_settings(spec: Spec, max_seq_len: int) -> dict[str, Any]:
    """Return what the frontend is told; paths are relative to the file."""
    return {
        "tokenizer": "../tokenizer",
        "model": spec.frontend.model,
        "served_model": spec.frontend.served_model or spec.model.name,
        "target": spec.target.resolved,
        "max_seq_len": max_seq_len,
        "tool_parser": spec.frontend.tool_parser,
    }
