"""The record of a finished piece of work. Writing it is what makes the work count as done."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.logs import redact
from pipeline.store.digest import Entry, tree_digest
from pipeline.store.keys import FORMAT, KeyDocument, canonical_json


class DamagedRecord(Exception):
    """A record's file is not what was once written."""


@dataclass(frozen=True, slots=True)
class Record:
    """What was made, from what, by what.

    Attributes:
        key: Action key.
        content_key: Key by the content of the inputs.
        job: Name of the job that made it first.
        document: What decided the output.
        input_artefacts: Digest of each input's artefact, by stage name.
        artefact: Digest of the output.
        entries: Every file of the output, with size and sha256.
        facts: What the stage reported: sources used, counts, verdicts.
        versions: Versions of the programs that took part.
        seconds: Wall time it took.
        created: UTC, ISO 8601.
        log: Path of the stage's log, relative to the store's root where it lies below it.
    """

    key: str
    content_key: str
    job: str
    document: KeyDocument
    input_artefacts: Mapping[str, str]
    artefact: str
    entries: tuple[Entry, ...]
    facts: Mapping[str, Any]
    versions: Mapping[str, str]
    seconds: float
    created: str
    log: str

    @property
    def size_bytes(self) -> int:
        """Size of the artefact."""
        return sum(entry.size for entry in self.entries)


def contents(records: Mapping[str, Record]) -> dict[str, str]:
    """Return, by stage name, a digest of what a later stage can see of a result: its files and its facts."""
    return {
        name: hashlib.sha256(canonical_json([record.artefact, record.facts])).hexdigest()
        for name, record in records.items()
    }


def to_bytes(record: Record) -> bytes:
    """Serialize a record, with a checksum over it."""
    body = asdict(record)
    body["document"]["identity"] = dict(record.document.identity)
    body["entries"] = [[e.path, e.kind, e.size, e.sha256] for e in record.entries]
    checksum = hashlib.sha256(canonical_json(body)).hexdigest()
    return json.dumps({"format": FORMAT, "sha256": checksum, "body": body}, indent=1).encode("ascii") + b"\n"


def from_bytes(data: bytes) -> Record:
    """Read a record back.

    Raises:
        DamagedRecord: It is cut off, changed, or of another format.
    """
    try:
        outer = json.loads(data)
        body = outer["body"]
        if outer["format"] != FORMAT:
            raise DamagedRecord(f"its format is {outer['format']}, expected {FORMAT}")
        if hashlib.sha256(canonical_json(body)).hexdigest() != outer["sha256"]:
            raise DamagedRecord("its checksum does not match its content")
        entries = tuple(Entry(*row) for row in body["entries"])
        if tree_digest(entries) != body["artefact"]:
            raise DamagedRecord("its list of files does not give the digest of its artefact")
        return Record(**{**body, "document": KeyDocument(**body["document"]), "entries": entries})
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedRecord(f"it is not a complete record ({error})") from error


def plain(value: object) -> Any:
    """Turn what a stage reported into JSON values without secrets.

    A fact of an odd type must not cost a finished stage, so it is written as text; so are NaN and infinity.
    """
    if isinstance(value, Mapping):
        return {redact(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in (sorted(value, key=repr) if isinstance(value, set | frozenset) else value)]
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    return redact(str(value))
