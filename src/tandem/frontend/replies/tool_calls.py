"""The parts of a reply, and the parsers of forced tool calls.

```
 text of one choice ──▶ Reply.push, Reply.finish ──▶ ReplyPart, ReplyPart, ... ──▶ deltas of a stream, or one message
```

`chat/tool_choice.py` chooses the parser. Reasoning may precede a forced call: `AfterReasoning` parses it and passes the
rest to the parser of the call.
"""

import math
import secrets
from collections.abc import Iterable
from typing import Any, Literal, Protocol

import msgspec

from tandem.frontend.replies.call_scanner import CallBegin, CallScanner, ScanEvent
from tandem.frontend.replies.formats import ReasoningMarks
from tandem.frontend.replies.marks import marks

TextKind = Literal["content", "reasoning_content"]


class ReplyPart(msgspec.Struct, frozen=True, gc=False):
    """The next part of a reply.

    Attributes:
        text: Text of this kind. For a call, the next piece of its JSON arguments.
        index: Index of the call in the reply.
        call_id: Id of the call. Like `name`, set only on the call's first part.
    """

    kind: Literal["content", "reasoning_content", "tool_call"]
    text: str
    index: int = 0
    call_id: str = ""
    name: str = ""

    def delta(self) -> dict[str, Any]:
        """Return the part as the `delta` of a streamed choice."""
        if self.kind != "tool_call":
            return {self.kind: self.text}
        call: dict[str, Any] = {"index": self.index}
        if self.call_id:
            call |= {"id": self.call_id, "type": "function"}
        function = {"name": self.name} if self.name else {}
        return {"tool_calls": [call | {"function": function | {"arguments": self.text}}]}


class Reply(Protocol):
    """Parses the text of one choice incrementally."""

    @property
    def finish_reason(self) -> Literal["stop", "tool_calls"]:
        """The finish reason of an answer that was neither truncated nor aborted."""

    def push(self, text: str) -> list[ReplyPart]:
        """Return the parts that `text` completes. Joined, they do not depend on how the text was split."""

    def finish(self) -> list[ReplyPart]:
        """Return the remaining parts. `push` must not be called afterwards."""


def new_call(index: int, name: str, arguments: str, first: int | None) -> ReplyPart:
    """Return a call, or its first part, with a new id.

    Args:
        first: Number of the reply's first call, for formats that number the calls of a conversation. None: the
            id is random, as in OpenAI's API.
    """
    id_ = f"call_{secrets.token_hex(12)}" if first is None else f"functions.{name}:{first + index}"
    return ReplyPart("tool_call", arguments, index, id_, name)


def message(parts: Iterable[ReplyPart]) -> dict[str, Any]:
    """Return the parts of a complete reply as the `message` of a choice."""
    texts = {"content": "", "reasoning_content": ""}
    calls: list[dict[str, Any]] = []
    for part in parts:
        if part.kind != "tool_call":
            texts[part.kind] += part.text
        elif part.call_id:
            function = {"name": part.name, "arguments": part.text}
            calls.append({"id": part.call_id, "type": "function", "function": function})
        else:
            calls[part.index]["function"]["arguments"] += part.text
    # As in OpenAI's API, content is null if the reply has calls and no text.
    optional = {"reasoning_content": texts["reasoning_content"], "tool_calls": calls}
    optional = {name: value for name, value in optional.items() if value}
    content = texts["content"] or (None if optional else "")
    return {"role": "assistant", "content": content, **optional}


class TextParts:
    """Text between marks, without the whitespace next to them.

    Attributes:
        kind: Kind of the current text.
        blanks: Whitespace at the end of the current text, which is returned once text follows.
    """

    def __init__(self, kind: TextKind = "content") -> None:
        self.kind = kind
        self.blanks = list[str]()
        self._is_lead = False  # whether whitespace is dropped until text follows

    def begin(self, kind: TextKind) -> None:
        """Begin the text behind a mark."""
        self.kind, self.blanks, self._is_lead = kind, [], True

    def add(self, text: str) -> list[ReplyPart]:
        """Return the part that `text` completes, if it has more than whitespace."""
        if self._is_lead:
            text = text.lstrip()
        shown, parts = text.rstrip(), []
        if shown:
            self._is_lead = False
            parts = [ReplyPart(self.kind, "".join(self.blanks) + shown)]
            self.blanks = []
        if blank := text[len(shown) :]:
            self.blanks.append(blank)
        return parts


class CallParts:
    """The calls of a reply, up to the number that the request allows.

    Args:
        first: As in `new_call`.
        max_calls: Number of calls after which further calls are dropped.
    """

    def __init__(self, first: int | None = None, max_calls: float = math.inf) -> None:
        self.num_calls = 0
        self._first, self._max_calls = first, max_calls
        self._is_dropped = False  # whether the open call is one too many

    def add(self, event: ScanEvent) -> list[ReplyPart]:
        """Return the part of an event of a scanner."""
        if isinstance(event, CallBegin):
            self._is_dropped = self.num_calls >= self._max_calls
            if self._is_dropped:
                return []
            self.num_calls += 1
            return [new_call(self.num_calls - 1, event.name, "", self._first)]
        return [] if self._is_dropped else [ReplyPart("tool_call", event, self.num_calls - 1)]


class ForcedCall:
    """Parses the answer to a named `tool_choice`: all text is arguments, returned immediately."""

    # As in OpenAI's API.
    finish_reason: Literal["stop", "tool_calls"] = "stop"

    def __init__(self, name: str, first: int | None) -> None:
        self._name, self._first = name, first

    def push(self, text: str) -> list[ReplyPart]:
        """Return `text` as arguments."""
        if not text:
            return []
        name, self._name = self._name, ""
        return [new_call(0, name, text, self._first) if name else ReplyPart("tool_call", text)]

    def finish(self) -> list[ReplyPart]:
        """Return nothing, because `push` returned every part."""
        return []


class ForcedCalls:
    """Parses the answer to `tool_choice: required`: a list of calls, whose arguments are streamed."""

    def __init__(self, first: int | None) -> None:
        self._text, self._calls = list[str](), CallParts(first)
        self._scanner = CallScanner()

    @property
    def finish_reason(self) -> Literal["stop", "tool_calls"]:
        """`tool_calls` once a call has started."""
        return "tool_calls" if self._calls.num_calls else "stop"

    def push(self, text: str) -> list[ReplyPart]:
        """Return the starts of calls and pieces of arguments. In the grammar, names precede arguments."""
        if not self._calls.num_calls:
            self._text.append(text)
        return [part for event in self._scanner.push(text) for part in self._calls.add(event)]

    def finish(self) -> list[ReplyPart]:
        """Return the text as content if the list was truncated before its first call."""
        text = "" if self._calls.num_calls else "".join(self._text)
        return [ReplyPart("content", text)] if text else []


class AfterReasoning:
    """Parses reasoning, and passes the text after it to a second parser. A `Reply`.

    Whitespace next to the marks is dropped. Unlike `ParsedReply`, it ignores marks after the reasoning, because the
    arguments of a forced call may contain them.
    """

    def __init__(self, reasoning: ReasoningMarks, rest: Reply) -> None:
        self._marks, self._rest = reasoning, rest
        self._is_open = reasoning.is_open
        self._is_past = self._has_rest = False
        self._held = ""  # text that may still become a mark
        self._blanks = list[str]()  # whitespace before it
        self._reasoning = TextParts()
        self._reasoning.begin("reasoning_content")

    @property
    def finish_reason(self) -> Literal["stop", "tool_calls"]:
        """The second parser's finish reason."""
        return self._rest.finish_reason

    def push(self, text: str) -> list[ReplyPart]:
        """Return reasoning, without text that may still become the closing mark, then the second parser's parts."""
        if self._is_past:
            return self._push_rest(text)
        text = self._held + text
        if not self._is_open:
            start, opening = text.lstrip(), self._marks.opening
            if not start.startswith(opening):
                self._blanks.append(text[: len(text) - len(start)])
                self._held = start
                if opening.startswith(start):
                    return []
                self._is_past = True
                return self._push_rest(start)
            text, self._is_open = start.removeprefix(opening), True
        before, mark, rest = marks(self._marks.closing).split(text)
        parts = self._reasoning.add(before)
        if mark:
            self._is_past = True
            return [*parts, *self._push_rest(rest)]
        self._held = rest
        return parts

    def finish(self) -> list[ReplyPart]:
        """Return the text held back if the answer was truncated, or the second parser's remaining parts."""
        if self._is_past:
            return self._rest.finish()
        if self._is_open:
            return self._reasoning.add(self._held)
        text = "".join(self._blanks) + self._held
        return [ReplyPart("content", text)] if text else []

    def _push_rest(self, text: str) -> list[ReplyPart]:
        if not self._has_rest:
            text = text.lstrip()
            self._has_rest = bool(text)
        return self._rest.push(text)
