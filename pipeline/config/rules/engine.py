"""Rules about what only engines have: kinds of quantization, converters, speculation, adapters, files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pipeline.config.spec import Spec
from pipeline.errors import Finding
from pipeline.facts import precisions


def smoothquant_details(spec: Spec) -> Iterator[Finding]:
    """Smoothing strength and kind belong to SmoothQuant."""
    precision = spec.precision
    if (precision.quant_algo or "").startswith("W8A8_SQ"):
        return
    given = {"alpha": precision.alpha, "per_channel": precision.per_channel, "per_token": precision.per_token}
    for name, value in given.items():
        if value not in (None, False):
            message = f"precision.{name}={value} belongs to SmoothQuant and does nothing at precision={precision.name}"
            hint = f"precision=smoothquant, or leave precision.{name} out"
            yield Finding("smoothquant-only", "error", f"precision.{name}", message, hint)


def group_size(spec: Spec) -> Iterator[Finding]:
    """Kernels exist for few group sizes; other methods have none."""
    size, algorithm = spec.precision.group_size, spec.precision.quant_algo
    path = "precision.group_size"
    if spec.target.resolved != "engine" or spec.precision.from_checkpoint:
        return
    if algorithm in precisions.GROUPED and size not in precisions.GROUP_SIZES:
        sizes = " and ".join(map(str, precisions.GROUP_SIZES))
        message = f"{path}={size}: kernels for {algorithm} are known for groups of {sizes}"
        yield Finding("group-size-kernel", "warning", path, message, f"{path}=auto")
    elif size and algorithm not in (*precisions.GROUPED, "NVFP4"):
        message = f"{path}={size} does nothing at precision={spec.precision.name}: its scales are not in groups"
        yield Finding("group-size-unused", "error", path, message, f"leave {path} out")


def native_heads(spec: Spec) -> Iterator[Finding]:
    """The native converter writes plain decoders only."""
    if spec.converter.resolved != "native" or spec.speculative is None:
        return
    if spec.speculative.mode in ("medusa", "eagle", "redrafter"):
        message = f"converter=native writes no draft heads, which speculative={spec.speculative.mode} needs"
        yield Finding("native-speculative", "error", "speculative.mode", message, "converter=nvidia, or lookahead")


def heads_folder(spec: Spec) -> Iterator[Finding]:
    """Medusa heads come from a folder."""
    wish = spec.speculative
    if wish is None or wish.mode != "medusa":
        return
    if not wish.path:
        message = "speculative=medusa needs the folder of the trained heads"
        yield Finding("medusa-heads", "error", "speculative.path", message, "speculative.path=/data/medusa-heads")
    elif not Path(wish.path).is_dir():
        yield _missing("speculative.path", wish.path, "the folder of the Medusa heads")


def adapters(spec: Spec) -> Iterator[Finding]:
    """Adapter folders hold ``adapter_config.json``."""
    if spec.lora is None:
        return
    for index, path in enumerate(spec.lora.adapters):
        if not (Path(path) / "adapter_config.json").is_file():
            message = f"{path} is no adapter: it has no adapter_config.json"
            yield Finding(
                "lora-adapter", "error", "lora.adapters", message, f"check entry {index + 1} of lora.adapters"
            )


def calibration_data(spec: Spec) -> Iterator[Finding]:
    """Calibration text is local."""
    data = spec.calibration
    if data is None or not data.path:
        return
    path = Path(data.path)
    if not path.exists():
        yield _missing("calibration.path", data.path, "a folder, or a .jsonl or .txt file")
    elif path.is_dir() and data.column != "text" and spec.converter.resolved == "nvidia":
        message = f"NVIDIA's tools read the column text of a folder, not {data.column!r}"
        hint = "give a .jsonl file: its column is renamed"
        yield Finding("calibration-column", "error", "calibration.column", message, hint)
    elif path.is_file() and path.suffix not in (".jsonl", ".txt"):
        message = f"{path} is neither .jsonl nor .txt"
        yield Finding("calibration-file", "error", "calibration.path", message, "convert it to one of them")


def timing_cache(spec: Spec) -> Iterator[Finding]:
    """A timing cache is a folder with ``model.cache``."""
    path = spec.build.timing_cache
    if path and not (Path(path) / "model.cache").is_file():
        yield _missing("build.timing_cache", path, "a folder with model.cache, as a build leaves in timing_cache/")


def builder_workers(spec: Spec) -> Iterator[Finding]:
    """The builder caps its processes at the visible GPUs."""
    workers, count = spec.build.workers, spec.hardware.count
    if spec.target.resolved == "engine" and workers is not None and 0 < count < workers:
        message = f"build.workers={workers} is cut to the {count} GPU(s) of {spec.hardware.name}"
        yield Finding("workers-capped", "warning", "build.workers", message, f"build.workers={count}")


def vocabulary(spec: Spec) -> Iterator[Finding]:
    """A vocabulary that does not divide is padded."""
    shape, tp = spec.model.architecture, spec.parallel.tp
    if spec.target.resolved != "engine" or shape is None or shape.vocab_size % tp == 0:
        return
    padded = -(-shape.vocab_size // tp) * tp
    message = f"the vocabulary of {shape.vocab_size} is padded to {padded} to divide by parallel.tp={tp}"
    yield Finding("vocabulary-padded", "info", "parallel.tp", message)


def _missing(path: str, value: str, what: str) -> Finding:
    return Finding("path-missing", "error", path, f"{path}={value} is not there; expected {what}", "check the path")


RULES = (
    smoothquant_details,
    group_size,
    native_heads,
    heads_folder,
    adapters,
    calibration_data,
    timing_cache,
    builder_workers,
    vocabulary,
)
