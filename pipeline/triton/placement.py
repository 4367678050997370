"""Which engine runs on which GPUs, and the servers that follow from it.

A server only ever sees the GPUs it was given, numbered from 0: a container gets them by reservation, a program through
``CUDA_VISIBLE_DEVICES``. So the repository holds positions, never numbers of one machine, and can be moved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.errors import ConfigError, Finding

MODES = ("auto", "leader", "orchestrator")


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one engine runs.

    Attributes:
        gpus: GPUs of the machine, in the order of use; empty takes the first ones.
        replicas: Copies of the engine, each on GPUs of its own.
        mode: ``leader``: one server per copy, its ranks started together. ``orchestrator``: one server that starts
            workers, needed for several engines in it; one machine only. ``auto`` chooses.
        nodes: Machines that one engine is split over.
    """

    gpus: tuple[int, ...] = ()
    replicas: int = 1
    mode: str = "auto"
    nodes: int = 1

    def groups(self, world_size: int) -> tuple[tuple[int, ...], ...]:
        """Return the GPUs of each copy."""
        gpus = self.gpus or tuple(range(self.replicas * world_size // self.nodes))
        per_copy = world_size // self.nodes
        return tuple(gpus[copy * per_copy : (copy + 1) * per_copy] for copy in range(self.replicas))

    def findings(self, world_size: int) -> list[Finding]:
        """Return what cannot be, for an engine of ``world_size`` ranks."""
        found = []
        if self.mode not in MODES:
            found.append(_error("placement.mode", f"is {self.mode!r}, expected one of {', '.join(MODES)}"))
        for name, value in (("replicas", self.replicas), ("nodes", self.nodes)):
            if value < 1:
                found.append(_error(f"placement.{name}", f"is {value}, expected at least 1"))
        if len(set(self.gpus)) < len(self.gpus) or any(gpu < 0 for gpu in self.gpus):
            found.append(_error("placement.gpus", f"is {list(self.gpus)}, expected different numbers from 0"))
        if found:
            return found
        if world_size % self.nodes:
            found.append(_error("placement.nodes", f"is {self.nodes}, which does not divide {world_size} ranks"))
        needed = self.replicas * world_size // self.nodes
        if self.gpus and len(self.gpus) < needed:
            message = f"{self.replicas} replica(s) of {world_size} rank(s) need {needed} GPUs, {len(self.gpus)} given"
            found.append(_error("placement.gpus", message))
        if self.nodes > 1 and (self.mode == "orchestrator" or self.replicas > 1):
            message = f"{self.nodes} nodes with {self.replicas} replica(s) in mode {self.mode}"
            found.append(_error("placement.nodes", f"{message}: several machines serve one copy, in leader mode"))
        return found


@dataclass(frozen=True, slots=True)
class PlacedEngine:
    """One engine model of a repository.

    Attributes:
        name: Name of the Triton model.
        world_size: Its ranks.
        placement: Where it runs.
    """

    name: str
    world_size: int
    placement: Placement


@dataclass(frozen=True, slots=True)
class Server:
    """One tritonserver.

    Attributes:
        gpus: GPUs of the machine that it gets.
        ranks: Processes that are started together; 1 is a plain server.
    """

    gpus: tuple[int, ...]
    ranks: int


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """All servers of a repository.

    Attributes:
        mode: ``leader`` or ``orchestrator``.
        servers: At least one; several serve the same repository, one copy of the engine each.
        device_ids: Value of ``gpu_device_ids`` by model: positions in the server's GPUs.
        instances: Number of instances by model.
        engines: Names of the engine models.
        nodes: Machines.
    """

    mode: str
    servers: tuple[Server, ...]
    device_ids: Mapping[str, str]
    instances: Mapping[str, int]
    engines: tuple[str, ...]
    nodes: int = 1


def plan_servers(engines: Sequence[PlacedEngine]) -> ServerPlan:
    """Decide how many servers run, on which GPUs, and what each model's config says.

    Raises:
        ConfigError: The placements cannot be; one finding each.
    """
    found = [finding for engine in engines for finding in engine.placement.findings(engine.world_size)]
    _refuse(found)
    mode = _mode(engines)
    groups = {engine.name: engine.placement.groups(engine.world_size) for engine in engines}
    names = tuple(engine.name for engine in engines)
    if mode == "leader":
        (engine,) = engines
        servers = tuple(Server(gpus, engine.world_size) for gpus in groups[engine.name])
        positions = _joined([tuple(range(len(servers[0].gpus)))])
        return ServerPlan(mode, servers, {engine.name: positions}, {engine.name: 1}, names, engine.placement.nodes)
    gpus = tuple(sorted({gpu for copies in groups.values() for copy in copies for gpu in copy}))
    device_ids = {
        name: _joined([tuple(gpus.index(gpu) for gpu in copy) for copy in copies]) for name, copies in groups.items()
    }
    instances = {name: len(copies) for name, copies in groups.items()}
    return ServerPlan(mode, (Server(gpus, 1),), device_ids, instances, names)


def _mode(engines: Sequence[PlacedEngine]) -> str:
    asked = {engine.placement.mode for engine in engines} - {"auto"}
    if len(asked) > 1:
        _refuse([_error("placement.mode", f"engines of one repository ask for {' and '.join(sorted(asked))}")])
    several = len(engines) > 1
    mode = asked.pop() if asked else "orchestrator" if several or engines[0].placement.replicas > 1 else "leader"
    if mode == "leader" and several:
        names = ", ".join(engine.name for engine in engines)
        _refuse([_error("placement.mode", f"leader mode serves one engine per server, the repository has {names}")])
    return mode


def _joined(groups: Sequence[tuple[int, ...]]) -> str:
    return ";".join(",".join(map(str, group)) for group in groups)


def _error(path: str, message: str) -> Finding:
    return Finding("placement", "error", path, message)


def _refuse(found: Sequence[Finding]) -> None:
    if found:
        raise ConfigError("; ".join(f"{item.path}: {item.message}" for item in found), findings=found)
