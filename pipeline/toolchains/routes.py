"""Which tool makes a checkpoint of a family at a precision in a release. The table is data; this only reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pipeline.errors import Finding
from pipeline.toolchains.arguments import accepts
from pipeline.toolchains.job import Family, ToolJob
from pipeline.toolchains.release import Release, data, load_release, release_versions


@dataclass(frozen=True, slots=True)
class Need:
    """What a route has to be able to do; the part of a job that chooses the tool.

    Attributes:
        recipe: Precision as the route table names it.
        kv_cache: ``auto``, ``int8`` or ``fp8``.
        splits: Nouns of the sizes that are not the default: ``tp``, ``pp``, ``cp``, ``moe_tp``, ``moe_ep``.
        medusa: Medusa heads have to be merged.
    """

    recipe: str
    kv_cache: str
    splits: tuple[str, ...]
    medusa: bool

    @staticmethod
    def of(job: ToolJob) -> Need:
        """Take from a job what chooses its tool."""
        splits = {"tp": job.tp > 1, "pp": job.pp > 1, "cp": job.cp > 1}
        sizes = {**splits, "moe_tp": job.moe_tp > 0, "moe_ep": job.moe_ep > 0}
        medusa = job.speculative is not None and job.speculative.mode == "medusa"
        return Need(job.recipe, job.kv_cache, tuple(noun for noun, used in sizes.items() if used), medusa)


@dataclass(frozen=True, slots=True)
class Route:
    """The way a checkpoint is made.

    Attributes:
        tool: ``convert/<script>`` or ``quantize``.
        algorithm: ``quant_algo`` that results; ``none`` for 16 bit.
        makes: Facts of the precision in that tool (``flags``, ``dtype`` …).
        kv: Facts of the KV cache in that tool; empty for ``auto``.
        nouns: How the tool calls what every tool knows (``model``, ``out``, ``tp`` …).
        facts: Everything the table says about the tool.
    """

    tool: str
    algorithm: str
    makes: Mapping[str, Any]
    kv: Mapping[str, Any]
    nouns: Mapping[str, str]
    facts: Mapping[str, Any]

    @property
    def calibrates(self) -> bool:
        """Say whether the tool runs calibration data through the model."""
        return bool(self.makes.get("calibrates") or self.kv.get("calibrates"))

    @property
    def rank(self) -> tuple[bool, bool]:
        """Order among routes that work: what was asked for first, then measured KV scales."""
        return "instead_of" in self.makes, self.kv.get("scales") == "default"


def choose_route(job: ToolJob, family: Family, release: Release) -> tuple[Route | None, list[Finding]]:
    """Return the tool that makes the checkpoint, or an error finding that names what does work."""
    need = Need.of(job)
    routes, reasons = _usable(need, family, release)
    if not routes:
        return None, [_no_route(need, family, release, reasons)]
    route = min(routes, key=lambda item: item.rank)
    return route, _remarks(route, family, reasons)


def default_converter(job: ToolJob, family: Family, release: Release) -> tuple[str, str]:
    """Return who writes the checkpoint when nobody said: ``nvidia`` or ``native``, and why."""
    routes, _ = _usable(Need.of(job), family, release)
    if routes:
        tool = min(routes, key=lambda item: item.rank).tool
        return "nvidia", f"release {release.version} has {tool} for {family.name} at {job.recipe}"
    if _native_writes(family, job.recipe):
        return "native", f"release {release.version} has no tool with a flag table for {family.name} at {job.recipe}"
    return "nvidia", f"nothing else makes {family.name} at {job.recipe} either"


def algorithm_of(recipe: str) -> str:
    """Return the ``quant_algo`` a recipe stands for, whoever makes it; ``none`` for 16 bit or unknown."""
    for facts in data("routes")["tools"].values():
        made = facts["makes"].get(recipe)
        if made and "instead_of" not in made:
            return str(made["algorithm"])
    return "none"


def tools_for(family: Family) -> list[str]:
    """Return the tools that know a family, preferred first."""
    tools = [f"convert/{family.script}"] if family.script else []
    return tools + (["quantize"] if family.quantize != "no" else [])


@lru_cache(maxsize=8192)
def _usable(need: Need, family: Family, release: Release) -> tuple[tuple[Route, ...], Mapping[str, str]]:
    """Return the routes that work, and for the other tools why they do not."""
    routes: list[Route] = []
    reasons: dict[str, str] = {}
    for tool in tools_for(family):
        outcome = _route(need, tool, release)
        if isinstance(outcome, Route):
            routes.append(outcome)
        else:
            reasons[tool] = outcome
    return tuple(routes), reasons


def _route(need: Need, tool: str, release: Release) -> Route | str:
    """Return the route through one tool, or why there is none."""
    facts = data("routes")["tools"].get(tool)
    if facts is None or not release.has_table(tool):
        return "no flag table"
    makes = facts["makes"].get(need.recipe)
    if makes is None:
        return f"does not make {need.recipe}"
    kv = {} if need.kv_cache == "auto" else facts["kv_cache"].get(need.kv_cache)
    if kv is None:
        return f"has no flag for an {need.kv_cache} KV cache"
    nouns = facts["nouns"]
    for noun in (*need.splits, *(["medusa"] if need.medusa else [])):
        if noun not in nouns:
            return f"has no flag for {noun}"
    table = release.table(tool)
    for name, value in {**makes.get("flags", {}), **kv.get("flags", {})}.items():
        filled = isinstance(value, str) and value.startswith("$")
        if not (table.find(name) if filled else accepts(table, name, value)):
            return f"knows no {name} {value}" if not filled else f"knows no {name}"
    return Route(tool, makes["algorithm"], makes, kv, nouns, facts)


def _remarks(route: Route, family: Family, reasons: Mapping[str, str]) -> list[Finding]:
    findings: list[Finding] = []
    wanted = route.makes.get("instead_of")
    if wanted:
        message = f"{wanted} was asked for and no tool makes it for this family; {route.tool} makes {route.algorithm}"
        findings.append(Finding("smoothquant-other-kind", "warning", "precision", message, "let the gate decide"))
    if route.kv.get("scales") == "default":
        message = f"{route.tool} does not measure KV cache scales: they are 1.0 unless the source holds them"
        hint = "precision.kv_cache=auto"
        findings.append(Finding("kv-scales-default", "warning", "precision.kv_cache", message, hint))
    if route.makes.get("estimated"):
        message = f"{route.tool}: {route.makes['estimated']}"
        findings.append(Finding("route-unverified", "warning", "precision", message))
    if route.tool == "quantize" and family.quantize == "unverified":
        message = f"nothing states that quantize.py takes {family.name}"
        findings.append(Finding("route-unverified", "warning", "model", message, "converter=native"))
    if route.tool == "quantize" and reasons:
        tool, reason = next(iter(reasons.items()))
        message = f"quantize.py writes the checkpoint, because {tool} {_because(reason)}"
        findings.append(Finding("route-quantize", "info", "converter", message))
    return findings


def _because(reason: str) -> str:
    return "has no flag table in this release" if reason == "no flag table" else reason


def _no_route(need: Need, family: Family, release: Release, reasons: Mapping[str, str]) -> Finding:
    missing_table = any(reason == "no flag table" for reason in reasons.values())
    rule = "no-flag-table" if missing_table or not reasons else "precision-has-no-tool"
    said = "; ".join(f"{tool}: {_because(reason)}" for tool, reason in reasons.items()) or "no tool knows this family"
    kv = "" if need.kv_cache == "auto" else f" with an {need.kv_cache} KV cache"
    message = f"no command for {family.name} at {need.recipe}{kv} in release {release.version}: {said}"
    path = "toolchain" if missing_table else "precision"
    return Finding(rule, "error", path, message, _what_works(need, family, release))


@lru_cache(maxsize=4096)
def _what_works(need: Need, family: Family, release: Release) -> str:
    """Name what does work instead: another release, another precision, the native converter, the LLM API."""
    others = [v for v in release_versions() if v != release.version and load_release(v).builds_engines]
    working = [v for v in others if _usable(need, family, load_release(v))[0]]
    ways = [f"toolchain=trtllm_{v.replace('.', '_')}" for v in working[-1:]]
    if _native_writes(family, need.recipe):
        ways.append("converter=native")
    recipes = dict.fromkeys(r for facts in data("routes")["tools"].values() for r in facts["makes"] if ":" not in r)
    others_here = {r: Need(r, "auto", need.splits, need.medusa) for r in recipes if r != need.recipe}
    made = [recipe for recipe, other in others_here.items() if _usable(other, family, release)[0]]
    if made:
        ways.append(f"precision={'|'.join(made)}")
    return "what works: " + ", or ".join(ways or ["target=llmapi"])


def _native_writes(family: Family, recipe: str) -> bool:
    native = data("families")["native"]
    return family.name in native["families"] and recipe.partition(":")[0] in native["recipes"]
