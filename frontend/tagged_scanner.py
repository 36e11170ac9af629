"""Reads a call whose arguments stand in tags while it is written, and returns its arguments as JSON. Pure.

```
 f>  <parameter=a>  Rome  </parameter>  <parameter=b>  2  </parameter>  (end of the region)
 └▶ Begun("f"), "{"
     └▶ '"a": "' └▶ "Rome" └▶ '"'            └▶ ', "b": '  └▶ "2"        └▶ "}"
```

Text streams. The value of another type comes when its tag closes. An argument without a closing tag stays an open
string, so that clients see that it was cut.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from tandem.frontend.call_scanner import Begun, Event


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags around an argument.

    Attributes:
        start: What an argument begins with.
        key: What follows up to the value, with the group `key`. If it does not match behind one start, it matches
            behind no later one: trying all of them would take quadratic time.
        is_trimmed: Whether a line break at each end belongs to the tags.
    """

    start: re.Pattern[str]
    key: re.Pattern[str]
    closing: str
    is_trimmed: bool = False


# From a raw value to the JSON of its type.
Cast = Callable[[str], str]


class TaggedScanner:
    """Reads one call with tags, in pieces.

    Args:
        head: Matches all before the arguments, with the group `name`.
        cast_of: Returns the cast of an argument, by the names of tool and argument. None: the value is text.
    """

    def __init__(
        self, head: re.Pattern[str], tags: Tags, cast_of: Callable[[str, str], Cast | None]
    ) -> None:
        self._head, self._tags, self._cast_of = head, tags, cast_of
        self._name, self._text = "", ""  # the text not read yet
        self._separator = "{"  # before the next key
        self._cast: Cast | None = None  # of the open argument
        self._value: list[str] | None = None  # of the open argument, unless it was told
        self._is_first = False  # whether the open argument's first character is still to come
        self._others: list[str] = []

    @property
    def rest(self) -> str:
        """The text outside of tags."""
        return "".join(self._others)

    def push(self, text: str) -> list[Event]:
        """Return what `text` completes. Pieces of arguments that come together are one."""
        self._text += text
        events: list[Event] = []
        if not self._name:
            if (found := self._head.match(self._text)) is None:
                return []
            self._name, self._text = found["name"], self._text[found.end() :]
            events.append(Begun(self._name))
        pieces = list[str]()
        while self._read(pieces):
            pass
        return [*events, "".join(pieces)] if any(pieces) else events

    def end(self) -> list[Event]:
        """Return the rest of a call that has ended."""
        # A blank ends a name.
        events = [] if self._name else self.push("\n")
        if not self._name:
            return []
        if self._value is None:
            self._others.append(self._text)
            return [*events, "{}" if self._separator == "{" else "}"]
        opening = "" if self._cast is None else '"'
        return [*events, opening + _escaped("".join(self._value) + self._text)]

    def _read(self, pieces: list[str]) -> bool:
        """Read up to the next tag. Return whether there may be more."""
        if self._value is not None:
            return self._read_value(pieces, self._value)
        if (start := self._tags.start.search(self._text)) is None:
            return False
        if (found := self._tags.key.match(self._text, start.end())) is None:
            return False
        self._others.append(self._text[: start.start()])
        self._text = self._text[found.end() :]
        self._cast = self._cast_of(self._name, found["key"])
        self._value, self._is_first = [], self._tags.is_trimmed
        quote = '"' if self._cast is None else ""
        pieces.append(f'{self._separator}"{_escaped(found["key"])}": {quote}')
        self._separator = ", "
        return True

    def _read_value(self, pieces: list[str], value: list[str]) -> bool:
        closing = self._tags.closing
        if self._is_first and self._text:
            self._text, self._is_first = self._text.removeprefix("\n"), False
        chunk, mark, after = self._text.partition(closing)
        if mark:
            self._text = after
            if self._tags.is_trimmed:
                chunk = chunk.removesuffix("\n")
        else:
            ends = ("\n" + closing, closing) if self._tags.is_trimmed else (closing,)
            num = len(chunk) - max(_overlap(chunk, end) for end in ends)
            chunk, self._text = chunk[:num], chunk[num:]
        if self._cast is None:
            pieces.append(_escaped(chunk) + ('"' if mark else ""))
        else:
            value.append(chunk)
            if mark:
                pieces.append(self._cast("".join(value)))
        if mark:
            self._value = None
        return bool(mark)


def _overlap(text: str, mark: str) -> int:
    """Return how many characters at the end of `text` may begin `mark`."""
    longest = min(len(text), len(mark))
    return next(num for num in range(longest, -1, -1) if text.endswith(mark[:num]))


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
