"""Stop strings across token borders. Pure text: no ids, no I/O."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from typing_extensions import override


@dataclass(frozen=True, slots=True)
class _Match:
    """Where a stop string lies in a text. Ordered: the first to end wins, then the longest."""

    end: int
    start: int
    stop: str


class StopStrings:
    """Watches the text of one generation for its stop strings.

    What could still become a stop string is held back, so that no part of one is ever shown. The
    result does not depend on how the text was cut into pieces: the string that is complete first
    wins, and of two that end together the longer.

    Args:
        stops: None of them empty.
        keep_match: Show the stop string instead of trimming it.

    Attributes:
        matched: The stop string met, once it is. Nothing after it is ever returned.
    """

    __slots__ = ("_first_characters", "_held", "_keep_match", "_stops", "matched")

    def __init__(self, stops: Sequence[str], keep_match: bool = False) -> None:
        self._stops = stops
        self._keep_match = keep_match
        self._held = ""
        self._first_characters = _first_characters(tuple(stops))
        self.matched: str | None = None

    @override
    def __repr__(self) -> str:
        return f"StopStrings({list(self._stops)}, held={self._held!r}, matched={self.matched!r})"

    def push(self, text: str) -> str:
        """Take the next text; return what may be shown now."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        if match := self._first_match(text):
            self.matched, self._held = match.stop, ""
            return text[: match.end if self._keep_match else match.start]
        shown = len(text) - self._held_length(text)
        self._held = text[shown:]
        return text[:shown]

    def lets_pass(self, text: str) -> bool:
        """Tell whether `push` would return `text` as it is and hold nothing, by a quick look."""
        return not self._held and self._first_characters.isdisjoint(text)

    def finish(self) -> str:
        """Return what was held back: no stop string will complete it."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> _Match | None:
        found = [
            _Match(start + len(stop), start, stop)
            for stop in self._stops
            if (start := text.find(stop)) >= 0
        ]
        return min(found, key=lambda match: (match.end, match.start), default=None)

    def _held_length(self, text: str) -> int:
        """Return the length of the longest end of `text` that begins a stop string."""
        return max(_overlap(text, stop) for stop in self._stops)


@lru_cache(maxsize=256)
def _first_characters(stops: tuple[str, ...]) -> frozenset[str]:
    """Return what a stop string may begin with. One set for all who have the same ones."""
    return frozenset(stop[0] for stop in stops)


def _overlap(text: str, stop: str) -> int:
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start = text.find(stop[0], start + 1)
    return 0
