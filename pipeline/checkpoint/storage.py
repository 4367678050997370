"""What a checkpoint really stores, by class of tensor, against what was asked for and what 16 bits would take."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.checkpoint.contract import expected_tensors
from pipeline.checkpoint.dtypes import itemsize
from pipeline.checkpoint.hfconfig import load_config
from pipeline.checkpoint.quantization.scheme import LINEARS
from pipeline.checkpoint.readers.safetensors_file import read_safetensors_header
from pipeline.errors import Finding, SourceError

# What the linear layers are to be stored as.
_REQUESTED = (
    (r"W8A16.*|W8A8_.*", "int8"),
    (r"W4A.*", "int4"),
    (r"FP8.*", "float8_e4m3fn"),
    (r"NVFP4", "float4_e2m1fn"),
)
_NARROW = {"int8": "int4", "uint8": "float4_e2m1fn"}
_KV = {"INT8": "int8", "FP8": "float8_e4m3fn"}


@dataclass(frozen=True, slots=True)
class StorageClass:
    """One class of tensors.

    Attributes:
        name: ``linear layers``, ``embedding``, ``head``, ``norms``, ``biases``, ``scales``, ``router``, ``KV cache``.
        requested: Type asked for.
        actual: Type found; several joined by commas.
        before_bytes: Bytes without quantization; of the cache, per token.
        after_bytes: Bytes now, all ranks; of the cache, per token.
    """

    name: str
    requested: str
    actual: str
    before_bytes: int
    after_bytes: int


def storage_table(checkpoint: Path) -> tuple[StorageClass, ...]:
    """Compare what is stored with the request in the config.

    Raises:
        SourceError: A request is not in effect; one finding per class.
    """
    config = load_config(checkpoint / "config.json")
    plain = expected_tensors({**config, "quantization": {}})
    before: dict[str, list[tuple[str, int, int]]] = {}
    after: dict[str, list[tuple[str, int, int]]] = {}
    values: dict[str, int] = {}
    for rank, tensors in enumerate(plain):
        for name, (shape, dtype) in tensors.items():
            kind = _class_of(name)
            count = math.prod(shape)
            before.setdefault(kind, []).append((dtype, count, count * itemsize(dtype)))
            values[f"{rank}:{name}"] = count
    for rank in range(len(plain)):
        header = read_safetensors_header(checkpoint / f"rank{rank}.safetensors")
        for name, info in header.tensors.items():
            stored = info.nbytes
            dtype = _true_type(info.dtype, stored, values.get(f"{rank}:{name}"))
            after.setdefault(_class_of(name), []).append((dtype, 0, stored))
    rows = [
        StorageClass(
            name,
            _requested(name, config),
            ", ".join(sorted({dtype for dtype, _, _ in after.get(name, [])})) or "none",
            sum(size for _, _, size in before.get(name, [])),
            sum(size for _, _, size in after.get(name, [])),
        )
        for name in sorted({*before, *after}, key=_ORDER.index)
    ]
    rows.append(_cache(config))
    _refuse_unmet(checkpoint, rows)
    return tuple(rows)


_ORDER = ("linear layers", "embedding", "head", "norms", "biases", "router", "scales", "KV cache")


def _class_of(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if kind == "bias":
        return "biases"
    if kind != "weight":
        return "scales"
    if module.endswith(LINEARS):
        return "linear layers"
    if "embedding" in module:
        return "embedding"
    return "head" if module == "lm_head" else "router" if module.endswith("router") else "norms"


def _true_type(dtype: str, nbytes: int, values: int | None) -> str:
    """Name the type by the bits a value takes: two int4 lie in a byte."""
    if values and nbytes * 2 == values:
        return _NARROW.get(dtype, dtype)
    return dtype


def _requested(name: str, config: Mapping[str, Any]) -> str:
    algorithm = (config.get("quantization") or {}).get("quant_algo")
    if name == "scales":
        return "as the scheme has them"
    if name == "router":
        return "float32"
    if name != "linear layers" or algorithm is None:
        return str(config["dtype"])
    return next((kind for pattern, kind in _REQUESTED if re.fullmatch(pattern, algorithm)), str(config["dtype"]))


def _cache(config: Mapping[str, Any]) -> StorageClass:
    wanted = (config.get("quantization") or {}).get("kv_cache_quant_algo")
    heads = int(config.get("num_key_value_heads") or config["num_attention_heads"])
    values = 2 * int(config["num_hidden_layers"]) * heads * int(config["head_size"])
    dtype = str(config["dtype"])
    kind = _KV.get(str(wanted), dtype)
    return StorageClass("KV cache", kind, kind, values * itemsize(dtype), values * itemsize(kind))


def _refuse_unmet(checkpoint: Path, rows: Iterable[StorageClass]) -> None:
    unmet = [row for row in rows if row.name != "scales" and row.requested not in row.actual.split(", ")]
    unmet += [row for row in rows if row.name == "linear layers" and row.actual != row.requested and row not in unmet]
    if unmet:
        raise SourceError(
            f"{checkpoint.name}: {unmet[0].name} were asked to be {unmet[0].requested} and are {unmet[0].actual}",
            hint="the request is not in effect: the scheme does not apply to this model",
            findings=[
                Finding("storage", "error", row.name, f"requested {row.requested}, stored {row.actual}")
                for row in unmet
            ],
        )
