"""Convert the arguments of calls in tags, which are text, to the types of their schemas."""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from tandem.frontend.replies.tagged_scanner import Cast

_TYPES = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    type(None): "null",
    dict: "object",
    list: "array",
}


def cast_of(
    tools: Sequence[Mapping[str, Any]], name: str, groups: Mapping[str, str]
) -> Cast | None:
    """Return a function that converts an argument to its schema's type. None: the argument is always text.

    Args:
        groups: The groups of the argument's key, as in `CastOf`.
    """
    is_string = groups.get("string")
    if is_string == "true":
        return None
    types = _argument_types(tools, name, groups["key"])
    if set(types) - {"string"}:
        return functools.partial(_cast, types)
    if is_string == "false":
        return _json_or_text
    return None if types else _brackets_or_text


def _argument_types(tools: Sequence[Mapping[str, Any]], name: str, key: str) -> list[str]:
    """Return the types that the schema of an argument allows. Without a schema, an argument is text."""
    for tool in reversed(tools):
        match tool.get("function", tool):
            case {"name": str(tool_name), "parameters": {"properties": {**properties}} as root} if (
                tool_name == name and key in properties
            ):
                return _schema_types(properties[key], root)
    return ["string"]


def _schema_types(schema: object, root: Mapping[str, Any]) -> list[str]:
    """Return the types that a schema allows, in its order. Empty: it tells none.

    Args:
        root: The schema to which local references are relative.
    """
    types, left, seen = dict[str, None](), [schema], set[str]()
    while left:
        part = left.pop()
        if not isinstance(part, dict):
            continue
        declared = part.get("type")
        if declared is None:
            values = part["enum"] if isinstance(part.get("enum"), list) else []
            values = [part["const"]] if "const" in part else values
            declared = [_TYPES[type(value)] for value in values]
        declared = declared if isinstance(declared, list) else [declared]
        types |= dict.fromkeys(each for each in declared if isinstance(each, str))
        inner: list[object] = [{"type": "null"}] if part.get("nullable") else []
        for union in ("allOf", "oneOf", "anyOf"):
            inner += reversed(part[union]) if isinstance(part.get(union), list) else []
        ref = part.get("$ref")
        if isinstance(ref, str) and ref not in seen:
            seen.add(ref)
            inner.append(_referenced(root, ref))
        left += inner
    return list(types)


def _referenced(root: object, ref: str) -> object:
    """Return the schema at a local reference. None: there is none."""
    start, *keys = unquote(ref).split("/")
    if start != "#":
        return None
    for key in keys:
        name = key.replace("~1", "/").replace("~0", "~")
        root = root.get(name) if isinstance(root, dict) else None
    return root


def _cast(types: Sequence[str], text: str) -> str:
    from transformers.utils.chat_parsing import parse_response

    call = json.dumps({"function": {"name": "f", "arguments": {"a": text}}})
    tool = {"name": "f", "parameters": {"properties": {"a": {"type": types}}}}
    template = {"fields": {"call": {"content": "json"}}, "start_anchor": "\0"}
    try:
        read = parse_response(call, template, prefix="", tools=[tool])
        return json.dumps(read["call"]["function"]["arguments"]["a"], ensure_ascii=False)
    except RecursionError:  # nested too deeply
        return json.dumps(text, ensure_ascii=False)


def _brackets_or_text(text: str) -> str:
    is_json = text.lstrip().startswith(("{", "["))
    return _json_or_text(text) if is_json else json.dumps(text, ensure_ascii=False)


def _json_or_text(text: str) -> str:
    try:
        return json.dumps(json.loads(text), allow_nan=False, ensure_ascii=False)
    except (RecursionError, ValueError):
        return json.dumps(text, ensure_ascii=False)
