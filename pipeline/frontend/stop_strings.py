"""Stop strings, matched on text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the first stop string to be complete and never lets a part of one out.

    The result does not depend on how the text is cut into pieces: the stop string that ends first wins, and among
    those ending together the longest.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """Start at the beginning of a text.

        Args:
            stops: Non-empty strings.
            include: Keep the stop string in the text.
        """
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take more text; return what can be shown. After a match nothing more comes."""
        if not self._stops:
            return text
        if self.matched is not None:
            return ""
        text = self._held + text
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        if best is not None:
            end, start, self.matched = best
            self._held = ""
            return text[: end if self._include else start]
        keep = self._possible_start(text)
        self._held = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """Return the text that was held back and turned out not to be a stop string."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """Return the first position from which the text may grow into a stop string."""
        first = len(text)
        for stop in self._stops:
            position = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= position < first:
                if stop.startswith(text[position:]):
                    first = position
                    break
                position = text.find(stop[0], position + 1)
        return first
