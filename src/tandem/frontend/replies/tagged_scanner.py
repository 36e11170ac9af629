"""Incremental parser of a call whose arguments are in tags. It returns the arguments as JSON. Pure.

```
 f>  <parameter=a>  Rome  </parameter>  <parameter=b>  2  </parameter>  </function>
 └▶ CallBegin("f"), "{"
     └▶ '"a": "' └▶ "Rome" └▶ '"'            └▶ ', "b": '  └▶ "2"        └▶ "}"
```

String arguments are streamed. Arguments of other types are returned when their tag closes. Only its closing tag ends a
value: the tags of the call may be part of it. In a value that is a JSON object or list, a closing tag inside a string
belongs to the string. An argument without a closing tag stays an unterminated string, so that clients detect the
truncation.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from tandem.frontend.replies.call_scanner import MAX_HEAD, CallBegin, ScanEvent
from tandem.frontend.replies.marks import Marks, marks

_ESCAPES = ("\\\\", '\\"')


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags around an argument.

    Attributes:
        start: Text before the key.
        key: Pattern of the text between start and value, with the group `key`. The group `string`, if it matches,
            tells whether the value is text: `true` or `false`.
        closing: The closing tag.
        is_trimmed: Whether a line break at each end of the value belongs to the tags.
    """

    start: str
    key: re.Pattern[str]
    closing: str
    is_trimmed: bool = False


# Converts a raw value to JSON of the argument's type.
Cast = Callable[[str], str]
# Returns the cast of an argument by tool name and the groups of its key. None: the value is text.
CastOf = Callable[[str, Mapping[str, str]], Cast | None]


class TaggedScanner:
    """Parses one call with tags. A `Scanner`.

    Args:
        head: Pattern of the text before the arguments, with the group `name`.
        closing: The mark behind the call.
        follows_json: Whether strings in JSON values are followed.
    """

    def __init__(
        self,
        head: re.Pattern[str],
        tags: Tags,
        closing: str,
        cast_of: CastOf,
        *,
        follows_json: bool = True,
    ) -> None:
        self.rest: str | None = None
        self.is_broken = False
        self.follows_json = follows_json
        self._head, self._tags, self._cast_of = head, tags, cast_of
        self._between = marks(tags.start, closing)
        self._closing = closing
        ends = ("\n" + tags.closing, tags.closing) if tags.is_trimmed else (tags.closing,)
        self._value_marks = {
            "text": marks(*ends),
            "json": marks(*ends, '"'),
            "string": marks('"', *_ESCAPES),
        }
        self._state: Literal["head", "between", "key", "value"] = "head"
        self._name, self._text = "", ""  # `_text` is not parsed yet
        self._separator = "{"  # precedes the next key
        self._cast: Cast | None = None  # cast of the open argument
        self._value = list[str]()  # text of the open argument, unless it is streamed
        self._kind = (
            ""  # of the open value: "text", "json", or "string" inside one; empty: not known yet
        )
        self._is_first = False  # whether the open argument has no character yet
        self._outside, self._pieces = list[str](), list[str]()

    @property
    def held(self) -> str:
        """The text outside the tags, without the whitespace around it."""
        return "".join(self._outside).strip() if self._name else self._text

    def push(self, text: str) -> list[ScanEvent]:
        """As in `Scanner`."""
        self._text += text
        events: list[ScanEvent] = [CallBegin(self._name)] if self._read_head() else []
        while self.rest is None and self._state != "head" and self._read():
            pass
        return self._flush(events)

    def end(self) -> list[ScanEvent]:
        """As in `Scanner`."""
        # Whitespace terminates a name.
        events: list[ScanEvent] = [CallBegin(self._name)] if self._read_head("\n") else []
        if self._state == "head":
            self.is_broken, self.rest = True, self.rest or ""
        while self.rest is None:
            self._end()
        return self._flush(events)

    def _flush(self, events: list[ScanEvent]) -> list[ScanEvent]:
        arguments, self._pieces = "".join(self._pieces), []
        return [*events, arguments] if arguments else events

    def _read_head(self, ending: str = "") -> bool:
        if self._state != "head":
            return False
        if found := self._head.match(self._text[:MAX_HEAD] + ending):
            self._state, self._name = "between", found["name"]
            self._text = self._text[found.end() :]
            return True
        if len(self._text) > MAX_HEAD:
            self._text, self.rest = self._text[:MAX_HEAD], self._text[MAX_HEAD:]
            self.is_broken = True
        return False

    def _read(self) -> bool:
        """Parse up to the next tag. False: no further progress is possible yet."""
        if not self._text:
            return False
        if self._state == "value":
            return self._read_value()
        if self._state == "key":
            return self._read_key()
        before, mark, self._text = self._between.split(self._text)
        self._outside.append(before)
        if mark == self._closing:
            self._close(self._text)
        elif mark:
            self._state = "key"
        return bool(mark)

    def _close(self, rest: str) -> None:
        self._pieces.append("{}" if self._separator == "{" else "}")
        self.rest = rest

    def _read_key(self) -> bool:
        if (found := self._tags.key.match(self._text[:MAX_HEAD])) is None:
            if len(self._text) <= MAX_HEAD:
                return False
            self._state = "between"
            self._outside.append(self._tags.start)
            return True
        self._state, self._text = "value", self._text[found.end() :]
        self._cast = self._cast_of(self._name, found.groupdict())
        self._value, self._is_first = [], self._tags.is_trimmed
        self._kind = "text" if self._cast is None or not self.follows_json else ""
        quote = '"' if self._cast is None else ""
        self._pieces.append(f'{self._separator}"{_escaped(found["key"])}": {quote}')
        self._separator = ", "
        return True

    def _read_value(self) -> bool:
        if self._is_first:
            self._text, self._is_first = self._text.removeprefix("\n"), False
        if not self._kind and (start := self._text.lstrip()):
            self._kind = "json" if start[0] in "{[" else "text"
        before, mark, self._text = self._marks().split(self._text)
        self._add(before)
        if mark == '"':
            self._kind = "string" if self._kind == "json" else "json"
            self._add(mark)
        elif mark in _ESCAPES:
            self._add(mark)
        elif mark:
            self._pieces.append('"' if self._cast is None else self._cast("".join(self._value)))
            self._state = "between"
        return bool(mark)

    def _marks(self) -> Marks:
        return self._value_marks[self._kind or "text"]

    def _add(self, text: str) -> None:
        if self._cast is None:
            self._pieces.append(_escaped(text))
        else:
            self._value.append(text)

    def _end(self) -> None:
        """Parse what is left at the end of the reply, up to where no state can continue."""
        if self._state == "key":
            self._state = "between"
            self._outside.append(self._tags.start)
        elif self._state == "between":
            self._outside.append(self._text)
            self._close("")
        elif self._kind == "string":
            # Not JSON after all: the closing tag is searched, for this value and all that follow.
            self._text, self._value = "".join(self._value) + self._text, []
            self._kind, self.follows_json = "text", False
        else:
            self._pieces.append(_escaped("".join(self._value) + self._text))
            if self._cast is not None:
                self._pieces[-1] = '"' + self._pieces[-1]
            self.rest = ""
        while self.rest is None and self._read():
            pass


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
