"""Tell, without doing anything, what a run would do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline.config.spec import Spec
from pipeline.graph.dag import key_document, topological
from pipeline.stages.base import Stage, Unresolved
from pipeline.store.explain import explain
from pipeline.store.keys import KeyDocument, action_key, content_key
from pipeline.store.record import Record, contents
from pipeline.store.store import Hit, Store

Status = Literal["hit", "miss", "unknown"]


@dataclass(frozen=True, slots=True)
class StagePlan:
    """What a run would do about one stage.

    Attributes:
        name: Of the stage.
        key: Its action key; empty while unknown.
        status: ``unknown`` when the key depends on something that only a run resolves.
        reason: Why.
        record: The finished result, for a hit.
    """

    name: str
    key: str
    status: Status
    reason: str
    record: Record | None = None


def plan(spec: Spec, stages: Sequence[Stage], store: Store) -> list[StagePlan]:
    """Return one entry per stage, in the order of a run. Reads the store, writes nothing.

    Raises:
        ConfigError: The stages do not form a graph.
        StoreError: The store cannot be read.
    """
    plans: list[StagePlan] = []
    known: dict[str, StagePlan] = {}
    for stage in topological(stages):
        if open_inputs := [name for name in stage.inputs if known[name].status == "unknown"]:
            entry = StagePlan(stage.name, "", "unknown", f"depends on {', '.join(open_inputs)}")
        else:
            try:
                document = key_document(stage, spec, {name: before.key for name, before in known.items()})
            except Unresolved as error:
                entry = StagePlan(stage.name, "", "unknown", str(error))
            else:
                entry = _look_up(spec, document, known, store)
        plans.append(entry)
        known[stage.name] = entry
    return plans


def _look_up(spec: Spec, document: KeyDocument, known: dict[str, StagePlan], store: Store) -> StagePlan:
    key = action_key(document)
    found = store.lookup(key)
    if isinstance(found, Hit):
        return StagePlan(document.stage, key, "hit", "same inputs", found.record)
    inputs = {name: record for name in document.inputs if (record := known[name].record)}
    if len(inputs) == len(document.inputs):
        found = store.lookup(content_key(document, contents(inputs)))
        if isinstance(found, Hit):
            return StagePlan(document.stage, key, "hit", "inputs have the same content as before", found.record)
    return StagePlan(document.stage, key, "miss", explain(store, spec.name, document))
