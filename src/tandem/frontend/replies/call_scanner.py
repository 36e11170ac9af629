"""Incremental parser of calls in JSON: returns the name as soon as it is complete and streams the arguments. Pure.

```
 {"name": "f", "arguments": {"a": 1}}     also in a list, or several in sequence; "parameters" for "arguments"
          └▶ CallBegin("f") └▶ "{"a"", ": 1}"        a call that cannot be streamed is returned at its end
```

The scanner follows strings and brackets. So a mark inside a string belongs to the string, and the closing mark ends the
calls only outside of strings.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

_ARGUMENTS = ("arguments", "parameters")
_CLOSERS = {"{": "}", "[": "]"}
# Escapes for control characters: models write raw line breaks into strings, but clients parse strictly.
_CONTROL = {ord(char): json.dumps(char)[1:-1] for char in map(chr, range(32))}
# Text without a character that changes the state, inside and outside of strings.
_STRING_RUN = re.compile(r'[^"\\\x00-\x1f]+')
_OTHER_RUN = re.compile(r'[^"{}\[\]:,<]+')
# Deeper than any real arguments. Text with deeper nesting is not a call.
MAX_DEPTH = 500
# A name and what surrounds it are shorter. It bounds the text that is held back until the name is complete.
MAX_HEAD = 512

# Not strict, because models write unescaped line breaks into strings.
_DECODER = json.JSONDecoder(strict=False)


@dataclass(frozen=True, slots=True)
class CallBegin:
    """The start of a call: its name is complete and its arguments follow."""

    name: str


# The start of a call, or the next piece of its arguments.
ScanEvent = CallBegin | str


class Scanner(Protocol):
    """Parses the text behind the mark that opens a call, and finds its end."""

    @property
    def rest(self) -> str | None:
        """The text behind the end. None: the end has not come yet, and `push` may be called."""

    @property
    def is_broken(self) -> bool:
        """Whether the text ended because it is no call from here on."""

    @property
    def held(self) -> str:
        """The text so far that no event represents. If the scanner is broken, it is content."""

    def push(self, text: str) -> list[ScanEvent]:
        """Return the events that `text` completes. Consecutive pieces of arguments are merged."""

    def end(self) -> list[ScanEvent]:
        """Return the remaining events at the end of the reply, and set `rest`."""


class CallScanner:
    """Parses calls in JSON. A `Scanner`.

    Args:
        closing: The mark behind the calls. Empty: they end with their list, or before text that is not a call.
        head: Pattern of the text before a call's arguments, with the group `name`. A longer text must not change the
            match. Text that starts with a bracket has no head. None: no call has one.
        name: Name of the only call: the text starts with its arguments.
        needs_arguments: Whether an object without arguments is no call, because no mark tells it from an answer in JSON.
    """

    def __init__(
        self,
        closing: str = "",
        head: re.Pattern[str] | None = None,
        name: str = "",
        *,
        needs_arguments: bool = False,
    ) -> None:
        self.rest: str | None = None
        self.is_broken = False
        self._closing, self._head, self._needs_arguments = closing, head, needs_arguments
        self._start = ""  # text that may become the head
        self._events, self._pieces = list[ScanEvent](), list[str]()
        self._held = list[str]()
        self._mark = ""  # beginning of the closing mark
        self._open = list[str]()  # closing brackets of all open brackets
        self._base = 0  # brackets around an entry: 1 in a list, else 0
        self._is_string = self._is_escaped = False
        self._string = list[str]()  # text of an open string at an entry's top level
        self._key = self._name = ""
        self._is_value = self._is_streamed = False
        self._level = 0  # bracket depth of the arguments being streamed; 0: none
        self._has_call = self._is_done = False
        self._is_named = False  # whether only the arguments of one call are parsed
        self._raw: list[str] | None = None  # arguments that are no object: their end is searched
        if name:
            self._expect_arguments(name)

    @property
    def held(self) -> str:
        """As in `Scanner`."""
        return "".join(self._held)

    def push(self, text: str) -> list[ScanEvent]:
        """As in `Scanner`."""
        if self._head is not None:
            text = self._read_head(self._head, self._start + text)
        at = 0
        while at < len(text) and not self._is_done:
            at += self._take_run(text, at) or self._take(text[at])
        if self._is_done and self.rest is None:
            self.rest = text[at:]
        return self._flush()

    def end(self) -> list[ScanEvent]:
        """As in `Scanner`."""
        self._keep(self._mark)
        if self._head is not None:
            self.is_broken, self._held = True, [self._start]
        elif not self._is_done:
            self._close("")
        self._is_done, self.rest = True, self.rest or ""
        return self._flush()

    def _read_head(self, head: re.Pattern[str], text: str) -> str:
        """Return the text behind the head, or nothing as long as the head is not complete."""
        if text[:MAX_HEAD].lstrip()[:1] in ("{", "["):
            self._head, self._start = None, ""
            return text
        if found := head.match(text[:MAX_HEAD]):
            self._head, self._start = None, ""
            self._held.append(found[0])
            self._expect_arguments(found["name"].strip())
            return text[found.end() :]
        self._start = text[:MAX_HEAD]
        if len(text) >= MAX_HEAD:
            self._is_done, self.is_broken, self.rest = True, True, text[MAX_HEAD:]
            self._held, self._start, self._head = [self._start], "", None
        return ""

    def _expect_arguments(self, name: str) -> None:
        """Continue as if an object had begun with this name and the key of its arguments."""
        self._name, self._key, self._is_value, self._is_named = name, _ARGUMENTS[0], True, True
        self._open = ["}"]

    def _flush(self) -> list[ScanEvent]:
        if self._pieces:
            self._events.append("".join(self._pieces))
        events, self._events, self._pieces = self._events, [], []
        return events

    def _begin(self, name: str) -> None:
        if self._pieces:
            self._events.append("".join(self._pieces))
        self._events.append(CallBegin(name))
        self._pieces, self._held, self._has_call = [], [], True

    def _keep(self, text: str) -> None:
        if self._level:
            self._pieces.append(text)
        elif self._raw is not None:
            self._raw.append(text)
        elif not self._is_streamed:
            self._held.append(text)

    def _take_run(self, text: str, at: int) -> int:
        """Take the text up to the next character that may change the state. Return its length."""
        if self._mark or self._is_escaped or len(self._open) <= self._base or self._is_done:
            return 0
        if self._is_named and not self._level:
            return 0
        run = (_STRING_RUN if self._is_string else _OTHER_RUN).match(text, at)
        if run is None:
            return 0
        self._keep(run[0])
        if len(self._open) == self._base + 1:
            if self._is_string:
                self._string.append(run[0])
            elif not run[0].isspace():
                self._key = ""  # its value is no object
        return len(run[0])

    def _take(self, char: str) -> bool:
        """Take one character. False: the calls have ended before it, or it has to be taken again."""
        if self._mark or (char == self._closing[:1] and not self._is_string):
            return self._take_mark(char)
        if self._is_named and not self._level:
            return self._around_arguments(char)
        if len(self._open) <= self._base:
            return self._between(char)
        if self._is_string:
            self._in_string(char)
        elif char in _CLOSERS:
            return self._open_bracket(char)
        elif char in "}]":
            return self._close_bracket(char)
        else:
            self._keep(char)
            if char == '"':
                self._is_string, self._string = True, []
            elif char in ":," and len(self._open) == self._base + 1:
                self._is_value = char == ":"
        return True

    def _take_mark(self, char: str) -> bool:
        mark = self._mark + char
        if self._closing.startswith(mark):
            self._mark = mark
            if mark == self._closing:
                self._mark = ""
                self._close(mark)
            return True
        mark, self._mark = self._mark, ""
        if self._is_named and not self._has_call and self._raw is None:
            self._raw = []
        if self._level or self._raw is not None:
            self._keep(mark)
            return False  # `char` is taken again, and may begin the mark anew
        self._held.append(mark)
        return self._break()

    def _close(self, mark: str) -> None:
        """End at the closing mark, or at the end of the reply."""
        is_inside = len(self._open) > self._base
        if self._is_named and not self._has_call:
            text = "".join(self._raw or []).strip().removesuffix("```")
            self._begin(self._name)
            self._pieces.append(_arguments(text.strip()))
        elif not self._has_call or (is_inside and not self._is_streamed):
            self.is_broken = True
            self._held.append(mark)
        else:
            self._held = []  # separators
        self._is_done = True

    def _break(self) -> bool:
        self._is_done = self.is_broken = True
        return False

    def _around_arguments(self, char: str) -> bool:
        """Take a character before or behind the arguments of the only call."""
        if self._raw is not None:
            self._raw.append(char)
        elif self._has_call:
            if not (char.isspace() or char == "`"):  # DeepSeek V3 writes them into a code block
                return self._break()
        elif char == "{":
            return self._open_bracket(char)
        elif not char.isspace():
            self._raw = [char]
        return True

    def _between(self, char: str) -> bool:
        if char == "{":
            self._open.append("}")
            self._is_value, self._is_streamed = False, False
            self._key = self._name = ""
        elif char == "[" and not self._open and not self._has_call:
            self._open.append("]")
            self._base = 1
        elif char == "]" and self._open:
            self._open.pop()
            self._base = 0
            if not self._closing:
                self._held.append(char)
                self._close("")
                return True
        elif char not in ",; \n\r\t":
            if self._closing or not self._has_call:
                return self._break()
            self._close("")
            return False
        self._held.append(char)
        return True

    def _in_string(self, char: str) -> None:
        self._keep(char.translate(_CONTROL) if self._level else char)
        is_top = len(self._open) == self._base + 1
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._is_string = False
            if is_top:
                self._end_string("".join(self._string))
            return
        if is_top:
            self._string.append(char)

    def _end_string(self, text: str) -> None:
        try:
            value = json.loads(f'"{text}"', strict=False)
        except ValueError:
            self._break()
            return
        if not self._is_value:
            self._key = value
        elif self._key == "name":
            self._name = value

    def _open_bracket(self, char: str) -> bool:
        is_arguments = self._key in _ARGUMENTS and self._is_value and char == "{"
        is_first = is_arguments and len(self._open) == self._base + 1 and not self._is_streamed
        if len(self._open) >= MAX_DEPTH:
            return self._break()
        self._open.append(_CLOSERS[char])
        if is_first and self._name:
            self._begin(self._name)
            self._is_streamed, self._level = True, len(self._open)
        self._keep(char)
        return True

    def _close_bracket(self, char: str) -> bool:
        if char != self._open[-1]:
            return self._break()
        self._open.pop()
        self._keep(char)
        if len(self._open) == self._base:
            self._end_entry()
        elif len(self._open) < self._level:
            self._level = 0
            if self._is_named and not self._closing:
                self._is_done = True
        return True

    def _end_entry(self) -> None:
        self._level = 0
        if self._is_streamed:
            return
        entry = self.held
        try:
            call = _DECODER.decode(entry[entry.index("{") :])
            name, arguments = _call(call, needs_arguments=self._needs_arguments)
        except (RecursionError, ValueError):
            self._is_done = self.is_broken = True
            return
        self._begin(name)
        self._pieces.append(arguments)


def _call(entry: Mapping[str, object], *, needs_arguments: bool) -> tuple[str, str]:
    is_call = not needs_arguments or not entry.keys().isdisjoint(_ARGUMENTS)
    match entry:
        case {"name": str(name), **fields} if name and is_call:
            arguments = fields.get("arguments", fields.get("parameters"))
            arguments = {} if arguments is None else arguments
            return name, arguments if isinstance(arguments, str) else _to_json(arguments)
        case _:
            raise ValueError("a call must have a name and arguments")


def _arguments(text: str) -> str:
    """Return JSON arguments in the form of all formats. Invalid JSON stays text."""
    try:
        return _to_json(_DECODER.decode(text or "{}"))
    except (RecursionError, ValueError):
        return text


def _to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
