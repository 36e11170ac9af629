"""Stop patterns (regular expressions) across token borders. Pure text: no ids, no I/O.

```
 ...context │ held: may yet become a match │ ◀── the next character
            └ pattern.search begins here; partial matches say how far it may move
```

The text is looked at after each character, as if it ended there: so the result does not depend on how
it was cut into pieces. It costs 2 µs for a character and pattern while nothing is held, which only
generations with patterns pay.
"""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import regex
from typing_extensions import override

from tandem.wire.errors import InvalidRequest

MAX_PATTERN_CHARS = 512
# A longer match is not seen: what is held back is neither shown nor forgotten. `<a>.*</a>` over so
# much takes 10 µs a character.
MAX_MATCH_CHARS = 4096
# Looked at by lookbehinds and word borders, never matched again.
_CONTEXT_CHARS = 512
# CPU time of the loop that a generation's patterns may take: so much at once, where each character adds
# a little. A pattern that backtracks exponentially passes it within one character.
_MAX_BUDGET_S = 0.05
_BUDGET_S_PER_CHAR = 100e-6
# These change how a pattern reads, or which way.
_REFUSED_FLAGS = {regex.REVERSE: "(?r)", regex.V1: "(?V1)", regex.WORD: "(?w)"}

# At the end of what there is, a partial match takes word borders as final: ` \b` is given up where
# a word may yet follow. Lookaheads it does wait for.
_PARTS = re.compile(r"\\.|\[\^?\]?(?:\\.|\[:\^?\w+:\]|[^\]\\])*\]|.", re.DOTALL)
_SPELT_OUT = {
    r"\b": r"(?:(?=\w)(?<!\w)|(?!\w)(?<=\w))",
    r"\B": r"(?:(?=\w)(?<=\w)|(?!\w)(?<!\w))",
    r"\m": r"(?:(?=\w)(?<!\w))",
    r"\M": r"(?:(?!\w)(?<=\w))",
}


@dataclass(frozen=True, slots=True)
class StopPattern:
    """A pattern, compiled. That takes up to 2 ms: do it once a request.

    Attributes:
        source: As it was sent; empty for strings, of which a match tells which one it is.
    """

    source: str
    compiled: "regex.Pattern[str]"


def compile_pattern(pattern: str) -> StopPattern:
    """Return a compiled stop pattern.

    Raises:
        ValueError: It cannot be compiled, matches the empty text or has an unsupported flag.
    """
    try:
        regex.compile(pattern, cache_pattern=False)  # so that an error speaks of what was sent
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

    What could still become a match is held back, so that no part of one is ever shown. The match that
    is complete first wins; of several that end together the longest.

    Args:
        patterns: At least one, as `compile_pattern` and `any_of` make them.
        keep_match: Show the match instead of trimming it.

    Attributes:
        matched: The pattern or string met, once it is. Nothing after it is ever returned.
    """

    def __init__(self, patterns: Sequence[StopPattern], keep_match: bool = False) -> None:
        self._watches = [_Watch(pattern) for pattern in patterns]
        self._keep_match = keep_match
        self._text = ""  # some context, which was shown, and what is held
        self._shown = 0  # how much of `_text` was shown
        self._budget_s = _MAX_BUDGET_S
        self.matched: str | None = None

    @override
    def __repr__(self) -> str:
        held = self._text[self._shown :]
        return f"StopPatterns({self._watches}, held={held!r}, matched={self.matched!r})"

    def push(self, text: str) -> str:
        """Take the next text; return what may be shown now.

        Raises:
            InvalidRequest: The patterns take too long on this text.
        """
        if self.matched is not None:
            return ""
        started = time.thread_time()
        self._budget_s = min(_MAX_BUDGET_S, self._budget_s) + _BUDGET_S_PER_CHAR * len(text)
        shown = ""
        for character in text:
            self._text += character
            if (match := self._first_match(started)) is not None:
                return shown + self._end_at(match)
            shown += self._release()
        self._budget_s -= time.thread_time() - started
        return shown

    def lets_pass(self, text: str) -> bool:
        """See `StopStrings`. Only an empty text surely does: patterns look at what passed."""
        return not text

    def finish(self) -> str:
        """Return what was held back: no match will complete it."""
        held, self._text, self._shown = self._text[self._shown :], "", 0
        return held

    def _first_match(self, started: float) -> "regex.Match[str] | None":
        """Search the text as it stands; of several matches return the longest."""
        best: regex.Match[str] | None = None
        for watch in self._watches:
            left_s = self._budget_s - (time.thread_time() - started)
            match = watch.search(self._text, left_s)
            if match is not None and (best is None or match.start() < best.start()):
                best, self.matched = match, watch.source or match.group()
        return best

    def _end_at(self, match: "regex.Match[str]") -> str:
        end = match.end() if self._keep_match else match.start()
        shown, self._text, self._shown = self._text[self._shown : end], "", 0
        return shown

    def _release(self) -> str:
        """Return what cannot be part of a match any more, and forget text behind the context."""
        earliest = max(self._shown, len(self._text) - MAX_MATCH_CHARS)
        for watch in self._watches:
            watch.start = max(watch.start, earliest)
        first_held = min(watch.start for watch in self._watches)
        shown, self._shown = self._text[self._shown : first_held], first_held
        # Not at every character: each time copies what is left.
        if first_held > 2 * _CONTEXT_CHARS:
            dropped = first_held - _CONTEXT_CHARS
            self._text, self._shown = self._text[dropped:], _CONTEXT_CHARS
            for watch in self._watches:
                watch.start -= dropped
        return shown


class _Watch:
    """One pattern and where its next match may begin.

    Attributes:
        source: What is told of a match; empty tells its text.
        start: Everything before it is known to begin no match.
    """

    def __init__(self, pattern: StopPattern) -> None:
        self._pattern = pattern.compiled
        self.source = pattern.source
        self.start = 0

    @override
    def __repr__(self) -> str:
        return repr(self.source or self._pattern.pattern)

    def search(self, text: str, timeout_s: float) -> "regex.Match[str] | None":
        """Return the match in `text`; else note where one may begin that later text completes."""
        if timeout_s <= 0:
            raise _too_slow(self)
        try:
            found: Any = self._pattern.search(text, self.start, partial=True, timeout=timeout_s)
        except TimeoutError:
            raise _too_slow(self) from None
        if found is None or found.partial:
            self.start = len(text) if found is None else found.start()
            return None
        match: regex.Match[str] = found
        return match


def _too_slow(watch: _Watch) -> InvalidRequest:
    return InvalidRequest(f"stop_regex: {watch!r} takes too long on this text; make it simpler")
