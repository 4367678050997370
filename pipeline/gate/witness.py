"""Makes baselines: runs a trusted engine over the protocol and keeps what it said."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from pipeline.engines.protocol import Engine
from pipeline.errors import SourceError
from pipeline.gate.baseline import Baseline, BaselineKind
from pipeline.gate.prompts import MAX_NEW_TOKENS, Continuation, Prompt, generate_greedily
from pipeline.gate.protocol import Protocol
from pipeline.gate.scoring import NothingMeasured, Progress, score_text
from pipeline.gate.tasks import Task, score_task

# Alternatives kept per position by baselines that are artefacts (a few MB); the shipped ones keep 4.
TOP_K = 64


def take_baseline(
    engine: Engine,
    *,
    kind: BaselineKind,
    source_digest: str,
    tokenizer_digest: str,
    protocol: Protocol,
    token_ids: npt.NDArray[np.int32],
    prompts: Sequence[Prompt],
    decode: Callable[[Sequence[int]], str],
    end_ids: Sequence[int],
    tasks: Sequence[Task] = (),
    top_k: int = TOP_K,
    bos_id: int | None = None,
    max_new_tokens: int = MAX_NEW_TOKENS,
    versions: Mapping[str, str] | None = None,
    made_by: str = "",
    progress: Progress | None = None,
) -> Baseline:
    """Let ``engine`` answer everything the gate will ask a candidate.

    Raises:
        SourceError: The engine gives nothing that could be compared with.
    """
    text = token_ids[: protocol.tokens]
    if len(text) < protocol.tokens:
        raise SourceError(f"gate text: {len(text)} tokens, protocol {protocol.name!r} needs {protocol.tokens}")
    if obstacle := protocol.obstacle(engine.info.max_seq_len):
        raise SourceError(f"baseline {kind}: {obstacle}")
    try:
        scores = score_text(engine, text, protocol, top_k=top_k, bos_id=bos_id, progress=progress)
        task_scores = tuple(score_task(engine, task) for task in tasks)
    except NothingMeasured as error:
        raise SourceError(f"baseline {kind}: {error}") from error
    generations = generate_greedily(engine, prompts, end_ids=end_ids, max_new_tokens=max_new_tokens)
    return Baseline(
        kind=kind,
        source_digest=source_digest,
        tokenizer_digest=tokenizer_digest,
        engine_kind=engine.info.kind,
        checkpoint_digest=engine.info.checkpoint_digest,
        vocab_size=engine.info.vocab_size,
        protocol=protocol,
        token_ids=text,
        logprobs=scores.logprobs,
        top_ids=scores.alternatives,
        top_logprobs=scores.alternative_logprobs,
        continuations=tuple(
            Continuation(
                prompt,
                generation.token_ids,
                decode([token for token in generation.token_ids if token not in end_ids]),
            )
            for prompt, generation in zip(prompts, generations, strict=True)
        ),
        max_new_tokens=max_new_tokens,
        end_ids=tuple(end_ids),
        tasks=task_scores,
        versions=dict(versions or {}),
        made_by=made_by,
    )
