"""TensorRT-LLM releases and their flag tables, loaded one file at a time."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError, Finding
from pipeline.toolchains.upstream_parser import Parsed, build_parser, parse_with

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True, slots=True)
class Flag:
    """One command-line flag of one tool in one release.

    Attributes:
        name: With dashes, ``--max_batch_size``.
        type: ``int``, ``float``, ``str``, ``path``, ``bool``, ``list[str]``, ``enum`` or ``enum:<Name>``.
        choices: Accepted values; empty when any value of the type will do.
        default: What upstream uses when the flag is not given.
        is_switch: Takes no value.
        takes_many: Takes one or more values.
        aliases: Other spellings.
        deprecated: Accepted with a warning.
        note: What to know about it.
    """

    name: str
    type: str
    choices: tuple[str | int, ...]
    default: Any
    is_switch: bool
    takes_many: bool
    aliases: tuple[str, ...]
    deprecated: bool
    note: str

    @property
    def key(self) -> str:
        """Name as it stands in the configuration: without dashes."""
        return self.name.lstrip("-")

    @property
    def is_toggle(self) -> bool:
        """Say whether it takes ``enable`` or ``disable``."""
        return set(self.choices) == {"enable", "disable"}


class FlagTable:
    """The flags of one tool in one release."""

    def __init__(self, tool: str, release: str, document: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        self.tool = tool
        self.release = release
        self.confidence = str(facts.get("confidence", "unverified"))
        self.note = str(facts.get("note", ""))
        self.doubts: Mapping[str, str] = facts.get("doubts", {})
        self.document = document
        self.flags: Mapping[str, Flag] = {name: _flag(name, item) for name, item in document["flags"].items()}
        self._names = {alias: flag for flag in self.flags.values() for alias in (flag.name, *flag.aliases)}

    def find(self, name: str) -> Flag | None:
        """Return the flag of that exact name or alias, with its dashes."""
        return self._names.get(name)

    def nearest(self, name: str) -> str:
        """Return the flag whose name is most like ``name``; empty when none is."""
        wanted = "--" + name.lstrip("-")
        return next(iter(difflib.get_close_matches(wanted, self._names, n=1, cutoff=0.6)), "")

    @cached_property
    def _parser(self) -> Any:
        return build_parser(self.document)

    def parse(self, argv: tuple[str, ...]) -> Parsed:
        """Parse flags as the real tool would."""
        return parse_with(self._parser, argv)


@dataclass(frozen=True, slots=True, eq=False)
class Release:
    """One TensorRT-LLM release: images, versions, paths inside the image, tools.

    Attributes:
        name: Option name, ``trtllm_1_2_1``.
        version: ``1.2.1``.
        document: The whole data file.
    """

    name: str
    version: str
    document: Mapping[str, Any]
    _tables: dict[str, FlagTable] = field(default_factory=dict, repr=False)

    @property
    def targets(self) -> tuple[str, ...]:
        """What can be made with it: ``engine``, ``llmapi``."""
        return tuple(self.document["targets"])

    @property
    def builds_engines(self) -> bool:
        """Say whether it still has the engine builder."""
        return "engine" in self.targets

    @property
    def build_image(self) -> str:
        """Image that converts, quantizes and builds."""
        return str(self.document["images"]["build"] or "")

    @property
    def serve_image(self) -> str:
        """Triton image with the same TensorRT-LLM; empty when none is known."""
        return str(self.document["images"]["serve"] or "")

    @property
    def examples(self) -> str:
        """Folder of the example scripts inside the build image."""
        return str(self.document["paths"].get("examples", ""))

    def has_table(self, tool: str) -> bool:
        """Say whether the flags of a tool are known: ``trtllm-build``, ``quantize``, ``convert/llama`` …"""
        return tool in self.document["tables"]

    def table(self, tool: str) -> FlagTable:
        """Return the flag table of a tool.

        Raises:
            KeyError: No table; ask :meth:`has_table` first.
        """
        if tool not in self._tables:
            facts = self.document["tables"][tool]
            self._tables[tool] = FlagTable(tool, self.version, _flag_document(facts["flags"]), facts)
        return self._tables[tool]

    def script(self, tool: str) -> str:
        """Return the absolute path of a script inside the build image; empty when the release has none."""
        relative = (
            self.document["paths"].get("quantize")
            if tool == "quantize"
            else self.document["convert_scripts"].get(tool.removeprefix("convert/"), {}).get("script")
        )
        return f"{self.examples}/{relative}" if relative and self.examples else ""

    def at_least(self, version: str) -> bool:
        """Say whether this release is ``version`` or newer."""
        return version_key(self.version) >= version_key(version)


@cache
def data(name: str) -> Mapping[str, Any]:
    """Return one of the shared data files: ``index``, ``families``, ``routes``, ``support``, ``advice``."""
    document: Mapping[str, Any] = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    return document


def release_versions() -> tuple[str, ...]:
    """Return every release with a data file, oldest first."""
    return tuple(data("index")["releases"])


def load_release(name: str) -> Release:
    """Load a release by option name (``trtllm_1_2_1``) or version (``1.2.1``).

    Raises:
        ConfigError: There is no such release; the hint names the nearest.
    """
    version = name.removeprefix("trtllm_").replace("_", ".")
    if version not in release_versions():
        near = difflib.get_close_matches(version, release_versions(), n=1, cutoff=0.0)
        raise ConfigError(
            f"toolchain: no TensorRT-LLM release {version!r}; known: {', '.join(release_versions())}",
            hint=f"toolchain=trtllm_{near[0].replace('.', '_')}" if near else "",
        )
    return _load(version)


def engine_findings(version: str) -> list[Finding]:
    """Say why a release cannot build engines, if it cannot. ``latest`` and releases without a data file count too."""
    facts = data("index")["engine"]
    last = facts["last"]
    version = version.removeprefix("trtllm_").replace("_", ".")
    pin = f"toolchain=trtllm_{last.replace('.', '_')}"
    both_ways = f"pin {pin} (the last release that builds engines) or use target=llmapi"
    if not re.fullmatch(r"\d+\.\d+\.\d+(\.post\d+)?(rc\d+)?", version):
        message = f"{version!r} names no release, and what it names today cannot build engines: {facts['reason']}"
        return [Finding("release-without-engines", "error", "toolchain", message, both_ways)]
    if version_key(version) >= version_key(facts["removed_in"]):
        message = f"release {version} cannot build engines: {facts['reason']}"
        return [Finding("release-without-engines", "error", "toolchain", message, both_ways)]
    if version not in release_versions():
        message = f"release {version} has no data, so its flags are not known; known: {', '.join(release_versions())}"
        return [Finding("release-unknown", "error", "toolchain", message, pin)]
    return []


def version_key(version: str) -> tuple[int, int, int, int]:
    """Order versions: ``1.3.0rc20 < 1.3.0rc21 < 1.3.0 < 1.4.0``."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)(?:rc(\d+))?", version)
    if match is None:
        raise ConfigError(f"{version!r} is no version; expected 1.2.1 or 1.3.0rc21")
    major, minor, patch, candidate = match.groups()
    return int(major), int(minor), int(patch), int(candidate) if candidate else 1_000_000


@cache
def _load(version: str) -> Release:
    document = json.loads((DATA / f"trtllm_{version.replace('.', '_')}.json").read_text(encoding="utf-8"))
    return Release(document["name"], document["release"], document)


@cache
def _flag_document(name: str) -> Mapping[str, Any]:
    document: Mapping[str, Any] = json.loads((DATA / "flags" / f"{name}.json").read_text(encoding="utf-8"))
    return document


def _flag(name: str, facts: Mapping[str, Any]) -> Flag:
    return Flag(
        name=name,
        type=facts["type"],
        choices=tuple(facts.get("choices") or ()),
        default=facts.get("default"),
        is_switch=facts.get("action") == "store_true",
        takes_many=facts.get("nargs") == "+",
        aliases=tuple(facts.get("aliases", ())),
        deprecated=bool(facts.get("deprecated")),
        note=facts.get("note", ""),
    )
