"""Finds tool calls and thoughts in what a model writes freely.

transformers' `ResponseParser` finds the regions of a format of `frontend/reply_formats.py`. Here they
become parts of a reply, and their calls are read. Unreadable regions become content, as does text between the
tags of a call: nothing that a model wrote is lost, except marks and the blanks beside them.

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
from tandem.frontend.tagged_scanner import Cast, TaggedScanner
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
        # Of the open region.
        self._scanner: CallScanner | NamedScanner | TaggedScanner | None = None
        self._head = next((part.head for part in formats if part.head is not None), None)
        self._tags = next((part.tags for part in formats if part.tags is not None), None)
        self._tools = tools
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
        return self._take(self._parser.feed(text))

    def finish(self) -> list[Part]:
        """Return the rest."""
        parts = self._take(self._parser.finalize()[1])
        # Blanks at the very end separate nothing.
        if self._field == "content" and self._blanks and (self._is_begun or self._is_first):
            parts = [*parts, Part("content", self._blanks)]
        return parts

    def _take(self, events: Sequence[Mapping[str, Any]]) -> list[Part]:
        self._parts = []
        for event in events:
            field = event["field"]
            match event["type"]:
                case "region_open":
                    self._field, self._raw, self._blanks = field, "", ""
                    self._is_begun = self._has_told = False
                    if field == "tool_calls":
                        self._scanner = self._new_scanner()
                        self._scanner.push(self._lost)
                case "region_chunk" if field == "tool_calls":
                    self._raw += event["text"]
                    if self._scanner is not None:
                        self._tell_events(self._scanner.push(event["text"]))
                case "region_chunk":
                    self._tell(field, event["text"])
                case "region_close" if field == "tool_calls":
                    self._close_calls(event["value"])
        return self._parts

    def _new_scanner(self) -> CallScanner | NamedScanner | TaggedScanner:
        if self._head is None:
            return CallScanner()
        if self._tags is None:
            return NamedScanner(self._head)
        return TaggedScanner(self._head, self._tags, functools.partial(_cast_of, self._tools))

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

    def _close_calls(self, text: str) -> None:
        scanner, self._scanner = self._scanner, None
        if isinstance(scanner, TaggedScanner):
            self._tell_events(scanner.end())
        self._entries = []
        if scanner is None or not self._has_told:
            self._tell_calls(self._lost + text, self._lost + self._raw)
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

    def _tell_calls(self, text: str, raw: str) -> None:
        """Tell of complete calls; of `raw` as content if they are none."""
        self._is_first = False
        try:
            calls = _calls(text, self._head)
        except (RecursionError, TypeError, ValueError):
            self._parts.append(Part("content", raw))
            return
        for name, arguments in calls:
            if self._num_calls >= self._max_calls:
                return
            told = arguments
            if not isinstance(told, str):
                told = json.dumps(told, ensure_ascii=False)
            self._parts.append(new_call(self._num_calls, name, told, self._first))
            self._num_calls += 1


def _template(formats: Sequence[Format]) -> dict[str, Any]:
    fields: dict[str, Any] = {"content": {}}
    for part in formats:
        fields |= part.fields
    # The prefix is the whole reply so far: there is no anchor to find.
    return {"fields": fields, "start_anchor": "\0"}


def _cast_of(tools: Sequence[Mapping[str, Any]], name: str, key: str) -> Cast | None:
    """Return transformers' cast of an argument by its tool's schema, or None if it is text for certain."""
    if all(_is_text(tool, name, key) for tool in tools):
        return None
    return functools.partial(_cast, tools, name, key)


def _is_text(tool: Mapping[str, Any], name: str, key: str) -> bool:
    match tool.get("function", tool):
        case {"name": own, "parameters": {"properties": {**properties}}} if own == name:
            schema = properties.get(key)
        case _:
            return True
    if not isinstance(schema, dict):
        return True
    is_union = any(schema.get(union) for union in ("anyOf", "oneOf", "nullable"))
    return not is_union and schema.get("type") in (None, "string")


def _cast(tools: Sequence[Mapping[str, Any]], name: str, key: str, text: str) -> str:
    from transformers.utils.chat_parsing import parse_response

    call = json.dumps({"function": {"name": name, "arguments": {key: text}}})
    template = {"fields": {"call": {"content": "json"}}, "start_anchor": "\0"}
    try:
        read = parse_response(call, template, prefix="", tools=list(tools))
        return json.dumps(read["call"]["function"]["arguments"][key], ensure_ascii=False)
    except RecursionError:  # nested without end
        return json.dumps(text, ensure_ascii=False)


def _calls(text: str, head: re.Pattern[str] | None) -> list[Call]:
    """Read the calls of one region.

    Args:
        head: As in `Format`.

    Raises:
        ValueError: It is not what calls look like.
    """
    if head is not None:
        if (found := head.match(text)) is None:
            raise ValueError("not a call")
        return [(found["name"].strip(), _read(text[found.end() :]))]
    if "[ARGS]" in text:
        named = [part.partition("[ARGS]") for part in text.split("[TOOL_CALLS]")]
        return [(name.strip(), _read(arguments)) for name, _, arguments in named]
    return [_call(entry) for entry in _entries(text)]


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


def _read(arguments: str) -> object:
    """Return the value of JSON arguments, so that all formats write them alike."""
    try:
        value: object = _DECODER.decode(arguments.strip() or "{}")
    except ValueError:
        return arguments
    return value
