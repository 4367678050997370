"""What a candidate is compared with: the answers of a trusted witness, as data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pipeline.engines.protocol import EngineInfo
from pipeline.errors import SourceError
from pipeline.gate.prompts import Continuation, Prompt
from pipeline.gate.protocol import Protocol

BaselineKind = Literal["transformers", "recorded", "unquantized"]
SCHEMA_VERSION = 1

# A model that saves less than this share of the entropy of blind guessing has learned nothing to compare with.
_CHANCE_SHARE = 0.05

WHAT_IT_SHOWS: Mapping[str, str] = {
    "transformers": "transformers on the source weights: conversion, quantization and engine are judged",
    "recorded": "values transformers gave for exactly these source weights: conversion, quantization and engine are"
    " judged",
    "unquantized": "the reference engine on an unquantized conversion: quantization is judged; errors of the conversion"
    " or of the engine itself would be in both and cannot be seen",
}


@dataclass(frozen=True, slots=True)
class TaskScores:
    """Log-likelihoods of the choices of a multiple-choice task.

    Attributes:
        name: ``hellaswag`` …
        digest: sha256 of the task's file.
        loglikelihoods: Per item, per choice: summed log probability in nats.
    """

    name: str
    digest: str
    loglikelihoods: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Baseline:
    """Scores, continuations and identity of the witness.

    Attributes:
        kind: Where it comes from; decides what a comparison can show.
        source_digest: Of the source weights: sha256 over compact JSON of [name, dtype, shape, sha256 of bytes] per
            tensor, sorted by name.
        tokenizer_digest: See :func:`tokenizer_digest`.
        engine_kind: ``transformers``, ``reference`` …
        checkpoint_digest: Of what the witness loaded; with ``engine_kind`` it tells whether two witnesses are one.
        vocab_size: Without padding.
        protocol: Under which the text was scored.
        token_ids: [protocol.tokens] int32, the text as the witness saw it.
        logprobs: [tokens - 1] float32, of token 1 … given its context, in nats.
        top_ids: [tokens - 1, k] int32, the k most probable tokens, best first.
        top_logprobs: [tokens - 1, k] float32, theirs.
        continuations: Greedy answers to a few prompts.
        max_new_tokens: Limit they ran under.
        end_ids: Tokens that ended them.
        tasks: Multiple-choice scores.
        versions: Of what made it.
        made_by: Script or stage.
    """

    kind: BaselineKind
    source_digest: str
    tokenizer_digest: str
    engine_kind: str
    checkpoint_digest: str
    vocab_size: int
    protocol: Protocol
    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    top_ids: npt.NDArray[np.int32]
    top_logprobs: npt.NDArray[np.float32]
    continuations: tuple[Continuation, ...]
    max_new_tokens: int
    end_ids: tuple[int, ...]
    tasks: tuple[TaskScores, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    made_by: str = ""

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log probability per token."""
        return float(np.exp(-self.logprobs.mean(dtype=np.float64)))

    def at_chance(self) -> bool:
        """Say whether the witness itself predicts no better than blind guessing."""
        gained = float(self.logprobs.mean(dtype=np.float64)) + float(np.log(self.vocab_size))
        return not gained > _CHANCE_SHARE * float(np.log(self.vocab_size))

    def under(self, protocol: Protocol) -> Baseline:
        """Cut the scores to a shorter protocol; call only when ``self.protocol.covers(protocol)``."""
        count = protocol.tokens
        return replace(
            self,
            protocol=protocol,
            token_ids=self.token_ids[:count],
            logprobs=self.logprobs[: count - 1],
            top_ids=self.top_ids[: count - 1],
            top_logprobs=self.top_logprobs[: count - 1],
        )

    def objections(
        self,
        candidate: EngineInfo,
        *,
        source_digest: str,
        tokenizer_digest: str,
        protocol: Protocol,
        token_ids: npt.NDArray[np.int32],
    ) -> list[str]:
        """List why this baseline cannot judge the candidate; empty when it can."""
        found = []
        if (candidate.kind, candidate.checkpoint_digest) == (self.engine_kind, self.checkpoint_digest):
            found.append("the baseline is the candidate itself (same checkpoint, same engine): nothing was compared")
        if source_digest != self.source_digest:
            found.append(f"the baseline is of other weights: {self.source_digest:.12} instead of {source_digest:.12}")
        if tokenizer_digest != self.tokenizer_digest:
            found.append(
                f"the baseline is of another tokenizer: {self.tokenizer_digest:.12} instead of {tokenizer_digest:.12}"
            )
        if candidate.vocab_size != self.vocab_size:
            found.append(f"the baseline has {self.vocab_size} tokens, the candidate {candidate.vocab_size}")
        if not self.protocol.covers(protocol):
            found.append(f"the baseline was taken under another protocol: {self.protocol} instead of {protocol}")
        elif not np.array_equal(self.token_ids[: protocol.tokens], token_ids[: protocol.tokens]):
            found.append("the baseline saw other tokens: the text is tokenized differently")
        if self.at_chance():
            found.append(f"the baseline is at chance: perplexity {self.perplexity:.0f} of {self.vocab_size} tokens")
        return found


def tokenizer_digest(vocabulary: Mapping[str, int]) -> str:
    """Name a tokenizer by its vocabulary: sha256 over compact JSON of [piece, id] sorted by id, then piece.

    That two tokenizers also split alike is checked on the evaluation text itself, token by token.
    """
    rows = sorted(((piece, int(index)) for piece, index in vocabulary.items()), key=lambda row: (row[1], row[0]))
    return hashlib.sha256(json.dumps(rows, separators=(",", ":"), ensure_ascii=True).encode()).hexdigest()


def save_baseline(baseline: Baseline, folder: Path, name: str) -> None:
    """Write ``<name>.json`` and ``<name>.safetensors``.

    Alternatives are stored as float16 and ids in the smallest type that holds them: a rounded baseline distribution
    is still a distribution, and its divergence from the true one is of second order (1e-7).
    """
    from safetensors.numpy import save

    id_type = np.uint16 if baseline.vocab_size <= 1 << 16 else np.int32
    arrays = {
        "token_ids": baseline.token_ids.astype(id_type),
        "logprobs": baseline.logprobs.astype(np.float32),
        "top_ids": baseline.top_ids.astype(id_type),
        "top_logprobs": baseline.top_logprobs.astype(np.float16),
    }
    folder.mkdir(parents=True, exist_ok=True)
    data = save({key: np.ascontiguousarray(value) for key, value in arrays.items()})
    (folder / f"{name}.safetensors").write_bytes(data)
    document = {
        "schema_version": SCHEMA_VERSION,
        "kind": baseline.kind,
        "source_digest": baseline.source_digest,
        "tokenizer_digest": baseline.tokenizer_digest,
        "engine_kind": baseline.engine_kind,
        "checkpoint_digest": baseline.checkpoint_digest,
        "vocab_size": baseline.vocab_size,
        "protocol": baseline.protocol.to_json(),
        "perplexity": round(baseline.perplexity, 6),
        "arrays_sha256": hashlib.sha256(data).hexdigest(),
        "max_new_tokens": baseline.max_new_tokens,
        "end_ids": list(baseline.end_ids),
        "made_by": baseline.made_by,
        "versions": dict(baseline.versions),
        "continuations": [
            {
                "name": entry.prompt.name,
                "kind": entry.prompt.kind,
                "prompt": entry.prompt.text,
                "prompt_ids": list(entry.prompt.token_ids),
                "token_ids": list(entry.token_ids),
                "text": entry.text,
            }
            for entry in baseline.continuations
        ],
        "tasks": [
            {
                "name": task.name,
                "digest": task.digest,
                "loglikelihoods": [[round(value, 4) for value in row] for row in task.loglikelihoods],
            }
            for task in baseline.tasks
        ],
    }
    text = json.dumps(document, ensure_ascii=False, indent=None, separators=(",", ":"))
    (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def load_baseline(path: Path) -> Baseline:
    """Read a baseline from its json file; the arrays lie beside it.

    Raises:
        SourceError: A file is missing, damaged, of another schema, or the pair does not belong together.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    arrays_path = path.with_suffix(".safetensors")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        data = arrays_path.read_bytes()
        if document.get("schema_version") != SCHEMA_VERSION:
            raise SourceError(f"{path}: schema_version {document.get('schema_version')}, expected {SCHEMA_VERSION}")
        found = hashlib.sha256(data).hexdigest()
        if found != document["arrays_sha256"]:
            raise SourceError(f"{arrays_path}: sha256 is {found}, {path.name} expects {document['arrays_sha256']}")
        return _from_document(document, load(data))
    except OSError as error:
        raise SourceError(f"baseline {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise SourceError(f"baseline {path}: damaged ({type(error).__name__}: {error})") from error


def _from_document(document: dict[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Baseline:
    continuations = tuple(
        Continuation(
            Prompt(entry["name"], entry["kind"], entry["prompt"], _ids(entry["prompt_ids"])),
            _ids(entry["token_ids"]),
            entry["text"],
        )
        for entry in document["continuations"]
    )
    return Baseline(
        kind=document["kind"],
        source_digest=document["source_digest"],
        tokenizer_digest=document["tokenizer_digest"],
        engine_kind=document["engine_kind"],
        checkpoint_digest=document["checkpoint_digest"],
        vocab_size=int(document["vocab_size"]),
        protocol=Protocol(**document["protocol"]),
        token_ids=arrays["token_ids"].astype(np.int32),
        logprobs=arrays["logprobs"].astype(np.float32),
        top_ids=arrays["top_ids"].astype(np.int32),
        top_logprobs=arrays["top_logprobs"].astype(np.float32),
        continuations=continuations,
        max_new_tokens=int(document["max_new_tokens"]),
        end_ids=_ids(document["end_ids"]),
        tasks=tuple(
            TaskScores(task["name"], task["digest"], tuple(tuple(map(float, row)) for row in task["loglikelihoods"]))
            for task in document["tasks"]
        ),
        versions=document["versions"],
        made_by=document["made_by"],
    )


def _ids(values: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


def find_recorded(source_digest: str, folder: Path | None = None) -> Baseline | None:
    """Return the shipped baseline for exactly these source weights, if there is one.

    Args:
        source_digest: Of the weights the candidate was made from.
        folder: Where to look instead of the package's own ``baselines``.
    """
    for path in sorted((folder or Path(__file__).parent / "baselines").glob("*.json")):
        if json.loads(path.read_text(encoding="utf-8")).get("source_digest") == source_digest:
            return load_baseline(path)
    return None
