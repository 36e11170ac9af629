"""Replies with tool calls: the parts of a reply, and the calls that a client forces by `tool_choice`.

```
 text of one choice ──▶ Reply.push, Reply.finish ──▶ Part, Part, ... ──▶ deltas of a stream, or one message

 tool_choice        grammar of the answer                        reader of the answer
 "none", "auto"     none                                         `ParsedReply` in `frontend/reply_parser.py`
 "required"         [{"name": ..., "parameters": {...}}, ...]    `ForcedCalls`: a call for each entry
 {"function": ...}  the parameters' schema                       `ForcedCall`: the arguments of one call
```

A model may think before a forced call: `AfterThoughts` reads the thoughts, and one of these readers the rest.

A forced call comes, is well-formed and fits its schema, whatever the model was trained to write.
"""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from tandem.frontend.call_scanner import Begun, CallScanner, Whole
from tandem.frontend.reply_formats import Thoughts
from tandem.wire.errors import InvalidRequest
from tandem.wire.generation import Grammar


@dataclass(frozen=True, slots=True)
class Part:
    """The next part of a reply.

    Attributes:
        text: For a call, text of its arguments. All parts together are JSON.
        index: The call's index in the reply.
        call_id: Set on the first part of a call, as `name` is.
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
    """Reads the text of one choice as it comes."""

    @property
    def finish_reason(self) -> Literal["stop", "tool_calls"]:
        """The finish reason of an answer that ended by itself."""

    def push(self, text: str) -> list[Part]:
        """Return the parts that `text` completes. They join to the same however the text is cut."""

    def finish(self) -> list[Part]:
        """Return the rest. Nothing may be pushed afterwards."""


def new_call(index: int, name: str, arguments: str, first: int | None) -> Part:
    """Return a call, or its beginning, with a new id.

    Args:
        first: Number of the reply's first call, where ids number the calls of a conversation. None: the
            id is random, as OpenAI's.
    """
    id_ = f"call_{secrets.token_hex(12)}" if first is None else f"functions.{name}:{first + index}"
    return Part("tool_call", arguments, index, id_, name)


def message(parts: Iterable[Part]) -> dict[str, Any]:
    """Return the parts of a whole reply as the `message` of a choice."""
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
    # OpenAI's content is null where there are only calls.
    others = {"reasoning_content": texts["reasoning_content"], "tool_calls": calls}
    others = {name: value for name, value in others.items() if value}
    content = texts["content"] or (None if others else "")
    return {"role": "assistant", "content": content, **others}


Tool = Mapping[str, Any]


class ForcedCall:
    """Reads the answer to a named tool: all of it is arguments, returned as they come."""

    # As OpenAI.
    finish_reason: Literal["stop", "tool_calls"] = "stop"

    def __init__(self, name: str, first: int | None) -> None:
        self._name, self._first = name, first

    def push(self, text: str) -> list[Part]:
        """Return `text` as arguments."""
        if not text:
            return []
        name, self._name = self._name, ""
        return [new_call(0, name, text, self._first) if name else Part("tool_call", text)]

    def finish(self) -> list[Part]:
        """Return nothing: every part was returned already."""
        return []


class ForcedCalls:
    """Reads the answer to `required`: a list of calls, whose arguments are returned as they come."""

    def __init__(self, first: int | None) -> None:
        self._first, self._text, self._num_calls = first, "", 0
        self._scanner = CallScanner()

    @property
    def finish_reason(self) -> Literal["stop", "tool_calls"]:
        """`tool_calls` once a call has begun."""
        return "tool_calls" if self._num_calls else "stop"

    def push(self, text: str) -> list[Part]:
        """Return the beginnings of calls, and arguments. The grammar puts the name before them."""
        if not self._num_calls:
            self._text += text
        parts = []
        for event in self._scanner.push(text):
            match event:
                case Begun(name):
                    parts.append(new_call(self._num_calls, name, "", self._first))
                    self._num_calls += 1
                case str():
                    parts.append(Part("tool_call", event, self._num_calls - 1))
                case Whole():
                    pass  # the grammar allows none
        return parts

    def finish(self) -> list[Part]:
        """Return a list that was cut short before its first call, as content."""
        return [Part("content", self._text)] if self._text and not self._num_calls else []


class AfterThoughts:
    """Reads thoughts, then the rest by another reader. A `Reply`. Blanks beside the marks are dropped.

    Unlike `ParsedReply`, it looks for no marks after the thoughts: a forced call may have them in its arguments.
    """

    def __init__(self, thoughts: Thoughts, rest: Reply) -> None:
        self._thoughts, self._rest = thoughts, rest
        self._is_open = thoughts.is_open
        self._is_past = self._has_rest = self._has_thoughts = False
        self._held = ""  # may yet become a mark, or blanks beside one

    @property
    def finish_reason(self) -> Literal["stop", "tool_calls"]:
        """The other reader's."""
        return self._rest.finish_reason

    def push(self, text: str) -> list[Part]:
        """Return thoughts up to what may yet become the closing mark, then the other reader's parts."""
        if self._is_past:
            return self._push_rest(text)
        self._held += text
        if not self._is_open:
            start, opening = self._held.lstrip(), self._thoughts.opening
            if not start.startswith(opening):
                if opening.startswith(start):
                    return []
                self._is_past = True
                return self._push_rest(start)
            self._held, self._is_open = start.removeprefix(opening), True
        closing = self._thoughts.closing
        before, mark, after = self._held.partition(closing)
        if mark:
            self._is_past = True
            return [*self._told(before), *self._push_rest(after)]
        lengths = range(min(len(closing), len(before)), 0, -1)
        num_held = next((num for num in lengths if before.endswith(closing[:num])), 0)
        shown = before[: len(before) - num_held].rstrip()
        self._held = before[len(shown) :]
        return self._told(shown)

    def finish(self) -> list[Part]:
        """Return what was held back of an answer that was cut short, and the other reader's rest."""
        if self._is_past:
            return self._rest.finish()
        if self._is_open:
            return self._told(self._held)
        return [Part("content", self._held)] if self._held else []

    def _told(self, text: str) -> list[Part]:
        text = text.rstrip() if self._has_thoughts else text.strip()
        self._has_thoughts |= bool(text)
        return [Part("reasoning_content", text)] if text else []

    def _push_rest(self, text: str) -> list[Part]:
        if not self._has_rest:
            text = text.lstrip()
            self._has_rest = bool(text)
        return self._rest.push(text)


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """A client's choice of tools.

    Attributes:
        tools: Those that the template gets.
        grammar: The grammar of the answer, if a call is forced.
        name: The one tool that must be called, or empty.
    """

    tools: Sequence[Tool]
    grammar: Grammar | None = None
    name: str = ""

    @property
    def schemas(self) -> dict[str, Any]:
        """The schema of each tool's arguments, any object for a tool that is not strict; empty if none is strict."""
        if not any(_is_strict(tool) for tool in self.tools):
            return {}
        return {
            _name(tool): _parameters(tool) if _is_strict(tool) else {"type": "object"}
            for tool in self.tools
        }

    def reply(self, first: int | None, thoughts: Thoughts | None = None) -> Reply:
        """Return the reader of an answer that follows the grammar, behind thoughts; `first` as in `new_call`."""
        forced = ForcedCall(self.name, first) if self.name else ForcedCalls(first)
        return forced if thoughts is None else AfterThoughts(thoughts, forced)


def read_choice(tools: Sequence[Tool], choice: object, *, is_parallel: bool) -> ToolChoice:
    """Read `tools`, `tool_choice` and `parallel_tool_calls`."""
    if choice is None or choice == "auto":
        return ToolChoice(tools)
    if choice == "none":
        return ToolChoice([])
    schemas = {_name(tool): _parameters(tool) for tool in tools}
    if choice == "required":
        if not schemas:
            raise InvalidRequest("tool_choice: 'required' needs tools to choose from")
        return ToolChoice(tools, _grammar(_list_schema(schemas, is_parallel=is_parallel)))
    name = _named(choice)
    if name not in schemas:
        raise InvalidRequest(f"tool_choice: {name!r} is none of the tools")
    return ToolChoice(tools, _grammar(schemas[name]), name)


def _named(choice: object) -> str:
    match choice:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
        case _:
            raise InvalidRequest(
                "tool_choice: must be 'none', 'auto', 'required', or "
                '{"type": "function", "function": {"name": ...}}'
            )


def _name(tool: Tool) -> str:
    match tool:
        case {"function": {"name": str(name)}} if name:
            return name
        case _:
            raise InvalidRequest(
                'tools: each must be {"type": "function", "function": {"name": ...}}'
            )


def _is_strict(tool: Tool) -> bool:
    function = tool.get("function")
    return isinstance(function, dict) and function.get("strict") is True


def _parameters(tool: Tool) -> dict[str, Any]:
    parameters = tool["function"].get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise InvalidRequest(f"tools: the parameters of {_name(tool)!r} must be a JSON schema")
    return parameters


def _list_schema(schemas: Mapping[str, dict[str, Any]], *, is_parallel: bool) -> dict[str, Any]:
    """Return the schema of a list of calls. Shared definitions move up, to where `#` points now."""
    shared: dict[str, dict[str, Any]] = {}
    items = []
    for name, parameters in schemas.items():
        for place in ("$defs", "definitions"):
            if (kept := parameters.get(place)) is None:
                continue
            if not isinstance(kept, dict):
                raise InvalidRequest(f"tools: {place} of {name!r} must be an object of schemas")
            _share(shared.setdefault(place, {}), kept, name)
        own = {
            key: value for key, value in parameters.items() if key not in ("$defs", "definitions")
        }
        properties = {"name": {"const": name}, "parameters": own}
        items.append({"type": "object", "properties": properties, "required": list(properties)})
    bounds = {"minItems": 1} if is_parallel else {"minItems": 1, "maxItems": 1}
    return {"type": "array", **bounds, "items": {"anyOf": items}, **shared}


def _share(shared: dict[str, Any], kept: Mapping[str, Any], name: str) -> None:
    for key, schema in kept.items():
        if shared.setdefault(key, schema) != schema:
            raise InvalidRequest(
                f"tools: {name!r} and another define {key!r} differently: give one of them another name"
            )


def _grammar(schema: dict[str, Any]) -> Grammar:
    from tandem.frontend.grammars import (
        native_grammar,
    )  # a misspelt flag need not wait for pydantic

    grammar = native_grammar({"json_schema": schema})
    assert grammar is not None
    return grammar
