"""What the tensorrtllm backend of a release knows: tensors and parameters, from ``data/engine_backend.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError
from pipeline.facts.releases import is_at_least, parse
from pipeline.triton.tensors import Tensor

_DATA = Path(__file__).parent / "data" / "engine_backend.json"


@dataclass(frozen=True, slots=True)
class EngineBackend:
    """The backend of one release.

    Attributes:
        release: TensorRT-LLM release, ``1.2.1``.
        inputs: Inputs of ``tensorrt_llm``; the datatypes ``LOGITS``, ``PROMPT_TABLE`` and ``FEATURES`` are filled.
        outputs: Outputs likewise.
        parameters: Names that the backend reads.
        must_exist: Parameters without which it does not load; an empty value will do.
        left_out: Parameters that are never written, with the reason.
    """

    release: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    parameters: frozenset[str]
    must_exist: frozenset[str]
    left_out: Mapping[str, str]


def engine_backend(
    release: str, *, logits: str = "FP32", prompt_table: str = "FP16", features: str = "FP16"
) -> EngineBackend:
    """Return the backend of a release.

    Args:
        release: TensorRT-LLM release.
        logits: Datatype of the engine's logits, ``FP32`` or ``FP16``.
        prompt_table: Datatype of prompt embeddings: the engine's.
        features: Datatype of encoder features.

    Raises:
        ConfigError: The release has no such backend, or it is older than what is known here.
    """
    data = _data()
    first, last = data["first_release"], data["last_release"]
    if parse(release) is None or not is_at_least(release, first) or not is_at_least(last, release):
        raise ConfigError(
            f"release is {release!r}; the engine backend of Triton is known from {first} to {last}",
            hint="use target=llmapi for newer releases" if is_at_least(release, first) else f"use {first} or newer",
        )
    filled = {"LOGITS": logits, "PROMPT_TABLE": prompt_table, "FEATURES": features}
    parameters = {name: item for name, item in data["parameters"].items() if _is_in(release, item)}
    return EngineBackend(
        release=release,
        inputs=tuple(_tensor(item, filled) for item in data["inputs"] if _is_in(release, item)),
        outputs=tuple(_tensor(item, filled) for item in data["outputs"] if _is_in(release, item)),
        parameters=frozenset(parameters),
        must_exist=frozenset(name for name, item in parameters.items() if item.get("must_exist")),
        left_out={name: item["left_out"] for name, item in parameters.items() if "left_out" in item},
    )


@cache
def _data() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(_DATA.read_text(encoding="utf-8"))
    return data


def _is_in(release: str, item: Mapping[str, Any]) -> bool:
    since, until = item.get("since"), item.get("until")
    return (since is None or is_at_least(release, since)) and (until is None or is_at_least(until, release))


def _tensor(item: Mapping[str, Any], filled: Mapping[str, str]) -> Tensor:
    datatype: Any = filled.get(item["datatype"], item["datatype"])
    return Tensor(
        item["name"],
        datatype,
        tuple(item["dims"]),
        optional=not item.get("required", False),
        reshape=item.get("reshape", False),
        ragged=item.get("ragged", False),
    )
