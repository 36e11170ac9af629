"""Calls of tools and thoughts, found in what a model writes freely.

transformers' `ResponseParser` finds the regions of a format of `frontend/reply_formats.py` as text comes;
here they become parts of a reply, and the JSON in them is read. What cannot be read is told as content:
nothing that a model wrote is lost, but for the marks around it and blanks beside them. Where a client allows one
call, those behind the first are dropped.

transformers is imported only where a format was asked for: it costs 0.6 s and 45 MB, without torch.
"""

import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.frontend.reply import CallIds, Part, Reply, new_call, numbered_ids, random_ids
from tandem.frontend.reply_formats import (
    REASONING_ALIASES,
    REASONING_FORMATS,
    TOOL_ALIASES,
    TOOL_FORMATS,
    Format,
)
from tandem.wire.errors import ConfigInvalid

# Models write line breaks into strings as they are.
_DECODER = json.JSONDecoder(strict=False)

# A name and its arguments: an object, or the text of what could not be read.
Call = tuple[str, object]


@dataclass(frozen=True, slots=True)
class ReplyFormats:
    """The formats that a server was told its model writes in; neither is the default."""

    tools: Format | None = None
    thoughts: Format | None = None

    def call_ids(self, num_earlier: int) -> CallIds:
        """Return what makes the ids of a reply's calls.

        Args:
            num_earlier: Calls that stand in the conversation before the reply.
        """
        is_numbered = self.tools is not None and self.tools.has_numbered_calls
        return numbered_ids(num_earlier) if is_numbered else random_ids

    def load(self) -> None:
        """Import what reads these formats: later it would hold up whatever else the loop has to do."""
        if self != NO_FORMATS:
            import transformers.utils.chat_parsing  # noqa: F401

    def reply(
        self,
        prompt: str,
        tools: Sequence[Mapping[str, Any]],
        ids: CallIds = random_ids,
        *,
        is_split: bool = True,
        is_parallel: bool = True,
    ) -> Callable[[], Reply] | None:
        """Return what makes the reader of one choice, or None where its text is all content.

        Args:
            prompt: Its end may have put the model into its thoughts.
            tools: That the model was told of; with none, no calls are looked for.
            ids: Of the calls that are found.
            is_split: Whether thoughts are told apart.
            is_parallel: Whether there may be several calls; else those behind the first are dropped.
        """
        formats = [
            part
            for part in (self.thoughts if is_split else None, self.tools if tools else None)
            if part is not None
        ]
        if not formats:
            return None
        openings = [part.opening for part in formats if part.opening]
        prefix = next((text for text in openings if prompt.rstrip().endswith(text)), "")
        return functools.partial(ParsedReply, formats, prefix, tools, ids, is_parallel=is_parallel)


NO_FORMATS = ReplyFormats()


def reply_formats(tools: str, thoughts: str) -> ReplyFormats:
    """Return the formats of these names, as the flags give them; empty is none.

    Raises:
        ConfigInvalid: A name is not known.
    """
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
    return found


class ParsedReply:
    """Reads one choice by the formats of its model.

    Args:
        prefix: What the prompt ended with that opens a region, or nothing.
        tools: Whose schemas say of what type an argument in tags is.
        ids: Of its calls.
        is_parallel: Whether there may be several calls; else those behind the first are dropped.
    """

    def __init__(
        self,
        formats: Sequence[Format],
        prefix: str,
        tools: Sequence[Mapping[str, Any]],
        ids: CallIds,
        *,
        is_parallel: bool,
    ) -> None:
        from transformers.utils.chat_parsing import ResponseParser

        self._lost = "".join(part.lost for part in formats)
        self._parser: Any = ResponseParser(_template(formats), prefix=prefix, tools=list(tools))
        self._ids, self._num_calls = ids, 0
        self._max_calls = math.inf if is_parallel else 1
        self._field = ""  # that was opened last
        self._raw = ""  # of the call that is being written
        self._blanks = ""  # at the end of an open text, told once something follows
        self._is_begun = False  # whether some of the open text was told
        self._is_first = True  # whether nothing at all was told yet
        self._parts: list[Part] = []
        self._take(self._parser.initial_events)

    @property
    def finish_reason(self) -> str:
        """See `Reply`."""
        return "tool_calls" if self._num_calls else "stop"

    def push(self, text: str) -> list[Part]:
        """See `Reply`."""
        return self._follow(lambda: self._parser.feed(text), text)

    def finish(self) -> list[Part]:
        """See `Reply`."""
        parts = self._follow(lambda: self._parser.finalize()[1], "")
        # Blanks at the end of it all are not between anything.
        if self._field == "content" and self._blanks and (self._is_begun or self._is_first):
            parts = [*parts, Part("content", self._blanks)]
        return parts

    def _follow(self, read: Callable[[], list[dict[str, Any]]], text: str) -> list[Part]:
        self._parts = []
        if self._parser is None:
            return [Part("content", text)] if text else []
        try:
            self._take(read())
        except (RecursionError, ValueError):
            # Nested without end, where a schema says what an argument is: from here on it is text.
            self._parser = None
            return [*self._parts, Part("content", self._raw + text)]
        return self._parts

    def _take(self, events: Sequence[Mapping[str, Any]]) -> None:
        for event in events:
            field = event["field"]
            match event["type"]:
                case "region_open":
                    self._field, self._raw, self._blanks = field, "", ""
                    self._is_begun = False
                case "region_chunk" if field == "tool_calls":
                    self._raw += event["text"]
                case "region_chunk":
                    self._tell(field, event["text"])
                case "region_close" if field == "tool_calls":
                    self._tell_calls(event["value"])

    def _tell(self, field: Any, chunk: str) -> None:
        """Tell text, but for blanks between what is told apart."""
        text = self._blanks + chunk
        if not self._is_begun and (field == "reasoning_content" or not self._is_first):
            text = text.lstrip()
        shown = text.rstrip()
        self._blanks = text[len(shown) :]
        if shown:
            self._is_begun, self._is_first = True, False
            self._parts.append(Part(field, shown))

    def _tell_calls(self, value: object) -> None:
        self._is_first = False
        try:
            calls = _calls(self._lost + value if isinstance(value, str) else value)
        except (RecursionError, TypeError, ValueError):
            self._parts.append(Part("content", self._lost + self._raw))
            return
        for name, arguments in calls:
            if self._num_calls >= self._max_calls:
                return
            text = arguments if isinstance(arguments, str) else _dumps(arguments)
            self._parts.append(new_call(self._num_calls, name, text, self._ids))
            self._num_calls += 1


def _template(formats: Sequence[Format]) -> dict[str, Any]:
    fields: dict[str, Any] = {"content": {}}
    for part in formats:
        fields |= part.fields
    # The prefix is all that was written of the reply: there is nothing to look for an anchor in.
    return {"fields": fields, "start_anchor": "\0"}


def _calls(value: object) -> list[Call]:
    """Read the calls of one region.

    Raises:
        ValueError: It is not what calls look like.
    """
    match value:
        case {"function": {"name": str(name), "arguments": arguments}}:
            return [(name, _read(arguments))]
        case str(text) if "[ARGS]" in text:
            named = [part.partition("[ARGS]") for part in text.split("[TOOL_CALLS]")]
            return [(name.strip(), _read(arguments)) for name, _, arguments in named]
        case str(text):
            return [_call(entry) for entry in _entries(text)]
        case _:
            raise ValueError("not a call")


def _entries(text: str) -> Iterator[object]:
    """Read a list of objects, or objects behind each other with semicolons between them."""
    rest = text.strip()
    while rest:
        value, end = _DECODER.raw_decode(rest)
        yield from value if isinstance(value, list) else [value]
        rest = rest[end:].lstrip("; \n")


def _call(entry: object) -> Call:
    match entry:
        case {"name": str(name), "arguments": arguments} | {
            "name": str(name),
            "parameters": arguments,
        }:
            return name, arguments
        case {"name": str(name)}:
            return name, {}
        case _:
            raise ValueError("a call has a name and arguments")


def _read(arguments: object) -> object:
    """Return arguments that are JSON as what they say, so that all formats write them alike."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value: object = _DECODER.decode(arguments.strip() or "{}")
    except ValueError:
        return arguments
    return value


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
