"""The engine part of resolving: precision details, calibration, builder options, speculation, adapters."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.config import engine_parts, schema, spec
from pipeline.errors import ConfigError, Finding
from pipeline.facts import precisions
from pipeline.facts.architecture import Architecture
from pipeline.facts.published import SourceQuantization


def precision(
    config: schema.PrecisionConfig,
    name: str,
    published: SourceQuantization | None,
    shape: Architecture | None,
    tp: int,
) -> spec.Precision:
    """Fill in what a precision leaves open: the kind of SmoothQuant, the group size, what a published source brings.

    Args:
        config: As composed.
        name: Option name.
        published: How the source is quantized.
        shape: Of the model, for the group size.
        tp: Tensor parallel size, likewise.
    """
    algorithm = config.quant_algo
    per_channel, per_token = bool(config.per_channel), bool(config.per_token)
    if algorithm in precisions.SMOOTHQUANT.values():
        algorithm = precisions.SMOOTHQUANT[per_channel, per_token]
    if config.from_checkpoint and algorithm is None and published is not None:
        algorithm = published.algorithm
    return spec.Precision(
        name=name,
        dtype=config.dtype,
        quant_algo=algorithm,
        kv_cache=None if config.kv_cache == "auto" else config.kv_cache.upper(),
        group_size=_group_size(config, algorithm, published, shape, tp),
        alpha=config.alpha,
        per_channel=per_channel,
        per_token=per_token,
        quantize_lm_head=config.quantize_lm_head,
        from_checkpoint=config.from_checkpoint,
    )


def _group_size(
    config: schema.PrecisionConfig,
    algorithm: str | None,
    published: SourceQuantization | None,
    shape: Architecture | None,
    tp: int,
) -> int:
    """Return the group size asked for, the source's, or the largest that divides every input width of a rank."""
    if config.group_size is not None:
        return config.group_size
    if config.from_checkpoint:
        return published.group_size if published else 0
    if algorithm == "NVFP4":
        return precisions.NVFP4_GROUP
    if algorithm not in precisions.GROUPED:
        return 0
    if shape is None:
        return precisions.GROUP_SIZES[0]
    fitting = (size for size in precisions.GROUP_SIZES if not any(w % size for w in shape.rank_widths(tp).values()))
    return next(fitting, precisions.GROUP_SIZES[0])


def calibration(config: schema.CalibrationConfig, chosen: spec.Precision) -> engine_parts.Calibration | None:
    """Return the data that quantization measures on, or None when nothing is measured."""
    if not precisions.is_calibrated(chosen.quant_algo, chosen.kv_cache, from_checkpoint=chosen.from_checkpoint):
        return None
    return engine_parts.Calibration(**{**_values(config), "path": absolute(config.path)})


def build(config: schema.BuildConfig) -> engine_parts.Build:
    """Return the builder options; lists in free flags become tuples."""
    values = {**_values(config), "timing_cache": absolute(config.timing_cache)}
    for name in ("flags", "converter_flags"):
        flags = getattr(config, name).items()
        values[name] = {str(key).lstrip("-"): tuple(v) if isinstance(v, list) else v for key, v in flags}
    return engine_parts.Build(**values)


def speculative(config: schema.SpeculativeConfig) -> engine_parts.Speculative | None:
    """Return the speculation, or None for plain decoding."""
    if config.mode == "none":
        given = {key: value for key, value in _values(config).items() if key != "mode" and value}
        if given:
            key = next(iter(given))
            message = f"speculative.{key}={given[key]} without a mode: nothing would speculate"
            finding = Finding("draft-len-without-mode", "error", f"speculative.{key}", message, "speculative=lookahead")
            raise ConfigError(message, hint=finding.hint, findings=[finding])
        return None
    return engine_parts.Speculative(**{**_values(config), "path": absolute(config.path)})


def lora(config: schema.LoraConfig) -> engine_parts.Lora | None:
    """Return the adapters, their rank read from their own configuration, or None."""
    if not config.enabled:
        if config.adapters or config.target_modules or config.dora:
            message = "lora.adapters, lora.target_modules and lora.dora are ignored without the LoRA plugin"
            finding = Finding("lora-plugin-off", "error", "lora", message, "lora=enabled")
            raise ConfigError(message, hint=finding.hint, findings=[finding])
        return None
    adapters = tuple(absolute(path) for path in config.adapters)
    documents = [_adapter_config(Path(path)) for path in adapters]
    ranks = [document["r"] for document in documents if isinstance(document.get("r"), int)]
    return engine_parts.Lora(
        max_rank=config.max_rank,
        target_modules=tuple(config.target_modules),
        adapters=adapters,
        adapter_rank=max(ranks, default=None),
        dora=config.dora or any(document.get("use_dora") is True for document in documents),
    )


def published_quantization(config: schema.ModelConfig) -> SourceQuantization | None:
    """Return what the model's option says of its weights."""
    found = config.quantization
    return SourceQuantization(**_values(found)) if found is not None and found.kind else None


def absolute(path: str) -> str:
    """Return an absolute path; empty stays empty."""
    return str(Path(path).expanduser().absolute()) if path else ""


def _adapter_config(folder: Path) -> Mapping[str, Any]:
    try:
        content = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}  # a rule says that the folder is no adapter
    return content if isinstance(content, dict) else {}


def _values(part: Any) -> dict[str, Any]:
    return {item.name: getattr(part, item.name) for item in dataclasses.fields(part)}
