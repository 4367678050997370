"""``checkpoint convert --calibration``: measure, then convert."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.checkpoint.commands import Progress
from pipeline.checkpoint.options import ConvertOptions

_SHIPPED = "shipped"


def calibrate(args: argparse.Namespace, options: ConvertOptions, progress: Progress | None) -> Mapping[str, Any]:
    """Convert as the command line says and return the values of its report.

    Intermediate results stay in a hidden folder beside OUT until the checkpoint is there: a command that was stopped
    goes on where it was.

    Raises:
        PipelineError: The text, the source or the options are not usable.
    """
    from pipeline.calibration.quantize import QuantizationRequest, needs_calibration, quantize_checkpoint
    from pipeline.calibration.texts import TextOptions
    from pipeline.checkpoint import convert_checkpoint, open_source

    opened = open_source(args.source)
    opened.close()
    if not needs_calibration(options, opened.tensors):
        return asdict(convert_checkpoint(args.source, args.out, options=options, progress=progress))
    work = args.out.absolute().with_name(f".{args.out.name}.calibration")
    given = args.alpha if isinstance(args.alpha, float) else None
    text = None if args.calibration == _SHIPPED else Path(args.calibration)
    request = QuantizationRequest(
        source=args.source,
        out=args.out,
        options=options,
        text=TextOptions(text, args.calibration_field, args.samples, args.seq_len),
        alpha=options.alpha if args.alpha is None and args.quant == "smoothquant" else given,
        group_size=args.group_size if isinstance(args.group_size, int) else None,
        work=work,
    )
    report = quantize_checkpoint(request, Encoder(args.source, work / "tokenizer"), progress=progress)
    shutil.rmtree(work)
    return {**asdict(report.conversion), "calibration": dict(report.calibration)}


class Encoder:
    """Text to ids by the tokenizer of a source, which is looked for when the first text comes."""

    def __init__(self, source: Path, folder: Path) -> None:
        """Remember where the source is, and a folder for its tokenizer."""
        self._source, self._folder = source, folder

    def __call__(self, text: str) -> Sequence[int]:
        """Return ids without special tokens.

        Raises:
            SourceError: The source has no tokenizer.
        """
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        from pipeline.checkpoint import write_tokenizer

        shutil.rmtree(self._folder, ignore_errors=True)
        write_tokenizer(self._source, self._folder)
        return Tokenizer.from_file(str(self._folder / "tokenizer.json"))
