"""A graph of three small stages that behave like real ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.errors import SourceError
from pipeline.stages.base import StageContext, Unresolved
from pipeline.store.store import Store


@dataclass
class ToyStage:
    """Writes its own text and that of its inputs."""

    name: str
    inputs: tuple[str, ...] = ()
    text: str = ""
    version: int = 1
    unresolved: str = ""
    work: Callable[[StageContext], None] | None = None
    runs: list[str] = field(default_factory=list)

    def identity(self, spec: Any) -> Mapping[str, Any]:
        if self.unresolved:
            raise Unresolved(self.unresolved)
        return {"text": self.text}

    def run(self, context: StageContext) -> None:
        self.runs.append(self.name)
        parts = [self.text, *((path / "out.txt").read_text() for path in context.inputs.values())]
        if self.work:
            self.work(context)
        (context.out / "out.txt").write_text(" ".join(parts))
        context.log.info("wrote %s", self.text)
        context.facts["words"] = len(parts)

    def check(self, path: Path) -> None:
        if not (path / "out.txt").is_file():
            raise SourceError(f"{self.name} wrote no out.txt")


@dataclass
class Toy:
    store: Store
    spec: Any
    fetch: ToyStage
    convert: ToyStage
    emit: ToyStage

    @property
    def stages(self) -> list[ToyStage]:
        return [self.emit, self.convert, self.fetch]

    def ran(self) -> list[str]:
        """Return the stages that ran since the last call."""
        names = [name for stage in (self.fetch, self.convert, self.emit) for name in stage.runs]
        for stage in self.stages:
            stage.runs.clear()
        return names
