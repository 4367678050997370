"""manifest.json: what an emitted result is, what made it, how it was judged. Holds no time and no host path."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline import __version__
from pipeline.config.spec import Spec
from pipeline.stages.sources.files import sha256_file
from pipeline.store.record import Record

SCHEMA_VERSION = 1
NAME = "manifest.json"

# Folders that servers read whole.
_SERVED = ("model_repository", "tokenizer", "frontend")

_KIND = {
    "reference": "CPU rehearsal: the checkpoint served by the project's own numpy engine; no TensorRT engine was built",
}
_NOTES = {
    "native": "native conversion, bit-checked against NVIDIA's converter; no engine has been built from it here",
    "modelopt": "quantized by NVIDIA's ModelOpt; no engine has been built from it here",
}


def manifest(spec: Spec, records: Mapping[str, Record], gate: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest, still without ``files``.

    Args:
        spec: The job.
        records: Of the stages whose results are in it, by name.
        gate: The gate's document.
    """
    facts = {name: record.facts for name, record in records.items()}
    return {
        "schema_version": SCHEMA_VERSION,
        "name": spec.name,
        "target": spec.target.resolved,
        "kind": _KIND.get(spec.target.resolved, spec.target.resolved),
        "model": {"name": spec.model.name, "license": spec.model.license},
        "source": facts["fetch"]["source"],
        "precision": dataclasses.asdict(spec.precision),
        "parallel": dataclasses.asdict(spec.parallel),
        "limits": dataclasses.asdict(spec.limits),
        "converter": {"name": spec.converter.resolved, "note": _NOTES.get(spec.converter.resolved, "")},
        "conversion": facts["convert"]["conversion"],
        "calibration": facts["convert"].get("calibration"),
        "storage": facts["build"].get("storage", []),
        "tokenizer": facts["convert"]["tokenizer"],
        "toolchain": {"release": spec.toolchain.release, "serve_image": spec.toolchain.serve_image},
        "gate": {
            "verdict": gate["verdict"],
            "reasons": gate["reasons"],
            "caveats": gate["caveats"],
            "protocol": gate["protocol"],
            "baseline": gate["baseline"],
            "measures": {measure["name"]: measure["value"] for measure in gate["measures"]},
        },
        "checkpoint_digest": gate["candidate"]["checkpoint_digest"],
        "artefacts": {name: record.artefact for name, record in records.items()},
        "pipeline": __version__,
    }


def file_digests(folder: Path, known: Mapping[str, Record], linked: Mapping[str, tuple[str, str]]) -> dict[str, str]:
    """Return path to sha256 of every file below ``folder``.

    Args:
        folder: The emitted tree.
        known: Records of earlier stages.
        linked: Relative path to (stage, path in its artefact), for files that were linked from there: their digests are
            known and need no second reading.
    """
    recorded = {(name, entry.path): entry.sha256 for name, record in known.items() for entry in record.entries}
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            relative = path.relative_to(folder).as_posix()
            origin = linked.get(relative)
            digest = recorded.get(origin) if origin else None
            found[relative] = digest or sha256_file(path)
    return found


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document for people and programs."""
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def mismatches(folder: Path, files: Mapping[str, str], *, hashed_bytes: int) -> list[str]:
    """Return how what is served below ``folder`` differs from its digests: one line per missing, changed or added file.

    Args:
        folder: The exported tree.
        files: Relative path to sha256, from the manifest.
        hashed_bytes: Larger files are only looked for, so that serving starts in seconds.
    """
    found = []
    for name, digest in files.items():
        path = folder / name
        if not path.is_file():
            found.append(f"{name} is missing")
        elif path.stat().st_size <= hashed_bytes and sha256_file(path) != digest:
            found.append(f"{name} was changed")
    # A server loads every model it finds. Interpreters leave caches, which they check themselves.
    for path in sorted(path for part in _SERVED for path in (folder / part).rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_dir() and name not in files and "__pycache__" not in path.parts:
            found.append(f"{name} was added")
    return found
