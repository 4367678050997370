"""From a model to a quantized checkpoint: convert to 16 bits, measure, search, convert again, check."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pipeline.calibration.alpha import choose_alpha, divergence
from pipeline.calibration.awq import search_int4
from pipeline.calibration.ranges import Progress, load_state, measure_ranges, save_state
from pipeline.calibration.sanity import check_ranges, check_scales
from pipeline.calibration.texts import CalibrationText, TextOptions, read_calibration
from pipeline.checkpoint import ConversionReport, ConvertOptions, convert_checkpoint, open_source, read_architecture
from pipeline.checkpoint.dtypes import cast_checked
from pipeline.checkpoint.linears import layer_linears
from pipeline.checkpoint.options import GROUPED, SMOOTHED
from pipeline.errors import ConfigError, SourceError

if TYPE_CHECKING:
    from pipeline.engines.reference import ReferenceEngine

F32 = npt.NDArray[np.float32]
_MEASURED = (*SMOOTHED, *GROUPED, "fp8", "nvfp4")
# Group sizes that kernels exist for, preferred first.
GROUP_SIZES = (128, 64)
# Tokens on which smoothing strengths are compared, and on which INT4 factors are searched.
_ALPHA_TOKENS = 2048
_SEARCH_TOKENS = 16384


@dataclass(frozen=True, slots=True)
class QuantizationRequest:
    """What to make.

    Attributes:
        source: Model folder or ``.gguf`` file.
        out: Folder for the checkpoint.
        options: Of the conversion; ``alpha``, ``group_size`` and ``ranges`` are filled in here where left open.
        text: What to measure on.
        alpha: Smoothing strength; None chooses by the loss on the calibration text.
        group_size: Weights that share a scale; None takes the largest that fits.
        work: Folder for intermediate results; a later run with the same request goes on where this one was stopped.
        threads: Of the reference engine; None lets it decide. Changes no byte.
    """

    source: Path
    out: Path
    options: ConvertOptions
    text: TextOptions
    alpha: float | None
    group_size: int | None
    work: Path
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class QuantizationReport:
    """What was made: the conversion's report, and what calibration did (JSON values)."""

    conversion: ConversionReport
    calibration: Mapping[str, Any]


def needs_calibration(options: ConvertOptions, source_tensors: Iterable[str]) -> bool:
    """Say whether a conversion needs measured ranges it does not have yet.

    Args:
        options: Of the conversion.
        source_tensors: Names in the source: one that is quantized may bring the scales of activations and cache.
    """
    if options.ranges is not None:
        return False
    names = set(source_tensors)
    has_inputs = any(name.endswith(".input_scale") for name in names)
    has_cache = any(name.endswith((".k_scale", ".v_scale")) for name in names)
    measures_inputs = options.quant in _MEASURED and not (options.quant == "fp8" and has_inputs)
    measures_cache = options.kv_cache is not None and not (options.kv_cache == "fp8" and has_cache)
    return measures_inputs or measures_cache


def quantize_checkpoint(
    request: QuantizationRequest,
    encode: Callable[[str], Sequence[int]],
    *,
    progress: Progress | None = None,
    log: Callable[[str], None] = lambda text: None,
) -> QuantizationReport:
    """Calibrate and convert.

    Raises:
        SourceError: The text is empty, the ranges mean nothing, or the source cannot be converted.
        ConfigError: The scheme does not fit the model.
    """
    job = _Job(request, encode, progress, log)
    options, facts = job.settled()
    conversion = convert_checkpoint(request.source, request.out, options=options, progress=progress)
    check_scales(request.out, floors=options.kv_scale_floor >= 1)
    return QuantizationReport(conversion, facts)


class _Job:
    """One request at work. What is costly is made when it is first needed."""

    def __init__(
        self,
        request: QuantizationRequest,
        encode: Callable[[str], Sequence[int]],
        progress: Progress | None,
        log: Callable[[str], None],
    ) -> None:
        self._request, self._progress, self._log = request, progress, log
        self._text: CalibrationText = read_calibration(request.text, encode)
        self._options = replace(request.options, kv_scale_floor=0.0)
        opened = open_source(request.source, dequantize=True)
        self._source = opened
        self._linears = layer_linears(opened)
        self._architecture = read_architecture(opened.config, str(opened.path))
        self._facts: dict[str, Any] = {"text": self._text.facts()}

    def settled(self) -> tuple[ConvertOptions, dict[str, Any]]:
        """Return options with everything filled in, and what is to be told about it."""
        try:
            self._settle_group()
            self._refuse_misfits()
            values: dict[str, F32] = {}
            if self._options.quant != "int4_awq" or self._options.kv_cache is not None:
                values |= self._measured()
            if self._options.quant in GROUPED:
                values |= self._searched()
            ranges = self._request.work / "ranges.safetensors"
            save_state(ranges, self._identity, values, {})
            self._options = replace(self._options, ranges=ranges)
            if self._options.quant in SMOOTHED:
                self._settle_alpha()
        finally:
            self._source.close()
            if "_engine" in self.__dict__:
                self._engine.close()
        return self._options, self._facts

    def _settle_group(self) -> None:
        if self._options.quant not in GROUPED:
            return
        size = self._request.group_size or largest_group(self._request.source, self._options.tp)
        if self._request.group_size is None:
            self._log(f"group size {size}: the largest of {GROUP_SIZES} that divides every input width of a rank")
        self._options = replace(self._options, group_size=size)
        self._facts["group_size"] = size

    def _refuse_misfits(self) -> None:
        """Find out that the scheme does not fit before the slow part: plan the conversion with ranges of ones."""
        from pipeline.checkpoint.planning import plan_conversion

        stand_in = self._request.work / "stand_in.safetensors"
        values: dict[str, F32] = {}
        for linear, (rows, cols) in self._shapes().items():
            group = self._options.group_size if self._options.quant in GROUPED else cols
            values |= {
                f"{linear}.x": np.ones(cols, np.float32),
                f"{linear}.y": np.ones(rows, np.float32),
                f"{linear}.prequant": np.ones(cols, np.float32),
                f"{linear}.clip": np.ones((rows, max(1, cols // group)), np.float32),
            }
        save_state(stand_in, "", values, {})
        plan_conversion(self._source, replace(self._options, ranges=stand_in, dtype=self._dtype))
        stand_in.unlink()

    def _shapes(self) -> dict[str, tuple[int, int]]:
        tensors = self._source.tensors
        names = [name for layer in self._linears for part in layer.values() for name in part]
        return {
            name: (tensors[f"{name}.weight"].rows, tensors[f"{name}.weight"].cols)
            for name in names
            if f"{name}.weight" in tensors
        }

    def _measured(self) -> dict[str, F32]:
        rows = {name: shape[0] for name, shape in self._shapes().items()}
        values = measure_ranges(
            self._engine.model,
            self._linears,
            rows,
            self._text.sequences,
            batch_size=self._request.text.batch_size,
            workers=self._engine.workers,
            state=self._request.work / "measured.safetensors",
            identity=self._identity,
            progress=self._progress,
        )
        check_ranges(values)
        return {**values, **{f"{name}.w": np.abs(self._weight(name)).max(axis=1) for name in rows}}

    def _searched(self) -> dict[str, F32]:
        sequences: list[tuple[int, ...]] = []
        tokens = 0
        for sequence in self._text.sequences:
            if tokens + len(sequence) > _SEARCH_TOKENS and sequences:
                break
            sequences.append(sequence)
            tokens += len(sequence)
        self._facts["search_tokens"] = tokens
        found = search_int4(
            self._engine.model,
            self._linears,
            self._weight,
            sequences,
            group_size=self._options.group_size,
            dtype=self._dtype,
            batch_size=self._request.text.batch_size,
            workers=self._engine.workers,
            state=self._request.work / "searched.safetensors",
            identity=self._identity,
            progress=self._progress,
        )
        check_ranges(found)
        return found

    def _settle_alpha(self) -> None:
        if self._request.alpha is not None:
            self._options = replace(self._options, alpha=self._request.alpha)
            self._facts["alpha"] = {"value": self._request.alpha, "chosen": "given"}
            return
        alpha, losses = choose_alpha(self._loss_of_alpha)
        self._options = replace(self._options, alpha=alpha)
        self._log(f"alpha {alpha}: least divergence on the calibration text, {losses[alpha]:.4f} nats per token")
        self._facts["alpha"] = {
            "value": alpha,
            "chosen": "least divergence from the unquantized model on calibration text",
            "losses": {f"{key:g}": round(losses[key], 6) for key in sorted(losses)},
        }

    def _loss_of_alpha(self, alpha: float) -> float:
        from pipeline.engines.reference import ReferenceEngine

        key = hashlib.sha256(f"{self._identity}:{self._options.quant}:{self._variant}:{alpha}".encode()).hexdigest()
        state = self._request.work / f"alpha_{alpha:g}.safetensors"
        if (kept := load_state(state, key)) is not None:
            return float(kept[1]["loss"])
        candidate = self._request.work / "candidate"
        shutil.rmtree(candidate, ignore_errors=True)
        options = replace(self._options, alpha=alpha, tp=1, pp=1, digest_source=False, kv_cache=None)
        convert_checkpoint(self._request.source, candidate, options=options)
        engine = ReferenceEngine.load(candidate, threads=self._request.threads)
        try:
            loss = divergence(self._expected, [engine.logits(sequence) for sequence in self._compared])
        finally:
            engine.close()
            shutil.rmtree(candidate)
        save_state(state, key, {}, {"loss": repr(loss)})
        if self._progress is not None:
            self._progress(alpha, None, "alpha")
        return loss

    @property
    def _variant(self) -> str:
        return f"{self._options.per_channel}:{self._options.per_token}:{self._dtype}"

    @cached_property
    def _compared(self) -> list[tuple[int, ...]]:
        """Sequences on which strengths are compared: every n-th, so that the text is covered."""
        count = max(1, _ALPHA_TOKENS // max(1, len(self._text.sequences[0])))
        return list(self._text.sequences[:: max(1, len(self._text.sequences) // count)][:count])

    @cached_property
    def _expected(self) -> list[F32]:
        return [self._engine.logits(sequence) for sequence in self._compared]

    @cached_property
    def _plain(self) -> Path:
        """The 16-bit checkpoint that is measured; kept in the work folder."""
        from pipeline.checkpoint.digest import weights_digest

        plain = self._request.work / "plain"
        note = self._request.work / "plain.json"
        wanted = {"source": weights_digest(self._request.source), "dtype": self._options.dtype}
        if (plain / "config.json").is_file() and note.is_file() and json.loads(note.read_text()) == wanted:
            return plain
        shutil.rmtree(plain, ignore_errors=True)
        options = ConvertOptions(dtype=self._options.dtype, digest_source=False, dequantize=True)
        convert_checkpoint(self._request.source, plain, options=options, progress=self._progress)
        note.write_text(json.dumps(wanted), encoding="utf-8")
        return plain

    @cached_property
    def _engine(self) -> ReferenceEngine:
        from pipeline.engines.reference import EngineError, ReferenceEngine

        try:
            return ReferenceEngine.load(self._plain, threads=self._request.threads)
        except EngineError as error:
            raise SourceError(f"the model cannot be run for calibration: {error}") from error

    @cached_property
    def _identity(self) -> str:
        """Name model and text by content."""
        from pipeline.engines.reference.weights import checkpoint_digest

        ids = json.dumps(self._text.sequences)
        return hashlib.sha256(f"{checkpoint_digest(self._plain)}:{ids}".encode()).hexdigest()

    @cached_property
    def _dtype(self) -> str:
        from pipeline.checkpoint.target_config import resolve_dtype

        return resolve_dtype(self._architecture, self._options)

    def _weight(self, linear: str) -> F32:
        """Return a weight in the values of the checkpoint's type."""
        name = f"{linear}.weight"
        stored = self._source.read(name, 0, self._source.tensors[name].rows)
        return cast_checked(stored, self._dtype, name).astype(np.float32)


def largest_group(source: Path, tp: int) -> int:
    """Return the largest supported group size that divides every input width of a rank.

    Raises:
        ConfigError: None does; names the widths.
    """
    opened = open_source(source)
    architecture = read_architecture(opened.config, str(opened.path))
    opened.close()
    widths = {
        "attention.qkv": architecture.hidden_size,
        "attention.dense": architecture.num_heads * architecture.head_dim // tp,
        "mlp.proj": architecture.intermediate_size // tp,
    }
    for size in GROUP_SIZES:
        if all(width % size == 0 for width in widths.values()):
            return size
    listed = ", ".join(f"{name} {width}" for name, width in widths.items())
    raise ConfigError(
        f"no group size of {GROUP_SIZES} divides the input widths of a rank at tp {tp}: {listed}",
        hint="choose a smaller tp, or another precision",
    )
