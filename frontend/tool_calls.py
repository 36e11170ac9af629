"""Tools that a client makes the model call: from `tool_choice` to a grammar, from the answer to calls.

```
 tool_choice        grammar of the answer                        the answer becomes
 "none", "auto"     none                                         what `frontend/reply_parser.py` finds in it
 "required"         [{"name": ..., "parameters": {...}}, ...]    a call for each entry
 {"function": ...}  the parameters' schema                       the arguments of one call
```

So that a call that was asked for comes, is well-formed and fits its schema, whatever the model was trained
to write. Leaves out finding calls in free text.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pydantic_core

from tandem.frontend.grammars import native_grammar
from tandem.frontend.reply import CallIds, Part, Reply, new_call
from tandem.wire.errors import InvalidRequest
from tandem.wire.generation import Grammar

Tool = Mapping[str, Any]


class ForcedCall:
    """Reads the answer to a named tool: all of it is arguments, told as they come."""

    # As OpenAI: the end of a call that the client named is an ordinary one.
    finish_reason = "stop"

    def __init__(self, name: str, ids: CallIds) -> None:
        self._name, self._ids = name, ids

    def push(self, text: str) -> list[Part]:
        """See `Reply`."""
        if not text:
            return []
        name, self._name = self._name, ""
        return [new_call(0, name, text, self._ids) if name else Part("tool_call", text)]

    def finish(self) -> list[Part]:
        """See `Reply`."""
        return []


class ForcedCalls:
    """Reads the answer to `required`: a list of calls, told once it is whole."""

    finish_reason = "tool_calls"

    def __init__(self, ids: CallIds) -> None:
        self._ids, self._text = ids, ""

    def push(self, text: str) -> list[Part]:
        """See `Reply`."""
        self._text += text
        return []

    def finish(self) -> list[Part]:
        """See `Reply`. A list that was cut short is told as content."""
        try:
            calls = pydantic_core.from_json(self._text)
        except ValueError:
            return [Part("content", self._text)] if self._text else []
        return [
            new_call(
                index, call["name"], json.dumps(call["parameters"], ensure_ascii=False), self._ids
            )
            for index, call in enumerate(calls)
        ]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What a client wants of its tools.

    Attributes:
        tools: Those that the template is told of.
        grammar: Of the answer, where a call is forced.
        name: Of the one tool that must be called; empty where any may.
    """

    tools: Sequence[Tool]
    grammar: Grammar | None = None
    name: str = ""

    def reply(self, ids: CallIds) -> Reply:
        """Return what reads an answer that follows the grammar, and gives its calls these ids."""
        return ForcedCall(self.name, ids) if self.name else ForcedCalls(ids)


def read_choice(tools: Sequence[Tool], choice: object, *, is_parallel: bool) -> ToolChoice:
    """Read `tools`, `tool_choice` and `parallel_tool_calls`.

    Raises:
        InvalidRequest: The choice is none of those known, or names no tool; or a tool has no name, or
            parameters that are no schema.
    """
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


def _parameters(tool: Tool) -> dict[str, Any]:
    parameters = tool["function"].get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise InvalidRequest(f"tools: the parameters of {_name(tool)!r} must be a JSON schema")
    return parameters


def _list_schema(schemas: Mapping[str, dict[str, Any]], *, is_parallel: bool) -> dict[str, Any]:
    """Return the schema of a list of calls. What parameters refer to moves up, to where `#` points now."""
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
    grammar = native_grammar({"json_schema": schema})
    assert grammar is not None
    return grammar
