"""Error messages for fields of a body: the path of the field, and the allowed values.

msgspec reports a path and a type: "Expected `int`, got `str` - at `$.stop[0]`". Allowed values are not in its
messages, so they are looked up in the body's type.
"""

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from msgspec import ValidationError, inspect

# The last match: a client's value may contain the same words.
_PLACE = re.compile(r"(.*) - at `(key` in `)?\$(.*)`", re.DOTALL)
_STEP = re.compile(r"\.(\w+)|\[(\d+|\.\.\.)\]")
_BOUND = re.compile(r"Expected `(\w+)`( of length)? (<=|>=|<|>) (.*)")
_BOUNDS = {"<=": "at most", ">=": "at least", "<": "less than", ">": "more than"}
# An error quotes at most this many characters of a client's name or value.
MAX_NAME_CHARS = 64
_TYPES = {
    "bool": "true or false",
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "array": "a list",
    "object": "an object",
}


def sentence(error: ValidationError, kind: type, value: Any, prefix: str = "") -> str:
    """Return a message for an error in `value`, which should be of type `kind`.

    Args:
        prefix: Path of the value itself.
    """
    text, steps, is_key = str(error), list[str](), False
    if place := _PLACE.fullmatch(text):
        text, is_key = place[1], bool(place[2])
        steps = [name or index for name, index in _STEP.findall(place[3])]
    path = [step for step in (prefix, *steps) if step not in ("", "...")]
    match text.split(" ", 2):
        case ["Object", "missing", rest]:
            path.append(rest.split("`")[1])
            text = "is missing"
        case ["Invalid", "value", tag]:  # of the tag, which selects the struct
            values = ", ".join(map(repr, _literals(kind, value, steps)))
            text = f"{tag[:MAX_NAME_CHARS]} is not supported; use {values}"
        case ["Number", *_]:
            text = "must be a finite number"
        case ["Expected" | "Invalid" as first, *_]:
            # Without the client's value, which an invalid one quotes.
            expected = text if first == "Expected" else ""
            text = f"must {_requirement(expected, _literals(kind, value, steps))}"
            part = "each key " if is_key else "each value " if steps[-1:] == ["..."] else ""
            text = part + text
        case _:  # from `__post_init__`, which names its field
            return ".".join((*path, text))
    return f"{'.'.join(path)}: {text}" if path else text


def _requirement(text: str, values: Sequence[object]) -> str:
    if bound := _BOUND.fullmatch(text):
        kind, length, sign, number = bound.groups()
        number = number.removesuffix(".0")
        one, many = ("character", "characters") if kind == "str" else ("entry", "entries")
        amount = f"{_BOUNDS[sign]} {number}"
        return f"have {amount} {one if number == '1' else many}" if length else f"be {amount}"
    if "matching regex" in text:
        return f"match {text.partition('regex ')[2]}"
    names = text.split("`")[1].split(" | ") if "`" in text else []
    allowed = [repr(value) for value in values]
    allowed += [_TYPES[name] for name in names if name in _TYPES and not (values and name == "str")]
    *most, last = allowed
    return f"be {', '.join(most)} or {last}" if most else f"be {last}"


def without_nulls(kind: type, value: Any) -> Any:
    """Return a value of type `kind` without null fields. Free-form objects keep theirs."""
    return _without_nulls(value, [_type_info(kind)])


def _without_nulls(value: Any, kinds: Sequence[inspect.Type]) -> Any:
    entries = value if isinstance(value, list) else [value]
    kinds = _types_inside(kinds, "0") if isinstance(value, list) else kinds
    structs = [each for each in kinds if isinstance(each, inspect.StructType)]
    if not structs or not all(isinstance(entry, dict) for entry in entries):
        return value
    names = {field.encode_name for each in structs for field in each.fields}
    fields = {name: _types_inside(structs, name) for name in names}
    fixed = [
        {
            name: _without_nulls(field, fields.get(name, ()))
            for name, field in entry.items()
            if field is not None
        }
        for entry in entries
    ]
    return fixed if isinstance(value, list) else fixed[0]


def _literals(kind: type, value: Any, steps: Sequence[str]) -> list[object]:
    """Return the literal values that `kind` allows at a path."""
    kinds: Sequence[inspect.Type] = [_type_info(kind)]
    for step in steps:
        structs = [each for each in kinds if isinstance(each, inspect.StructType)]
        if isinstance(value, dict):
            tagged = [each for each in structs if value.get(each.tag_field) == each.tag]
            kinds, value = tagged or kinds, value.get(step)
        else:
            value = value[int(step)]
        kinds = _types_inside(kinds, step)
    return [name for each in kinds if isinstance(each, inspect.LiteralType) for name in each.values]


def _types_inside(kinds: Sequence[inspect.Type], step: str) -> Sequence[inspect.Type]:
    """Return the types of a field or entry, given the possible types of its container."""
    found = list[inspect.Type]()
    for kind in kinds:
        match kind:
            case inspect.StructType(fields=fields, tag_field=tag_field, tag=tag):
                found += [field.type for field in fields if field.encode_name == step]
                found += [inspect.LiteralType((tag,))] if step == tag_field else []
            case inspect.ListType(item_type=inner) | inspect.DictType(value_type=inner):
                found.append(inner)
            case _:
                pass
    return [member for each in found for member in _members(each)]


def _members(kind: inspect.Type) -> Sequence[inspect.Type]:
    if isinstance(kind, inspect.Metadata):
        return _members(kind.type)
    types = kind.types if isinstance(kind, inspect.UnionType) else ()
    return [member for each in types for member in _members(each)] or [kind]


_type_info = cache(inspect.type_info)
