"""Find marks in text that arrives in pieces. Pure.

A piece may end inside a mark. The caller keeps that beginning, which is shorter than the longest mark, and passes it
again before the next piece. So each character is read a bounded number of times, whatever the pieces are.
"""

import functools
import re


class Marks:
    """Finds the first of several marks. No mark may be a proper prefix of another."""

    def __init__(self, *texts: str) -> None:
        self._texts = texts
        # `(?!)` never matches: without marks all text is ordinary.
        self._pattern = re.compile("|".join(map(re.escape, texts)) or "(?!)")
        self._firsts = {text[0] for text in texts}
        self._first = (
            re.compile("[" + re.escape("".join(sorted(self._firsts))) + "]") if texts else None
        )
        self._longest = max(map(len, texts), default=1)

    def may_begin_in(self, text: str) -> bool:
        """Return whether `text` has a first character of a mark. If not, no mark is or begins in it."""
        return self._first is not None and self._first.search(text) is not None

    def split(self, text: str) -> tuple[str, str, str]:
        """Return the text before the first mark, the mark, and the text after it.

        Without a mark: the text that can be passed on, an empty mark, and the end of the text that may become one.
        """
        if found := self._pattern.search(text):
            return text[: found.start()], found[0], text[found.end() :]
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[at] in self._firsts and any(each.startswith(text[at:]) for each in self._texts):
                return text[:at], "", text[at:]
        return text, "", ""


@functools.cache
def marks(*texts: str) -> Marks:
    """Return the finder of these marks, which come from the tables of formats."""
    return Marks(*texts)
