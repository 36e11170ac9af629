"""Reads calls in JSON while they are written: the name as soon as it is known, arguments as they come. Pure.

```
 {"name": "f", "arguments": {"a": 1}}     also in a list, several behind each other, "parameters" for "arguments"
          └▶ Begun("f")     └▶ "{"a"", ": 1}"        a call that cannot be told so: Whole(its text), at its end
```
"""

import json
import re
from dataclasses import dataclass

_ARGUMENTS = ("arguments", "parameters")
_CLOSERS = {"{": "}", "[": "]"}
# Models write line breaks into strings as they are; clients parse strictly.
_CONTROL = {ord(char): json.dumps(char)[1:-1] for char in map(chr, range(32))}
# Deeper than any arguments. What is deeper is no call.
MAX_DEPTH = 500


@dataclass(frozen=True, slots=True)
class Begun:
    """A call whose name is known and whose arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class Whole:
    """The text of an entry that is complete, and was not told as it came."""

    text: str


Event = Begun | Whole | str


class NamedScanner:
    """Reads one call whose name stands before its arguments, in pieces.

    Args:
        head: Matches all before the arguments, with the group `name`.
    """

    def __init__(self, head: re.Pattern[str]) -> None:
        self._head, self._text, self._name = head, "", ""
        self._arguments = CallScanner()
        self._arguments.push('{"name": "-", "arguments":')

    @property
    def rest(self) -> str:
        """Nothing: a call that has begun is told to its end."""
        return ""

    def push(self, text: str) -> list[Event]:
        """Return what `text` completes. Arguments that are no object are not told."""
        if not self._name:
            self._text += text
            if (found := self._head.match(self._text)) is None:
                return []
            self._name, text = found["name"].strip(), self._text[found.end() :]
        events = self._arguments.push(text)
        return [Begun(self._name) if isinstance(each, Begun) else each for each in events]


class CallScanner:
    """Reads the text of a list of calls, in pieces.

    Attributes:
        is_broken: Whether the text is no list of objects; nothing is read from there on.
    """

    def __init__(self) -> None:
        self.is_broken = False
        self._open: list[str] = []  # the closers of all open brackets
        self._base = 0  # brackets around an entry: of the list, if there is one
        self._is_string = self._is_escaped = False
        self._entry, self._string = list[str](), list[str]()  # their text so far
        self._key = self._name = ""
        self._is_value = self._is_told = False
        self._level = 0  # of brackets within which arguments are told; 0: none are

    @property
    def rest(self) -> str:
        """The text of the open entry, unless it is told as it comes."""
        return "" if self._is_told else "".join(self._entry)

    def push(self, text: str) -> list[Event]:
        """Return what `text` completes. Pieces of arguments that come together are one."""
        events: list[Event] = []
        for char in text:
            if self.is_broken:
                self._entry.append(char)
            elif (event := self._take(char)) is not None:
                is_more = isinstance(event, str) and events and isinstance(events[-1], str)
                if is_more:
                    events[-1] = f"{events[-1]}{event}"
                else:
                    events.append(event)
                if isinstance(event, Begun):
                    events.append("{")
        return events

    def _take(self, char: str) -> Event | None:
        if not self._open or len(self._open) < self._base + 1:
            self._between(char)
            return None
        self._entry.append(char)
        told = char.translate(_CONTROL) if self._is_string else char
        was_told = self._level > 0
        if self._is_string:
            self._in_string(char)
        elif char == '"':
            self._is_string, self._string = True, [char]
        elif char in _CLOSERS:
            return self._opened(char) or (told if was_told else None)
        elif char in "}]":
            if char != self._open.pop():
                self.is_broken = True
                return None
            if len(self._open) == self._base:
                return self._entry_ended()
            if was_told and len(self._open) < self._level:
                self._level = 0
        elif len(self._open) == self._base + 1 and char in ":,":
            self._is_value = char == ":"
        return told if was_told else None

    def _between(self, char: str) -> None:
        if char == "{":
            self._open.append("}")
            self._entry, self._is_value, self._is_told = [char], False, False
            self._key = self._name = ""
        elif char == "[" and not self._open:
            self._open.append("]")
            self._base = 1
        elif char == "]" and self._open:
            self._open.pop()
            self._base = 0
        elif char not in ",; \n\r\t":
            self.is_broken = True
            self._entry = [char]

    def _in_string(self, char: str) -> None:
        self._string.append(char)
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._is_string = False
            if len(self._open) == self._base + 1:
                self._string_ended("".join(self._string))

    def _string_ended(self, text: str) -> None:
        try:
            value = json.loads(text, strict=False)
        except ValueError:
            self.is_broken = True
            return
        if not self._is_value:
            self._key = value
        elif self._key == "name":
            self._name = value

    def _opened(self, char: str) -> Begun | None:
        is_arguments = self._key in _ARGUMENTS and self._is_value and char == "{"
        is_first = is_arguments and len(self._open) == self._base + 1 and not self._is_told
        self._open.append(_CLOSERS[char])
        if len(self._open) > MAX_DEPTH:
            self.is_broken = True
        if not (is_first and self._name):
            return None
        self._is_told, self._level = True, len(self._open)
        return Begun(self._name)

    def _entry_ended(self) -> Whole | None:
        entry, self._level = "".join(self._entry), 0
        self._entry = []
        return None if self._is_told else Whole(entry)
