"""Order of the stages and their keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeline.config.spec import Spec
from pipeline.errors import ConfigError
from pipeline.stages.base import Stage
from pipeline.store.keys import KeyDocument


def topological(stages: Sequence[Stage]) -> list[Stage]:
    """Return the stages so that each comes after its inputs; otherwise in the order given.

    Raises:
        ConfigError: Two stages have one name, an input is no stage, or the inputs go round in a circle.
    """
    by_name = {stage.name: stage for stage in stages}
    if len(by_name) != len(stages):
        names = [stage.name for stage in stages]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ConfigError(f"stage names must differ; given twice: {', '.join(twice)}")
    for stage in stages:
        if missing := [name for name in stage.inputs if name not in by_name]:
            known = ", ".join(by_name)
            raise ConfigError(f"stage {stage.name} reads {', '.join(missing)}, which is no stage of {known}")
    order: list[Stage] = []
    placed: set[str] = set()
    waiting = list(stages)
    while waiting:
        ready = next((stage for stage in waiting if placed.issuperset(stage.inputs)), None)
        if ready is None:
            raise ConfigError(f"stages wait for each other in a circle: {', '.join(s.name for s in waiting)}")
        waiting.remove(ready)
        order.append(ready)
        placed.add(ready.name)
    return order


def key_document(stage: Stage, spec: Spec, input_keys: Mapping[str, str]) -> KeyDocument:
    """Collect what decides the output of a stage.

    Args:
        stage: The stage.
        spec: The job.
        input_keys: Key of every stage that comes before it, by name.

    Raises:
        Unresolved: What decides it is not known without work.
    """
    inputs = {name: input_keys[name] for name in stage.inputs}
    return KeyDocument(stage.name, stage.version, stage.identity(spec), inputs)
