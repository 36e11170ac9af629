"""Finds tool calls and thoughts in what a model writes freely.

transformers' `ResponseParser` finds the regions of a format of `frontend/reply_formats.py`. Here they
become parts of a reply, and their JSON is read. Unreadable regions become content: nothing that a model
wrote is lost, except marks and the blanks beside them.

transformers is imported only if a format was asked for: it costs 0.6 s and 45 MB, without torch.
"""

import functools
import importlib.util
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tandem.frontend.call_scanner import Begun, CallScanner, Event, NamedScanner, Whole
from tandem.frontend.reply_formats import (
    REASONING_ALIASES,
    REASONING_FORMATS,
    TOOL_ALIASES,
    TOOL_FORMATS,
    Format,
)
from tandem.frontend.tool_calls import Part, Reply, new_call
from tandem.wire.errors import ConfigInvalid

# Models write line breaks into strings as they are.
_DECODER = json.JSONDecoder(strict=False)

# A name and its arguments: an object, or the text of what could not be read.
Call = tuple[str, object]


@dataclass(frozen=True, slots=True)
class ReplyFormats:
    """The formats of the server's model, as its flags name them."""

    tools: Format | None = None
    thoughts: Format | None = None

    def load(self) -> None:
        """Import the parser of these formats now: later it would block the loop."""
        if self != NO_FORMATS:
            import transformers.utils.chat_parsing  # noqa: F401

    def marks_of_thoughts(self) -> tuple[str, str] | None:
        """Return what opens and closes thoughts; None where they are none, or have no such marks."""
        if self.thoughts is None or not self.thoughts.opening:
            return None
        return self.thoughts.opening, str(self.thoughts.fields["reasoning_content"]["close"])

    def reply(
        self,
        prompt: str,
        tools: Sequence[Mapping[str, Any]],
        first: int | None = None,
        *,
        is_split: bool = True,
        is_parallel: bool = True,
    ) -> Callable[[], Reply] | None:
        """Return the maker of one choice's reader, or None if all text is content.

        Args:
            prompt: Its end may open the model's thoughts.
            tools: The model's tools. Without any, calls are not searched.
            first: As in `new_call`.
            is_split: Whether to separate thoughts.
            is_parallel: Whether there may be several calls. If not, calls after the first are dropped.
        """
        wanted = (self.thoughts if is_split else None, self.tools if tools else None)
        formats = [part for part in wanted if part is not None]
        if not formats:
            return None
        openings = [part.opening for part in formats if part.opening]
        prefix = next((text for text in openings if prompt.rstrip().endswith(text)), "")
        max_calls = math.inf if is_parallel else 1
        return functools.partial(ParsedReply, formats, prefix, tools, first, max_calls)


NO_FORMATS = ReplyFormats()


def reply_formats(tools: str, thoughts: str) -> ReplyFormats:
    """Return the formats of these names, as the flags give them. Empty: none."""
    return ReplyFormats(
        tools=_find("--tool-call-parser", tools, TOOL_FORMATS, TOOL_ALIASES),
        thoughts=_find("--reasoning-parser", thoughts, REASONING_FORMATS, REASONING_ALIASES),
    )


def _find(
    flag: str, name: str, formats: Mapping[str, Format], aliases: Mapping[str, str]
) -> Format | None:
    if not name:
        return None
    plain = name.lower().replace("-", "_")
    found = formats.get(aliases.get(plain, plain))
    if found is None:
        known = ", ".join(sorted({*formats, *aliases}))
        raise ConfigInvalid(f"{flag}: {name!r} is not known; give one of {known}")
    if importlib.util.find_spec("transformers") is None:
        raise ConfigInvalid(f"{flag} needs transformers: pip install 'tandem-serve[parsers]'")
    return found


class ParsedReply:
    """Reads one choice by the formats of its model. A `Reply`.

    Args:
        prefix: The end of the prompt, if it opens a region.
        tools: Their schemas give the types of arguments in tags.
        first: As in `new_call`.
        max_calls: Later ones are dropped.
    """

    def __init__(
        self,
        formats: Sequence[Format],
        prefix: str,
        tools: Sequence[Mapping[str, Any]],
        first: int | None = None,
        max_calls: float = math.inf,
    ) -> None:
        from transformers.utils.chat_parsing import ResponseParser

        self._lost = "".join(part.lost for part in formats)
        self._parser: Any = ResponseParser(_template(formats), prefix=prefix, tools=list(tools))
        self._first, self._max_calls, self._num_calls = first, max_calls, 0
        self._field = ""  # the open region
        self._raw = ""  # text of the open call
        # Where calls are JSON with their names in it, they are told as they come.
        calls = _template(formats)["fields"].get("tool_calls", {})
        self._is_json = bool(calls) and "transform" not in calls
        self._scanner: CallScanner | NamedScanner | None = None  # of the open region
        self._head = next((part.head for part in formats if part.head is not None), None)
        self._entries = list[str]()  # complete calls that were not told yet
        self._is_dropped = False  # whether the open call is one too many
        self._blanks = ""  # at the end of the open text, returned once something follows
        self._has_told = False  # whether a call of the open region was told as it came
        self._is_begun = False  # whether some of the open text was returned
        self._is_first = True  # whether nothing at all was returned yet
        self._parts: list[Part] = []
        self._take(self._parser.initial_events)

    @property
    def finish_reason(self) -> Literal["stop", "tool_calls"]:
        """`tool_calls` if there was a call."""
        return "tool_calls" if self._num_calls else "stop"

    def push(self, text: str) -> list[Part]:
        """Return the parts that `text` completes."""
        return self._follow(lambda: self._parser.feed(text), text)

    def finish(self) -> list[Part]:
        """Return the rest."""
        parts = self._follow(lambda: self._parser.finalize()[1], "")
        # Blanks at the very end separate nothing.
        if self._field == "content" and self._blanks and (self._is_begun or self._is_first):
            parts = [*parts, Part("content", self._blanks)]
        return parts

    def _follow(self, read: Callable[[], list[dict[str, Any]]], text: str) -> list[Part]:
        """Return the parts that `read` makes of `text`."""
        self._parts = []
        if self._parser is None:
            return [Part("content", text)] if text else []
        try:
            self._take(read())
        except (RecursionError, ValueError):
            # Endless nesting in an argument with a schema: from here on all is text.
            self._parser = None
            raw = self._scanner.rest if self._scanner and self._has_told else self._raw
            return [*self._parts, Part("content", raw + text)]
        return self._parts

    def _take(self, events: Sequence[Mapping[str, Any]]) -> None:
        for event in events:
            field = event["field"]
            match event["type"]:
                case "region_open":
                    self._field, self._raw, self._blanks = field, "", ""
                    self._is_begun = self._has_told = False
                    if field == "tool_calls" and self._is_json:
                        head = self._head
                        self._scanner = CallScanner() if head is None else NamedScanner(head)
                        self._scanner.push(self._lost)
                case "region_chunk" if field == "tool_calls":
                    self._raw += event["text"]
                    if self._scanner is not None:
                        self._tell_events(self._scanner.push(event["text"]))
                case "region_chunk":
                    self._tell(field, event["text"])
                case "region_close" if field == "tool_calls":
                    self._close_calls(event["value"])

    def _tell(self, field: Any, chunk: str) -> None:
        """Add text, without the blanks between regions."""
        text = self._blanks + chunk
        if not self._is_begun and (field == "reasoning_content" or not self._is_first):
            text = text.lstrip()
        shown = text.rstrip()
        self._blanks = text[len(shown) :]
        if shown:
            self._is_begun, self._is_first = True, False
            self._parts.append(Part(field, shown))

    def _close_calls(self, value: object) -> None:
        scanner, self._scanner = self._scanner, None
        self._entries = []
        if scanner is None or not self._has_told:
            whole = self._lost + value if isinstance(value, str) else value
            self._tell_calls(whole, self._lost + self._raw)
        elif rest := scanner.rest.strip():
            self._parts.append(Part("content", rest))

    def _tell_events(self, events: Sequence[Event]) -> None:
        """Tell of calls as they come, from the first one on that can be told so."""
        for event in events:
            match event:
                case Begun(name):
                    self._has_told, self._is_first = True, False
                    self._tell_entries()
                    self._is_dropped = self._num_calls >= self._max_calls
                    if not self._is_dropped:
                        self._parts.append(new_call(self._num_calls, name, "", self._first))
                        self._num_calls += 1
                case Whole(text):
                    self._entries.append(text)
                    if self._has_told:
                        self._tell_entries()
                case str():
                    if not self._is_dropped:
                        self._parts.append(Part("tool_call", event, self._num_calls - 1))

    def _tell_entries(self) -> None:
        entries, self._entries = self._entries, []
        for entry in entries:
            self._tell_calls(entry, entry)

    def _tell_calls(self, value: object, raw: str) -> None:
        """Tell of complete calls; of `raw` as content if they are none."""
        self._is_first = False
        try:
            calls = _calls(value, self._head)
        except (RecursionError, TypeError, ValueError):
            self._parts.append(Part("content", raw))
            return
        for name, arguments in calls:
            if self._num_calls >= self._max_calls:
                return
            text = arguments
            if not isinstance(text, str):
                text = json.dumps(text, ensure_ascii=False)
            self._parts.append(new_call(self._num_calls, name, text, self._first))
            self._num_calls += 1


def _template(formats: Sequence[Format]) -> dict[str, Any]:
    fields: dict[str, Any] = {"content": {}}
    for part in formats:
        fields |= part.fields
    # The prefix is the whole reply so far: there is no anchor to find.
    return {"fields": fields, "start_anchor": "\0"}


def _calls(value: object, head: re.Pattern[str] | None) -> list[Call]:
    """Read the calls of one region.

    Args:
        head: As in `Format`.

    Raises:
        ValueError: It is not what calls look like.
    """
    match value:
        case {"function": {"name": str(name), "arguments": arguments}}:
            return [(name, _read(arguments))]
        case str(text) if head is not None:
            if (found := head.match(text)) is None:
                raise ValueError("not a call")
            return [(found["name"].strip(), _read(text[found.end() :]))]
        case str(text) if "[ARGS]" in text:
            named = [part.partition("[ARGS]") for part in text.split("[TOOL_CALLS]")]
            return [(name.strip(), _read(arguments)) for name, _, arguments in named]
        case str(text):
            return [_call(entry) for entry in _entries(text)]
        case _:
            raise ValueError("not a call")


def _entries(text: str) -> Iterator[object]:
    """Read a list of objects, or objects separated by semicolons."""
    rest = text.strip()
    while rest:
        value, end = _DECODER.raw_decode(rest)
        yield from value if isinstance(value, list) else [value]
        rest = rest[end:].lstrip("; \n")


def _call(entry: object) -> Call:
    match entry:
        case {"name": str(name), **others}:
            return name, others.get("arguments", others.get("parameters", {}))
        case _:
            raise ValueError("a call has a name and arguments")


def _read(arguments: object) -> object:
    """Return the value of JSON arguments, so that all formats write them alike."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value: object = _DECODER.decode(arguments.strip() or "{}")
    except ValueError:
        return arguments
    return value
