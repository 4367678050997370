"""The gate on checkpoints of the tiny model, in a second: the unquantized conversion is the baseline."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path

from calibration_models import TINY

from pipeline.checkpoint import ConvertOptions, convert_checkpoint, write_tokenizer
from pipeline.engines.reference import ReferenceEngine
from pipeline.gate.baseline import Baseline
from pipeline.gate.evaluate import evaluate
from pipeline.gate.protocol import QUICK, shipped_text
from pipeline.gate.thresholds import default_thresholds
from pipeline.gate.tokenizer import GateTokenizer
from pipeline.gate.verdict import judge
from pipeline.gate.witness import take_baseline

PROTOCOL = dataclasses.replace(QUICK, tokens=1024, window=256, stride=128)


@cache
def _witness(folder: Path) -> tuple[GateTokenizer, Baseline]:
    convert_checkpoint(TINY, folder / "checkpoint", options=ConvertOptions(dtype="bfloat16"))
    write_tokenizer(TINY, folder / "tokenizer")
    tokenizer = GateTokenizer.load(folder / "tokenizer")
    baseline = take_baseline(
        ReferenceEngine.load(folder / "checkpoint", threads=1),
        kind="unquantized",
        source_digest="tiny",
        tokenizer_digest=tokenizer.digest,
        protocol=PROTOCOL,
        token_ids=tokenizer.text_ids(shipped_text(), PROTOCOL),
        prompts=(),
        decode=tokenizer.decode,
        end_ids=tokenizer.end_ids,
        bos_id=tokenizer.bos_id,
        made_by="test",
    )
    return tokenizer, baseline


def verdict_of(checkpoint: Path, precision: str, scratch: Path) -> str:
    """Return the verdict of the precision's own limits."""
    tokenizer, baseline = _witness(scratch / "witness")
    thresholds = default_thresholds(precision, 250_000)
    evaluation = evaluate(
        ReferenceEngine.load(checkpoint, threads=1),
        source_digest="tiny",
        tokenizer_digest=tokenizer.digest,
        token_ids=tokenizer.text_ids(shipped_text(), PROTOCOL),
        baseline=baseline,
        protocol=PROTOCOL,
        thresholds=thresholds,
        decode=tokenizer.decode,
        generations=0,
    )
    return judge(evaluation, thresholds).status
