"""Runs a candidate through the protocol and compares it with a baseline."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from pipeline.engines.protocol import Engine
from pipeline.gate import comparison
from pipeline.gate.baseline import Baseline
from pipeline.gate.comparison import Decode
from pipeline.gate.evaluation import Evaluation
from pipeline.gate.protocol import Protocol
from pipeline.gate.scoring import NothingMeasured, Progress, score_text
from pipeline.gate.tasks import Task
from pipeline.gate.thresholds import Thresholds

_CAVEATS = {
    "unquantized": "The baseline is the reference engine on an unquantized conversion: this says nothing about the "
    "conversion itself.",
}


def evaluate(
    candidate: Engine,
    *,
    source_digest: str,
    tokenizer_digest: str,
    token_ids: npt.NDArray[np.int32],
    baseline: Baseline,
    protocol: Protocol,
    thresholds: Thresholds,
    decode: Decode,
    tasks: Sequence[Task] = (),
    generations: int | None = None,
    generation_tokens: int | None = None,
    bos_id: int | None = None,
    not_measured: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Measure ``candidate`` against ``baseline``.

    A candidate that cannot be measured does not raise: the evaluation carries the reason in ``problems`` and is judged
    invalid. Work that cannot matter any more is skipped.

    Args:
        candidate: The engine on the emitted artefact.
        source_digest: Of the weights the artefact was made from.
        tokenizer_digest: Of the tokenizer that ships with it.
        token_ids: [protocol.tokens] int32 or more, the evaluation text.
        baseline: Whose answers count as right.
        protocol: What to run; the baseline must cover it.
        thresholds: Only ``confidence`` matters here.
        decode: Ids to text, for people and for blank output.
        tasks: Multiple-choice tasks; the baseline must have scored the same files.
        generations: Prompts to continue; None for all the baseline has, 0 for none.
        generation_tokens: New tokens per prompt at most; None for as many as the baseline made.
        bos_id: First token, where the protocol wants one.
        not_measured: Measures this candidate cannot give and why: ``text`` (no context logits), ``generation``.
        progress: Called with done, total, unit.

    Raises:
        PipelineError: The engine itself failed.
    """
    started = time.monotonic()
    skipped = dict(not_measured or {})
    problems = baseline.objections(
        candidate.info,
        source_digest=source_digest,
        tokenizer_digest=tokenizer_digest,
        protocol=protocol,
        token_ids=token_ids,
    )
    if "text" not in skipped and (obstacle := protocol.obstacle(candidate.info.max_seq_len)):
        problems.append(obstacle)
    caveats = tuple(_CAVEATS[kind] for kind in (baseline.kind,) if kind in _CAVEATS)
    evaluation = Evaluation(candidate.info, baseline, protocol, tuple(problems), skipped, caveats)
    if problems:
        return replace(evaluation, not_measured={**skipped, "text": "not run: nothing could be proven"})
    baseline = _shortened(baseline.under(protocol), generations, generation_tokens, decode)
    evaluation = replace(evaluation, baseline=baseline)
    try:
        if "text" not in skipped:
            evaluation = _text(evaluation, candidate, token_ids, thresholds.confidence, decode, bos_id, progress)
        for task in tasks:
            compared = comparison.compare_task(candidate, task, baseline, progress)
            measures = (*evaluation.measures, comparison.task_measure(compared, thresholds.confidence))
            evaluation = replace(evaluation, tasks=(*evaluation.tasks, compared), measures=measures)
        if "generation" not in skipped and baseline.continuations:
            answers = comparison.compare_continuations(candidate, baseline, decode, progress)
            measures = (*evaluation.measures, *comparison.generation_measures(answers))
            evaluation = replace(evaluation, continuations=answers, measures=measures)
    except NothingMeasured as error:
        problems.append(str(error))
    if not evaluation.measures and not problems:
        problems.append("nothing was measured: " + "; ".join(f"{key}: {why}" for key, why in skipped.items()))
    return replace(evaluation, problems=tuple(problems), seconds=time.monotonic() - started)


def _text(
    evaluation: Evaluation,
    candidate: Engine,
    token_ids: npt.NDArray[np.int32],
    confidence: float,
    decode: Decode,
    bos_id: int | None,
    progress: Progress | None,
) -> Evaluation:
    """Add what the text says."""
    baseline = evaluation.baseline
    alternatives = baseline.top_ids if baseline.top_ids.shape[1] else None
    scores = score_text(
        candidate, token_ids, evaluation.protocol, alternatives=alternatives, bos_id=bos_id, progress=progress
    )
    differences = baseline.logprobs.astype(np.float64) - scores.logprobs
    divergences = comparison.divergences(baseline, scores)
    skipped = dict(evaluation.not_measured)
    if not divergences.size:
        skipped["kl"] = "the baseline holds no distributions"
    return replace(
        evaluation,
        not_measured=skipped,
        measures=tuple(comparison.text_measures(baseline, scores, differences, divergences, confidence)),
        differences=differences,
        divergences=divergences,
        scores=scores,
        worst_passages=comparison.worst_passages(differences, token_ids, decode),
    )


def _shortened(baseline: Baseline, generations: int | None, generation_tokens: int | None, decode: Decode) -> Baseline:
    """Keep the first continuations and cut them; a greedy answer's beginning is the answer to the smaller limit."""
    kept = baseline.continuations[:generations]
    if generation_tokens is not None and generation_tokens < baseline.max_new_tokens:
        cut = [entry.token_ids[:generation_tokens] for entry in kept]
        kept = tuple(
            replace(entry, token_ids=ids, text=decode([token for token in ids if token not in baseline.end_ids]))
            for entry, ids in zip(kept, cut, strict=True)
        )
        baseline = replace(baseline, max_new_tokens=generation_tokens)
    return replace(baseline, continuations=kept)
