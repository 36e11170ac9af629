"""What is wrong with a field, for clients: its path, and what is allowed there.

msgspec reports a path and a type: "Expected `int`, got `str` - at `$.stop[0]`". Allowed values are not in its
messages, so they are looked up in the body's type.
"""

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from msgspec import ValidationError, inspect

_PLACE = re.compile(r" - at `(key` in `)?\$(.*)`\Z")
_STEP = re.compile(r"\.(\w+)|\[(\d+|\.\.\.)\]")
_BOUND = re.compile(r"Expected `(\w+)`( of length)? (<=|>=|<|>) (.*)")
_BOUNDS = {"<=": "at most", ">=": "at least", "<": "less than", ">": "more than"}
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
    if place := _PLACE.search(text):
        text, is_key = text[: place.start()], bool(place[1])
        steps = [name or index for name, index in _STEP.findall(place[2])]
    path = [step for step in (prefix, *steps) if step not in ("", "...")]
    match text.split(" ", 2):
        case ["Object", "missing", rest]:
            path.append(rest.split("`")[1])
            text = "is missing"
        case ["Invalid", "value", tag]:  # of the field that tells structs apart
            values = ", ".join(map(repr, _named(kind, value, steps)))
            text = f"{tag} is not supported; use {values}"
        case ["Number", *_]:
            text = "must be a finite number"
        case ["Expected", *_] | ["Invalid", "enum", _]:
            text = f"must {_requirement(text, _named(kind, value, steps))}"
            part = "each key " if is_key else "each value " if steps[-1:] == ["..."] else ""
            text = part + text
        case _:  # from `__post_init__`, which names its field
            return ".".join((*path, text))
    return f"{'.'.join(path)}: {text}" if path else text


def _requirement(text: str, values: Sequence[object]) -> str:
    if bound := _BOUND.fullmatch(text):
        kind, length, sign, number = bound.groups()
        unit = " characters" if kind == "str" else " entries"
        amount = f"{_BOUNDS[sign]} {number.removesuffix('.0')}"
        return f"have {amount}{unit}" if length else f"be {amount}"
    if "matching regex" in text:
        return f"match {text.partition('regex ')[2]}"
    names = text.split("`")[1].split(" | ") if "`" in text else []
    allowed = [repr(value) for value in values]
    allowed += [_TYPES[name] for name in names if name in _TYPES and not (values and name == "str")]
    *most, last = allowed
    return f"be {', '.join(most)} or {last}" if most else f"be {last}"


def without_nulls(kind: type, value: Any) -> Any:
    """Return a value of type `kind` without null fields, except those of objects of any form."""
    return _without_nulls(value, [_type_info(kind)])


def _without_nulls(value: Any, kinds: Sequence[inspect.Type]) -> Any:
    entries = value if isinstance(value, list) else [value]
    kinds = _inside(kinds, "0") if isinstance(value, list) else kinds
    structs = [each for each in kinds if isinstance(each, inspect.StructType)]
    if not structs or not all(isinstance(entry, dict) for entry in entries):
        return value
    names = {field.encode_name for each in structs for field in each.fields}
    fields = {name: _inside(structs, name) for name in names}
    fixed = [
        {
            name: _without_nulls(field, fields.get(name, ()))
            for name, field in entry.items()
            if field is not None
        }
        for entry in entries
    ]
    return fixed if isinstance(value, list) else fixed[0]


def _named(kind: type, value: Any, steps: Sequence[str]) -> list[object]:
    """Return the values that the type names for the field at a path."""
    kinds: Sequence[inspect.Type] = [_type_info(kind)]
    for step in steps:
        structs = [each for each in kinds if isinstance(each, inspect.StructType)]
        if isinstance(value, dict):
            tagged = [each for each in structs if value.get(each.tag_field) == each.tag]
            kinds, value = tagged or kinds, value.get(step)
        else:
            value = value[int(step)]
        kinds = _inside(kinds, step)
    return [name for each in kinds if isinstance(each, inspect.LiteralType) for name in each.values]


def _inside(kinds: Sequence[inspect.Type], step: str) -> Sequence[inspect.Type]:
    """Return the types of a field or an entry of values that have one of these types."""
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
