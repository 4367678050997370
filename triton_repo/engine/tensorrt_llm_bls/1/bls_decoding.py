"""What the text model does between its calls to other models: drafts, stop strings, exact text of a stream.

Pure Python; knows nothing of Triton.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field


class StopCutter:
    """Cuts a text that arrives in parts before the first stop string, and never shows a part of one.

    Args:
        stops: Stop strings; empty ones are ignored.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.is_stopped = False

    def feed(self, text: str, *, is_last: bool = False) -> str:
        """Return what may be shown now."""
        if self.is_stopped:
            return ""
        self._held += text
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            self.is_stopped = True
            shown, self._held = self._held[: min(places)], ""
            return shown
        keep = 0 if is_last else self._longest_beginning()
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def _longest_beginning(self) -> int:
        """Return how many characters at the end may be the beginning of a stop string."""
        longest = min(max(map(len, self._stops), default=1) - 1, len(self._held))
        return next(
            (
                size
                for size in range(longest, 0, -1)
                if any(stop.startswith(self._held[-size:]) for stop in self._stops)
            ),
            0,
        )


@dataclass
class TextStream:
    """The text of one sequence.

    Attributes:
        decode: Called with the ids before, the new ids and whether they are the last; returns what the new ones add.
        stops: Stop strings.
    """

    decode: Callable[[list[int], list[int], bool], str]
    stops: Sequence[str] = ()
    _ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._cutter = StopCutter(self.stops)

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._cutter.is_stopped

    def add(self, ids: list[int]) -> str:
        """Return the text that new ids let out."""
        text = self.decode(self._ids, ids, False) if ids else ""
        self._ids = self._ids + ids
        return self._cutter.feed(text)

    def end(self) -> str:
        """Return what was held back: bytes that will not be completed, the beginning of a stop string."""
        return self._cutter.feed(self.decode(self._ids, [], True) if self._ids else "", is_last=True)


def words_of(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the words of a list in the backend's format: all ids, and below them the end of each word."""
    ids, ends = rows
    words, start = [], 0
    for end in ends:
        if end < 0:
            break
        words.append(list(ids[start:end]))
        start = end
    return words


@dataclass
class Drafting:
    """Counts of one request.

    Attributes:
        drafted: Tokens that the draft engine made.
        accepted: Those of them that the target kept.
    """

    drafted: int = 0
    accepted: int = 0


def speculate(
    prompt: Sequence[int],
    *,
    max_tokens: int,
    draft_tokens: int,
    stop_words: Sequence[Sequence[int]],
    draft: Callable[[list[int], int], tuple[list[int], object]],
    target: Callable[[list[int], list[int], object, int], list[int]],
    counts: Drafting,
) -> Iterator[list[int]]:
    """Yield new tokens as the target confirms them: the same tokens that it makes alone.

    In each round the draft engine continues the text, and the target returns what it agrees with and one token of its
    own. An answer that holds nothing of its own has met the end id, which is not part of answers.

    Args:
        prompt: Ids of the prompt.
        max_tokens: New tokens at most.
        draft_tokens: Drafted in one round.
        stop_words: End the text and are part of it.
        draft: Called with all ids and a number; returns ids and what the target may want to know of them.
        target: Called with all ids, the draft, what draft said of it, and the number of tokens to return at most.
        counts: Updated in place.
    """
    made: list[int] = []
    while len(made) < max_tokens:
        ids = [*prompt, *made]
        wanted = min(draft_tokens, max_tokens - len(made) - 1)
        drafted, details = draft(ids, wanted) if wanted > 0 else ([], None)
        answer = target(ids, drafted, details, len(drafted) + 1)
        agreed = next((k for k, pair in enumerate(zip(answer, drafted, strict=False)) if pair[0] != pair[1]), None)
        if agreed is None:
            agreed = min(len(answer), len(drafted))
        counts.drafted += len(drafted)
        counts.accepted += agreed
        has_own = len(answer) > agreed
        new = []
        for token in answer[: max_tokens - len(made)]:
            made.append(token)
            new.append(token)
            if any(made[-len(word) :] == list(word) for word in stop_words if word):
                has_own = False
                break
        if new:
            yield new
        if not has_own:
            return
