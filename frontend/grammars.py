"""Structured output as clients ask for it, in any of three dialects, to one `Grammar`.

```
 native           json_schema  regex  ebnf              (also understood in OpenAI bodies, as SGLang)
 OpenAI           response_format {type: text | json_object | json_schema}
 vLLM             guided_json  guided_regex  guided_grammar  guided_choice
                  structured_outputs {json, regex, grammar, choice, json_object}
```

Checks form and size. Whether a schema, an expression or a grammar can be followed, the engine says.
"""

import json
from collections.abc import Callable, Iterator, Mapping

import pydantic_core

from tandem.frontend.unsupported import asks
from tandem.wire.errors import InvalidRequest
from tandem.wire.generation import Grammar

# Of the text that the engine compiles. The largest schemas of JSONSchemaBench are of this order.
MAX_GRAMMAR_BYTES = 64 * 1024
_METACHARACTERS = frozenset(r"\.^$*+?{}[]|()")

Found = tuple[str, Grammar]  # the field that asked for it, and what it asked for


def native_grammar(data: Mapping[str, object]) -> Grammar | None:
    """Return what the fields of sampling parameters ask for, or None.

    Raises:
        InvalidRequest: A field is wrong, or several are given.
    """
    return _only_one(_fields(data, _NATIVE))


def openai_grammar(data: Mapping[str, object]) -> Grammar | None:
    """Return what the fields of an OpenAI body ask for, or None.

    Raises:
        InvalidRequest: A field is wrong, or several are given.
    """
    return _only_one(
        [
            *_fields(data, _NATIVE),
            *_fields(data, _GUIDED),
            *_structured_outputs(data),
            *_response_format(data),
        ]
    )


def _only_one(found: Iterator[Found] | list[Found]) -> Grammar | None:
    given = list(found)
    if len(given) > 1:
        names = " and ".join(name for name, _ in given)
        raise InvalidRequest(f"{names}: only one of these may be given")
    return given[0][1] if given else None


def _fields(
    data: Mapping[str, object], readers: Mapping[str, Callable[[object, str], Grammar]]
) -> Iterator[Found]:
    for name, read in readers.items():
        value = data.get(name)
        if value is not None and value != "":
            yield name, read(value, name)


def _structured_outputs(data: Mapping[str, object]) -> Iterator[Found]:
    name = "structured_outputs"
    value = data.get(name)
    if value is None:
        return
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name}: must be an object")
    for part, inner in value.items():
        if part in _UNSUPPORTED_PARTS and asks(inner):
            raise InvalidRequest(f"{name}.{part}: not supported here; leave it out")
    parts = {f"{name}.{part}": inner for part, inner in value.items()}
    yield from _fields(parts, {f"{name}.{part}": read for part, read in _STRUCTURED.items()})
    is_any_object = value.get("json_object")
    if not isinstance(is_any_object, bool | None):
        raise InvalidRequest(f"{name}.json_object: must be true or false")
    if is_any_object:
        yield f"{name}.json_object", Grammar(kind="json_object")


def _response_format(data: Mapping[str, object]) -> Iterator[Found]:
    name = "response_format"
    value = data.get(name)
    if value is None:
        return
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name}: must be an object")
    match value.get("type"):
        case "text":
            return
        case "json_object":
            yield name, Grammar(kind="json_object")
        case "json_schema":
            yield name, _wrapped_schema(value.get("json_schema"), f"{name}.json_schema")
        case kind:
            raise InvalidRequest(
                f"{name}.type: must be 'text', 'json_object' or 'json_schema', not {kind!r}"
            )


def _wrapped_schema(value: object, name: str) -> Grammar:
    """Read OpenAI's form, which puts a name around the schema."""
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name}: must be an object")
    if value.get("schema") is None:
        raise InvalidRequest(f"{name}.schema: is missing")
    return _schema(value["schema"], f"{name}.schema")


def _schema(value: object, name: str) -> Grammar:
    """Read a JSON schema, given as JSON or as its text."""
    if not isinstance(value, str):
        _check_schema(value, name)
        text = _json_text(value, name)
    else:
        text = value
    _check_size(text, name)
    if isinstance(value, str):
        _check_schema(_parsed(text, name), name)
    return Grammar(kind="json_schema", text=text)


def _check_schema(value: object, name: str) -> None:
    if not isinstance(value, dict | bool):
        raise InvalidRequest(f"{name}: must be a JSON schema, which is an object or a boolean")


def _json_text(value: object, name: str) -> str:
    try:
        return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    except ValueError as error:
        raise InvalidRequest(f"{name}: is not valid JSON: {error}") from error


def _parsed(text: str, name: str) -> object:
    try:
        parsed: object = pydantic_core.from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"{name}: is not valid JSON: {error}") from error
    return parsed


def _regex(value: object, name: str) -> Grammar:
    return Grammar(kind="regex", text=_text(value, name))


def _ebnf(value: object, name: str) -> Grammar:
    return Grammar(kind="ebnf", text=_text(value, name))


def _choice(value: object, name: str) -> Grammar:
    """Read a list of texts, of which the answer must be one."""
    if not isinstance(value, list) or not all(isinstance(text, str) and text for text in value):
        raise InvalidRequest(f"{name}: must be a list of strings, none of them empty")
    if not value:
        raise InvalidRequest(f"{name}: must not be empty")
    return _regex("(" + "|".join(map(_escaped, value)) + ")", name)


def _escaped(text: str) -> str:
    # Only what every dialect of regular expressions escapes; `re.escape` would also escape spaces.
    return "".join(f"\\{char}" if char in _METACHARACTERS else char for char in text)


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{name}: must be a string")
    _check_size(value, name)
    return value


def _check_size(text: str, name: str) -> None:
    size_bytes = len(text.encode())
    if size_bytes > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            f"{name}: has {size_bytes} bytes and may have at most {MAX_GRAMMAR_BYTES}"
        )


_NATIVE = {"json_schema": _schema, "regex": _regex, "ebnf": _ebnf}
_GUIDED = {
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_grammar": _ebnf,
    "guided_choice": _choice,
}
# Names in a body that ask for a grammar.
NATIVE_NAMES, GUIDED_NAMES = frozenset(_NATIVE), frozenset(_GUIDED)
_STRUCTURED = {"json": _schema, "regex": _regex, "grammar": _ebnf, "choice": _choice}
_UNSUPPORTED_PARTS = (
    *("disable_additional_properties", "disable_any_whitespace", "structural_tag"),
    "whitespace_pattern",
)
