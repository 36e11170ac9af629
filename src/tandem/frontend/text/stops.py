"""Stop strings and stop patterns (regular expressions) that may span tokens. Pure text: no ids, no I/O.

Text that may still become a stop is held back, so that no part of a stop is ever shown. The result does not
depend on how the text is split: the stop that is complete first wins, and the longest of several that end at
the same character.

```
 ...context │ held: may still become a match │ ◀── the next character
            └ pattern.search starts here; partial matches determine how far this may advance
```

Patterns are searched after each character, as if the text ended there. This takes 3 µs per character and
pattern while nothing is held, and only in generations with patterns. All choices of a request share one
`SearchBudget`, because a search blocks the streams of every other client.
"""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import regex

from tandem.wire.errors import InvalidRequest

MAX_PATTERN_CHARS = 512
# Longer matches are not found. This bounds the text held back: `<a>.*</a>` over this length takes 10 µs per
# character.
MAX_MATCH_CHARS = 4096
# Text kept before the text that is searched. Word boundaries need the last character.
_CONTEXT_CHARS = 512
# CPU time that a request's patterns may use: a budget with this maximum, to which each character adds a little.
# A pattern with exponential backtracking exceeds it within one character.
_MAX_BUDGET_S = 0.02
_BUDGET_S_PER_CHAR = 100e-6
# With more choices each character adds less, down to five times the cost of a usual pattern.
_MAX_SHARES = 10
# Limit of the search in an empty text, which takes a few microseconds. A request may have 16 patterns.
_MAX_EMPTY_SEARCH_S = 0.001
# Flags that change a pattern's syntax or search direction.
_REFUSED_FLAGS = {regex.REVERSE: "(?r)", regex.V1: "(?V1)", regex.WORD: "(?w)"}
# Compiling takes up to four times as long for each such group around another: with 512 characters 10 ms for 3, 24 ms
# for 4, minutes for 10. `*`, `?` and `{0,9}` add little.
MAX_REPEATED_GROUPS = 3
_REPEATED_GROUP = re.compile(r"\)(?:\+|\{(?!0?,))")
# Syntax whose search visits the text in front of each character again, or tries every edit of a match. Comments and
# the spaces of (?x) would hide it. Classes are not parsed, so `[(?<=]` is refused too.
_REFUSED_SYNTAX = {
    "lookbehind": re.compile(r"\(\?<[=!]"),
    "fuzzy matching": re.compile(r"\{(?:\d*[deis][,:}<+]|\d+<)"),
    "a comment": re.compile(r"\(\?#"),
    "the flag (?x)": re.compile(r"\(\?\w*-?\w*x"),
}
_ESCAPES = re.compile(r"\\.", re.DOTALL)

# `regex` matches a word boundary at the end of the text although the word may continue. A lookahead there gives
# a partial match instead, which waits for more text, so word boundaries are replaced by lookarounds.
_PARTS = re.compile(r"\\.|\[\^?\]?(?:\\.|\[:\^?\w+:\]|[^\]\\])*\]|.", re.DOTALL)
_BOUNDARIES = {
    r"\b": r"(?:(?=\w)(?<!\w)|(?!\w)(?<=\w))",
    r"\B": r"(?:(?=\w)(?<=\w)|(?!\w)(?<!\w))",
    r"\m": r"(?:(?=\w)(?<!\w))",
    r"\M": r"(?:(?!\w)(?<=\w))",
}


class StopStrings:
    """Searches the text of one generation for its stop strings.

    Args:
        stops: Non-empty strings.
        keep_match: Whether to show the stop string instead of trimming it.

    Attributes:
        matched: The stop string found. None: none so far. Text after it is never returned.
    """

    __slots__ = ("_first_characters", "_held", "_keep_match", "_stops", "matched")

    def __init__(self, stops: Sequence[str], keep_match: bool = False) -> None:
        self._stops = stops
        self._keep_match = keep_match
        self._held = ""
        self._first_characters = _first_characters(tuple(stops))
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Process the next text and return the text that may be shown now."""
        if self.matched is not None:
            return ""
        if not self._held and self._first_characters.isdisjoint(text):
            return text  # the usual case
        text = self._held + text
        # The match that ends first, then the longest.
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
        """Return the text held back, because no further text can complete a stop string."""
        held, self._held = self._held, ""
        return held

    def _held_length(self, text: str) -> int:
        """Return the length of the longest suffix of `text` that is a prefix of a stop string."""
        return max(_overlap(text, stop) for stop in self._stops)


@lru_cache(maxsize=256)
def _first_characters(stops: tuple[str, ...]) -> frozenset[str]:
    """Return the first characters of the stop strings. Requests with the same stops share one set."""
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
    """A compiled pattern. Compiling takes up to 2 ms, so do it once per request.

    Attributes:
        source: The pattern that the client sent. Empty for stop strings, whose match is the string itself.
    """

    source: str
    compiled: "regex.Pattern[str]"


def compile_pattern(pattern: str) -> StopPattern:
    """Return a compiled stop pattern.

    Raises:
        ValueError: It cannot be compiled, matches the empty string or has unsupported syntax or flags.
    """
    unescaped = _ESCAPES.sub("_", pattern)
    for name, syntax in _REFUSED_SYNTAX.items():
        if syntax.search(unescaped):
            raise ValueError(f"{pattern!r} has {name}, which is not supported")
    if len(_REPEATED_GROUP.findall(unescaped)) > MAX_REPEATED_GROUPS:
        raise ValueError(
            f"{pattern!r} has more than {MAX_REPEATED_GROUPS} groups with + or {{...}}"
        )
    try:
        regex.compile(pattern, cache_pattern=False)  # for an error that quotes the client's pattern
        parts = [_BOUNDARIES.get(part, part) for part in _PARTS.findall(pattern)]
        compiled = regex.compile("".join(parts), cache_pattern=False)
        matches_empty = compiled.search("", timeout=_MAX_EMPTY_SEARCH_S) is not None
    except (regex.error, ValueError, OverflowError, RecursionError, KeyError, IndexError) as error:
        raise ValueError(f"{pattern!r} is not a valid regular expression: {error}") from error
    except TimeoutError:
        raise ValueError(f"{pattern!r} takes too long; simplify it") from None
    if matches_empty:
        raise ValueError(f"{pattern!r} matches the empty string")
    for flag, name in _REFUSED_FLAGS.items():
        if compiled.flags & flag:
            raise ValueError(f"{pattern!r} has the flag {name}, which is not supported")
    return StopPattern(pattern, compiled)


def pattern_of_strings(stops: Sequence[str]) -> StopPattern:
    """Return one pattern for all stop strings of a request that also has patterns. No string may be empty."""
    text = "|".join(map(regex.escape, stops))
    return StopPattern("", regex.compile(text, cache_pattern=False))


class SearchBudget:
    """CPU time that the stop patterns of one request may use, shared by all its choices.

    Once it is used up, every later search fails too: the choices that still run must not use it up again.

    Args:
        num_choices: Generations of the request.
        clock: CPU time of the calling thread, in seconds.
    """

    def __init__(self, num_choices: int = 1, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._s_per_char = _BUDGET_S_PER_CHAR / min(num_choices, _MAX_SHARES)
        self._left_s = _MAX_BUDGET_S

    def add(self, num_chars: int) -> None:
        """Add the time for characters that are searched next. At most `_MAX_BUDGET_S` is left over from earlier ones."""
        if self._left_s > 0:
            self._left_s = min(_MAX_BUDGET_S, self._left_s) + self._s_per_char * num_chars

    def search(self, pattern: StopPattern, text: str, start: int) -> "regex.Match[str] | None":
        """Return the first match at or after `start`, which may be partial.

        Raises:
            InvalidRequest: The budget is used up.
        """
        started_s = self._clock()
        try:
            if self._left_s > 0:
                return pattern.compiled.search(text, start, partial=True, timeout=self._left_s)
        except TimeoutError:
            self._left_s = 0.0
        finally:
            self._left_s -= self._clock() - started_s
        source = pattern.source or pattern.compiled.pattern
        raise InvalidRequest(f"stop_regex: {source!r} takes too long on this text; simplify it")


class StopPatterns:
    """Searches the text of one generation for its stop patterns and stop strings.

    Args:
        patterns: At least one pattern.
        keep_match: Whether to show the match instead of trimming it.
        budget: The request's CPU time. None: that of a request with one choice.

    Attributes:
        matched: The pattern or string found. None: none so far. Text after it is never returned.
    """

    def __init__(
        self,
        patterns: Sequence[StopPattern],
        keep_match: bool = False,
        budget: SearchBudget | None = None,
    ) -> None:
        self._patterns, self._keep_match = patterns, keep_match
        self._budget = budget or SearchBudget()
        self._starts = [0] * len(patterns)  # earliest possible start of each pattern's match
        self._text = ""  # context, which was shown already, then the text held back
        self._shown = 0  # characters of `_text` that were shown
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Process the next text and return the text that may be shown now."""
        if self.matched is not None:
            return ""
        self._budget.add(len(text))
        shown = ""
        for character in text:
            self._text += character
            if (match := self._first_match()) is not None:
                end = match.end() if self._keep_match else match.start()
                shown += self._text[self._shown : end]
                self._text, self._shown = "", 0
                return shown
            shown += self._release()
        return shown

    def finish(self) -> str:
        """Return the text held back, because no further text can complete a match."""
        held, self._text, self._shown = self._text[self._shown :], "", 0
        return held

    def _first_match(self) -> "regex.Match[str] | None":
        """Return the longest match in the text so far, or record where later text may complete one."""
        best: regex.Match[str] | None = None
        for index, pattern in enumerate(self._patterns):
            found = self._budget.search(pattern, self._text, self._starts[index])
            if found is None or found.partial:
                self._starts[index] = len(self._text) if found is None else found.start()
            elif best is None or found.start() < best.start():
                best, self.matched = found, pattern.source or found.group()
        return best

    def _release(self) -> str:
        """Return text that cannot become part of a match, and discard text older than the context."""
        earliest = max(self._shown, len(self._text) - MAX_MATCH_CHARS)
        self._starts = [max(start, earliest) for start in self._starts]
        first_held = min(self._starts)
        shown, self._shown = self._text[self._shown : first_held], first_held
        # Not after every character, because discarding copies the remaining text.
        if first_held > 2 * _CONTEXT_CHARS:
            dropped = first_held - _CONTEXT_CHARS
            self._text, self._shown = self._text[dropped:], _CONTEXT_CHARS
            self._starts = [start - dropped for start in self._starts]
        return shown


@dataclass(frozen=True, slots=True)
class TextRules:
    """The edge's rules for the text of one generation.

    Attributes:
        stops: Stop strings.
        patterns: Stop patterns. If not empty, one of them matches `stops`.
        budget: CPU time of the patterns. All choices of one request share it.
        keeps_stop: Whether the stop string, match or stop token stays in the text.
        shown_tokens: Special tokens that are never skipped.
        min_new_tokens: Number of tokens before stops are searched.
        stream_interval: Minimum number of tokens per event, except in the first and the last.
        is_silent: Hide all generated text, because the request is for the prompt's log-probabilities only.
    """

    stops: tuple[str, ...] = ()
    patterns: tuple[StopPattern, ...] = ()
    budget: SearchBudget = field(default_factory=SearchBudget, compare=False, repr=False)
    keeps_stop: bool = False
    skip_special_tokens: bool = True
    shown_tokens: tuple[str, ...] = ()
    min_new_tokens: int = 0
    stream_interval: int = 1
    is_silent: bool = False
