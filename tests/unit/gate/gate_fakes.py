"""A model small enough to check by hand: the logits of the next token depend on the last token only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pipeline.engines.protocol import EngineInfo, Generation, Request
from pipeline.gate.baseline import Baseline
from pipeline.gate.prompts import Prompt
from pipeline.gate.protocol import Protocol
from pipeline.gate.witness import take_baseline

VOCAB = 48
END = 47
NEWLINE = 46
PROTOCOL = Protocol("test", "made up", "0" * 64, tokens=2048, window=256, stride=128)
SOURCE, TOKENIZER = "5" * 64, "7" * 64


@dataclass
class TableEngine:
    """Logits by last token, [V, V]; optional relative noise, different at every call and seed."""

    table: np.ndarray
    digest: str = "candidate"
    kind: str = "reference"
    noise: float = 0.0
    seed: int = 0
    calls: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(self.kind, self.digest, VOCAB, 4096)

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        self.calls.append(list(token_ids))
        rows = self.table[np.asarray(token_ids)]
        return (rows * (1 + self.noise * self._random.standard_normal(rows.shape))).astype(np.float32)

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        answers = []
        for request in requests:
            ids, made = list(request.token_ids), []
            while len(made) < request.max_tokens:
                made.append(int(self.table[ids[-1]].argmax()))
                ids.append(made[-1])
                if made[-1] in request.end_ids:
                    break
            answers.append(Generation(request.request_id, tuple(made), "stop" if made[-1] == END else "length"))
        return answers


def sound_table(sharpness: float = 1.5) -> np.ndarray:
    """Return random logits whose greedy walk visits 46 tokens before it repeats: no short cycle."""
    table = np.random.default_rng(11).standard_normal((VOCAB, VOCAB)).astype(np.float32) * sharpness
    best = table.max(axis=1)
    for token in range(VOCAB):
        table[token, (token * 5 + 1) % 46] = best[token] + 0.02
    table[:, END] -= 6
    return table


def sampled_text(table: np.ndarray, tokens: int = 2048) -> np.ndarray:
    """Draw a text from the model itself."""
    random = np.random.default_rng(5)
    p = np.exp(table - table.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    ids = [0]
    while len(ids) < tokens:
        ids.append(int(random.choice(VOCAB, p=p[ids[-1]])))
    return np.asarray(ids, dtype=np.int32)


PROMPTS = tuple(Prompt(f"p{start}", "text", f"prompt {start}", (start,)) for start in (0, 7, 12, 30))


def decode(ids: Sequence[int]) -> str:
    return "".join("\n" if token == NEWLINE else f" {token}" for token in ids)


def table_baseline(table: np.ndarray, text: np.ndarray, **changes: object) -> Baseline:
    """Let the table be the witness, under another engine's name."""
    arguments: dict[str, object] = {
        "kind": "recorded",
        "source_digest": SOURCE,
        "tokenizer_digest": TOKENIZER,
        "protocol": PROTOCOL,
        "token_ids": text,
        "prompts": PROMPTS,
        "decode": decode,
        "end_ids": (END,),
        "top_k": 8,
    }
    engine = TableEngine(table, digest=SOURCE, kind="transformers")
    return take_baseline(engine, **{**arguments, **changes})  # type: ignore[arg-type]
