"""Stop strings and stop patterns (regular expressions) across token borders. Pure text: no ids, no I/O.

What could still become a stop is held back, so that no part of one is ever shown. The result does not
depend on how the text was cut into pieces: the stop that is complete first wins, and of several that end
together the longest.

```
 ...context │ held: may yet become a match │ ◀── the next character
            └ pattern.search begins here; partial matches say how far it may move
```

Patterns search after each character, as if the text ended there. That costs 2 µs for a character and
pattern while nothing is held, which only generations with patterns pay.
"""

import contextlib
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import regex

from tandem.wire.errors import InvalidRequest

MAX_PATTERN_CHARS = 512
# Longer matches are not found: this bounds the text held back. `<a>.*</a>` over so much takes 10 µs a
# character.
MAX_MATCH_CHARS = 4096
# For lookbehinds and word borders.
_CONTEXT_CHARS = 512
# CPU time that a generation's patterns may take: at most so much at once, and each character adds a
# little. A pattern that backtracks exponentially passes it within one character.
_MAX_BUDGET_S = 0.05
_BUDGET_S_PER_CHAR = 100e-6
# These change how a pattern reads, or which way.
_REFUSED_FLAGS = {regex.REVERSE: "(?r)", regex.V1: "(?V1)", regex.WORD: "(?w)"}

# At the end of the text, a partial match takes word borders as final, though a word may yet follow. It
# does wait for lookaheads.
_PARTS = re.compile(r"\\.|\[\^?\]?(?:\\.|\[:\^?\w+:\]|[^\]\\])*\]|.", re.DOTALL)
_SPELT_OUT = {
    r"\b": r"(?:(?=\w)(?<!\w)|(?!\w)(?<=\w))",
    r"\B": r"(?:(?=\w)(?<=\w)|(?!\w)(?<!\w))",
    r"\m": r"(?:(?=\w)(?<!\w))",
    r"\M": r"(?:(?!\w)(?<=\w))",
}


class StopStrings:
    """Watches the text of one generation for its stop strings.

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

    def push(self, text: str) -> str:
        """Take the next text. Returns what may be shown now."""
        if self.matched is not None:
            return ""
        if not self._held and self._first_characters.isdisjoint(text):
            return text  # as most text does
        text = self._held + text
        # The first to end, and then the longest.
        found = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := text.find(stop)) >= 0
        ]
        if found:
            end, start, self.matched = min(found)
            self._held = ""
            return text[: end if self._keep_match else start]
        shown = len(text) - self._held_length(text)
        self._held = text[shown:]
        return text[:shown]

    def finish(self) -> str:
        """Return the text held back: no stop string will complete it."""
        held, self._held = self._held, ""
        return held

    def _held_length(self, text: str) -> int:
        """Return the length of the longest end of `text` that begins a stop string."""
        return max(_overlap(text, stop) for stop in self._stops)


@lru_cache(maxsize=256)
def _first_characters(stops: tuple[str, ...]) -> frozenset[str]:
    """Return what a stop string may begin with. Requests with the same stops share one set."""
    return frozenset(stop[0] for stop in stops)


def _overlap(text: str, stop: str) -> int:
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start = text.find(stop[0], start + 1)
    return 0


@dataclass(frozen=True, slots=True)
class StopPattern:
    """A compiled pattern. Compiling takes up to 2 ms: do it once a request.

    Attributes:
        source: The pattern as it was sent. Empty for strings: the match is the string.
    """

    source: str
    compiled: "regex.Pattern[str]"


def compile_pattern(pattern: str) -> StopPattern:
    """Return a compiled stop pattern.

    Raises:
        ValueError: It cannot be compiled, matches the empty text or has an unsupported flag.
    """
    try:
        regex.compile(pattern, cache_pattern=False)  # an error must quote what was sent
        spelt_out = [_SPELT_OUT.get(part, part) for part in _PARTS.findall(pattern)]
        compiled = regex.compile("".join(spelt_out), cache_pattern=False)
        matches_nothing = compiled.search("", timeout=_MAX_BUDGET_S) is not None
    except (regex.error, ValueError, OverflowError, RecursionError, KeyError, IndexError) as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
    except TimeoutError:
        raise ValueError(f"{pattern!r} takes too long") from None
    if matches_nothing:
        raise ValueError(f"{pattern!r} matches the empty text")
    for flag, name in _REFUSED_FLAGS.items():
        if compiled.flags & flag:
            raise ValueError(f"{pattern!r} has the flag {name}, which is not supported")
    return StopPattern(pattern, compiled)


def any_of(stops: Sequence[str]) -> StopPattern:
    """Return a pattern for stop strings that stand beside patterns; none of them is empty."""
    text = "|".join(map(regex.escape, stops))
    return StopPattern("", regex.compile(text, cache_pattern=False))


class StopPatterns:
    """Watches the text of one generation for its stop patterns and stop strings.

    Args:
        patterns: At least one.
        keep_match: Show the match instead of trimming it.

    Attributes:
        matched: The pattern or string met, once it is. Nothing after it is ever returned.
    """

    def __init__(self, patterns: Sequence[StopPattern], keep_match: bool = False) -> None:
        self._patterns, self._keep_match = patterns, keep_match
        self._starts = [0] * len(patterns)  # no match of each begins before
        self._text = ""  # some context, which was shown, then the text held back
        self._shown = 0  # how much of `_text` was shown
        self._budget_s = _MAX_BUDGET_S
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take the next text. Returns what may be shown now."""
        if self.matched is not None:
            return ""
        started = time.thread_time()
        self._budget_s = min(_MAX_BUDGET_S, self._budget_s) + _BUDGET_S_PER_CHAR * len(text)
        shown = ""
        for character in text:
            self._text += character
            if (match := self._first_match(started)) is not None:
                end = match.end() if self._keep_match else match.start()
                shown += self._text[self._shown : end]
                self._text, self._shown = "", 0
                return shown
            shown += self._release()
        self._budget_s -= time.thread_time() - started
        return shown

    def finish(self) -> str:
        """Return the text held back: no match will complete it."""
        held, self._text, self._shown = self._text[self._shown :], "", 0
        return held

    def _first_match(self, started: float) -> "regex.Match[str] | None":
        """Return the longest match in the text as it stands. Else note where later text may complete one."""
        best: regex.Match[str] | None = None
        for index, pattern in enumerate(self._patterns):
            left_s = self._budget_s - (time.thread_time() - started)
            found = _search(pattern, self._text, self._starts[index], left_s)
            if found is None or found.partial:
                self._starts[index] = len(self._text) if found is None else found.start()
            elif best is None or found.start() < best.start():
                best, self.matched = found, pattern.source or found.group()
        return best

    def _release(self) -> str:
        """Return text that cannot become part of a match, and forget text behind the context."""
        earliest = max(self._shown, len(self._text) - MAX_MATCH_CHARS)
        self._starts = [max(start, earliest) for start in self._starts]
        first_held = min(self._starts)
        shown, self._shown = self._text[self._shown : first_held], first_held
        # Not at every character: each time copies what is left.
        if first_held > 2 * _CONTEXT_CHARS:
            dropped = first_held - _CONTEXT_CHARS
            self._text, self._shown = self._text[dropped:], _CONTEXT_CHARS
            self._starts = [start - dropped for start in self._starts]
        return shown


def _search(pattern: StopPattern, text: str, start: int, timeout_s: float) -> Any:
    with contextlib.suppress(TimeoutError):
        if timeout_s > 0:
            return pattern.compiled.search(text, start, partial=True, timeout=timeout_s)
    source = pattern.source or pattern.compiled.pattern
    raise InvalidRequest(f"stop_regex: {source!r} takes too long on this text; make it simpler")
