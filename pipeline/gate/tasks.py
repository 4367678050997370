"""Multiple-choice tasks from local jsonl files, scored by log-likelihood as lm-evaluation-harness does.

``acc`` takes the choice with the largest summed log probability, ``acc_norm`` the largest per character of the choice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.engines.protocol import Engine
from pipeline.errors import SourceError
from pipeline.gate.baseline import TaskScores
from pipeline.gate.scoring import NothingMeasured, Progress, score_continuation


@dataclass(frozen=True, slots=True)
class TaskFormat:
    """How an item's fields become context and choices.

    Attributes:
        context: ``str.format`` template over the item's fields.
        choices: Field with the list of choices.
        answer: Field with the index of the right one.
    """

    context: str
    choices: str
    answer: str


# The first format whose fields an item has is used.
FORMATS = (
    TaskFormat("{context}", "choices", "answer"),
    TaskFormat("{activity_label}: {ctx}", "endings", "expected_index"),
    TaskFormat("Q: {question}\nA:", "choices", "expected_index"),
)


SHIPPED = ("hellaswag", "truthfulqa_mc1")


def task_path(name: str) -> Path:
    """Return the file of a shipped task, or the user's own jsonl file.

    Raises:
        SourceError: Neither.
    """
    if name in SHIPPED:
        return Path(__file__).parent / "data" / f"{name}.jsonl"
    path = Path(name)
    if not path.is_file():
        raise SourceError(f"task {name!r}: no such file, and not one of {', '.join(SHIPPED)}")
    return path


@dataclass(frozen=True, slots=True)
class Item:
    """One question.

    Attributes:
        context: Text before the choice.
        choices: Texts, without leading space.
        answer: Index of the right choice.
        context_ids: Tokens of the context.
        choice_ids: Tokens of each choice behind the context.
    """

    context: str
    choices: tuple[str, ...]
    answer: int
    context_ids: tuple[int, ...]
    choice_ids: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Task:
    """A named set of questions; ``digest`` is the sha256 of the file."""

    name: str
    digest: str
    items: tuple[Item, ...]

    @property
    def chance(self) -> float:
        """Expected accuracy of guessing."""
        return float(np.mean([1 / len(item.choices) for item in self.items]))


def load_task(path: Path, encode: Callable[[str], Sequence[int]], *, limit: int | None = None) -> Task:
    """Read a task from jsonl.

    Args:
        path: One JSON object a line; fields as in one of :data:`FORMATS`.
        encode: Text to ids without special tokens.
        limit: Use the first items only.

    Raises:
        SourceError: A line is not JSON, lacks fields, or its answer is not one of its choices.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SourceError(f"task {path}: {error.strerror}") from error
    lines = [line for line in data.decode("utf-8", errors="replace").splitlines() if line.strip()]
    items = tuple(_item(line, encode, f"{path}:{number}") for number, line in enumerate(lines[:limit], 1))
    if not items:
        raise SourceError(f"task {path}: no items")
    return Task(path.stem, hashlib.sha256(data).hexdigest(), items)


def _item(line: str, encode: Callable[[str], Sequence[int]], where: str) -> Item:
    try:
        entry: Mapping[str, Any] = json.loads(line)
        layout = next(f for f in FORMATS if f.choices in entry and f.answer in entry and _fills(f.context, entry))
    except (json.JSONDecodeError, StopIteration, TypeError, RecursionError) as error:
        wanted = "; ".join(f"{f.context!r}, {f.choices}, {f.answer}" for f in FORMATS)
        raise SourceError(f"{where}: not a multiple-choice item; expected the fields of one of: {wanted}") from error
    choices = entry[layout.choices]
    answer = entry[layout.answer]
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(c, str) and c for c in choices):
        raise SourceError(f"{where}: {layout.choices} must be a list of two or more texts, found {choices!r:.80}")
    if not isinstance(answer, int) or not 0 <= answer < len(choices):
        raise SourceError(f"{where}: {layout.answer}={answer!r}, expected an index below {len(choices)}")
    context = layout.context.format(**entry)
    context_ids = tuple(encode(context))
    # Encoded together and cut: a tokenizer may join the space with the first word, as lm-evaluation-harness does.
    choice_ids = tuple(tuple(encode(f"{context} {choice}")[len(context_ids) :]) for choice in choices)
    if not context_ids or not all(choice_ids):
        raise SourceError(f"{where}: context or choice has no tokens")
    return Item(context, tuple(choices), answer, context_ids, choice_ids)


def _fills(template: str, entry: Mapping[str, Any]) -> bool:
    try:
        template.format(**entry)
    except KeyError:
        return False
    return True


def score_task(engine: Engine, task: Task, progress: Progress | None = None) -> TaskScores:
    """Score every choice of every item.

    Raises:
        NothingMeasured: The engine's answers cannot be scored, all choices of all items tie, or all items score alike.
    """
    rows = []
    for done, item in enumerate(task.items, 1):
        rows.append(tuple(score_continuation(engine, item.context_ids, ids)[0] for ids in item.choice_ids))
        if progress is not None:
            progress(float(done), float(len(task.items)), f"{task.name} items")
    if all(max(row) == min(row) for row in rows):
        raise NothingMeasured(f"task {task.name}: all choices tied in every item")
    if len(rows) > 1 and len(set(rows)) == 1:
        raise NothingMeasured(f"task {task.name}: identical scores for all items")
    return TaskScores(task.name, task.digest, tuple(rows))


@dataclass(frozen=True, slots=True)
class TaskHits:
    """Which items were answered rightly: [items] bool each."""

    acc: npt.NDArray[np.bool_]
    acc_norm: npt.NDArray[np.bool_]


def hits(task: Task, scores: TaskScores) -> TaskHits:
    """Choose by summed and by length-normalized log-likelihood.

    Source: lm-evaluation-harness, multiple_choice: acc_norm divides by the characters of the choice.
    """
    plain, normalized = [], []
    for item, row in zip(task.items, scores.loglikelihoods, strict=True):
        values = np.asarray(row)
        plain.append(int(values.argmax()) == item.answer)
        lengths = np.asarray([len(choice) for choice in item.choices], dtype=np.float64)
        normalized.append(int((values / lengths).argmax()) == item.answer)
    return TaskHits(np.asarray(plain), np.asarray(normalized))
