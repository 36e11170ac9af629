"""Structured output as clients ask for it, in any of three dialects, to one `Grammar`.

```
 native           json_schema  regex  ebnf  structural_tag (also in OpenAI bodies, as SGLang)
 OpenAI           response_format {type: text | json_object | json_schema | structural_tag}
 vLLM             guided_json  guided_regex  guided_grammar  guided_choice
                  structured_outputs {json, regex, grammar, choice, json_object, structural_tag}
```

Checks form and size. The engine checks whether a schema, an expression or a grammar can be followed.
"""

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import pydantic_core
from pydantic import (
    AfterValidator,
    Field,
    PlainValidator,
    model_validator,
)

from tandem.frontend.body import Body, Many, refuse_unsupported, validate
from tandem.frontend.reply_formats import Thoughts
from tandem.wire.errors import InvalidRequest
from tandem.wire.generation import Grammar

# Of the text that the engine compiles. The largest schemas of JSONSchemaBench are of this order.
MAX_GRAMMAR_BYTES = 64 * 1024
_METACHARACTERS = frozenset(r"\.^$*+?{}[]|()")
_ANY_OBJECT = Grammar(kind="json_object")
# As the engine bounds them in a schema that is not part of a tag.
_BLANKS = {"max_whitespace_cnt": 20}


def _schema(value: object) -> Grammar:
    """Read a JSON schema, given as JSON or as its text."""
    if isinstance(value, str):
        _check_size(value)
    try:
        if isinstance(value, str):
            schema, text = pydantic_core.from_json(value, allow_inf_nan=False), value
        else:
            schema = value
            text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    except ValueError as error:
        raise ValueError(f"is not valid JSON: {error}") from error
    if not isinstance(schema, dict | bool):
        sentence = "must be a JSON schema, which is an object or a boolean"
        raise ValueError(sentence)  # noqa: TRY004 - pydantic reports no TypeError
    _check_size(text)
    return Grammar(kind="json_schema", text=text)


def _text_of(kind: Literal["regex", "ebnf"]) -> Callable[[object], Grammar]:
    def read(value: object) -> Grammar:
        if not isinstance(value, str):
            raise ValueError("must be a string")  # noqa: TRY004
        _check_size(value)
        return Grammar(kind=kind, text=value)

    return read


def _choice(value: object) -> Grammar:
    """Read a list of texts. The answer must be one of them."""
    if not isinstance(value, list) or not all(isinstance(text, str) and text for text in value):
        raise ValueError("must be a list of strings, none of them empty")
    if not value:
        raise ValueError("must not be empty")
    return _text_of("regex")("(" + "|".join(map(_escaped, value)) + ")")


def _structural_tag(value: object) -> Grammar:
    """Read xgrammar's structural tag, or the older form of it, given as an object or as its text."""
    if isinstance(value, str):
        _check_size(value)
        try:
            value = pydantic_core.from_json(value, allow_inf_nan=False)
        except ValueError as error:
            raise ValueError(f"is not valid JSON: {error}") from error
    match value:
        case {"format": dict(form)}:
            pass
        case {"structures": list(structures), "triggers": list(triggers)}:
            tags = [_tag_of(each) for each in structures]
            form = {"type": "triggered_tags", "triggers": triggers, "tags": tags}
        case _:
            raise ValueError("must have a format, or structures and triggers")
    tag = _tag(form)
    _check_size(tag.text)
    return tag


def _tag_of(structure: object) -> dict[str, Any]:
    match structure:
        case {"begin": str(begin), "schema": schema, "end": str(end)}:
            content = {"type": "json_schema", "json_schema": schema}
            return {"type": "tag", "begin": begin, "content": content, "end": end}
        case _:
            raise ValueError("each of structures must have begin, schema and end")


def _tag(form: Mapping[str, Any]) -> Grammar:
    text = json.dumps({"type": "structural_tag", "format": form}, ensure_ascii=False)
    return Grammar(kind="structural_tag", text=text)


def strict_calls(
    schemas: Mapping[str, Any], call: tuple[str, str, str, str], *, is_parallel: bool
) -> Grammar:
    """Return the grammar of free text whose calls follow their schemas.

    Args:
        schemas: Of the arguments of each tool, by its name.
        call: As in `Format`.

    Raises:
        InvalidRequest: The schemas are too large.
    """
    mark, before_name, before_arguments, end = call
    tags = [
        {
            "type": "tag",
            "begin": f"{mark}{before_name}{json.dumps(name, ensure_ascii=False)}{before_arguments}",
            "content": {"type": "json_schema", "json_schema": schema},
            "end": end,
        }
        for name, schema in schemas.items()
    ]
    form = {"type": "triggered_tags", "triggers": [mark], "tags": tags}
    tag = _tag(form | {"stop_after_first": not is_parallel})
    try:
        _check_size(tag.text)
    except ValueError as error:
        raise InvalidRequest(f"tools: the grammar of strict calls {error}") from error
    return tag


def after_thoughts(
    grammar: Grammar, thoughts: Thoughts, is_special: Callable[[str], bool]
) -> Grammar:
    """Return the grammar of an answer that thinks first, as it likes, and then follows `grammar`.

    Args:
        is_special: Whether a mark is one special token. No text is one, so it is named as a token.
    """
    begin, end = (
        {"type": "token", "token": mark} if is_special(mark) else mark
        for mark in (thoughts.opening, thoughts.closing)
    )
    content = {"type": "any_text"}
    thought = {
        "type": "tag",
        "begin": "" if thoughts.is_open else begin,
        "content": content,
        "end": end,
    }
    blanks = {"type": "regex", "pattern": "[ \\n]{0,2}"}
    first = {"type": "sequence", "elements": [thought, blanks]}
    head = first if thoughts.is_open else {"type": "optional", "content": first}
    return _tag({"type": "sequence", "elements": [head, _format_of(grammar)]})


def _format_of(grammar: Grammar) -> dict[str, Any]:
    match grammar.kind:
        case "json_schema":
            schema = pydantic_core.from_json(grammar.text)
            return {"type": "json_schema", "json_schema": schema} | _BLANKS
        case "json_object":
            return {"type": "json_schema", "json_schema": {"type": "object"}} | _BLANKS
        case "regex":
            return {"type": "regex", "pattern": grammar.text}
        case "ebnf":
            return {"type": "grammar", "grammar": grammar.text}
        case "structural_tag":
            form: dict[str, Any] = pydantic_core.from_json(grammar.text)["format"]
            return form


def _escaped(text: str) -> str:
    # Only what every dialect of regular expressions escapes. `re.escape` would also escape spaces.
    return "".join(f"\\{char}" if char in _METACHARACTERS else char for char in text)


def _check_size(text: str) -> None:
    size_bytes = len(text.encode())
    if size_bytes > MAX_GRAMMAR_BYTES:
        raise ValueError(f"has {size_bytes} bytes and may have at most {MAX_GRAMMAR_BYTES}")


_ANY_SCHEMA = str | dict[str, Any] | bool
Schema = Annotated[Grammar, PlainValidator(_schema, json_schema_input_type=_ANY_SCHEMA)]
Regex = Annotated[Grammar, PlainValidator(_text_of("regex"), json_schema_input_type=str)]
Ebnf = Annotated[Grammar, PlainValidator(_text_of("ebnf"), json_schema_input_type=str)]
_ANY_TAG = str | dict[str, Any]
StructuralTag = Annotated[Grammar, PlainValidator(_structural_tag, json_schema_input_type=_ANY_TAG)]
Choice = Annotated[Grammar, PlainValidator(_choice, json_schema_input_type=list[str])]


class _GrammarBody(Body):
    """A body some of whose fields ask for a grammar. An empty text asks for none."""

    @model_validator(mode="before")
    @classmethod
    def _empty_is_absent(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value != ""}

    def wanted(self) -> Grammar | None:
        """Return what the fields ask for: at most one of them may."""
        given = {
            field.alias or name: value
            for name, field in type(self).model_fields.items()
            if isinstance(value := getattr(self, name), Grammar)
        }
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)}: only one of these may be given")
        return next(iter(given.values()), None)


class NativeGrammar(_GrammarBody):
    """What the answer must follow. Only one of these may be given."""

    json_schema: Schema | None = None
    regex: Regex | None = None
    ebnf: Ebnf | None = None
    structural_tag: StructuralTag | None = None


class StructuredOutputs(_GrammarBody):
    """vLLM's `structured_outputs`."""

    json_: Schema | None = Field(None, alias="json")
    regex: Regex | None = None
    grammar: Ebnf | None = None
    choice: Choice | None = None
    structural_tag: StructuralTag | None = None
    json_object: Annotated[bool, AfterValidator(lambda on: _ANY_OBJECT if on else None)] = False

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: object) -> object:
        if isinstance(data, dict):
            refuse_unsupported(data, "structured_outputs.", also=_UNSUPPORTED_PARTS)
        return data


class WrappedSchema(Body):
    """A schema in OpenAI's form, which has a name beside it."""

    schema_: Schema | None = Field(None, alias="schema")


class ResponseFormat(Body):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: WrappedSchema | None = None
    format: dict[str, Any] | None = None
    structures: Many[dict[str, Any]] | None = None
    triggers: Many[str] | None = None

    def wanted(self) -> Grammar | None:
        """Return what it asks for."""
        if self.type == "structural_tag":
            parts = ("format", "structures", "triggers")
            return _structural_tag({part: getattr(self, part) for part in parts})
        if self.type != "json_schema":
            return _ANY_OBJECT if self.type == "json_object" else None
        if self.json_schema is None or self.json_schema.schema_ is None:
            raise ValueError("type json_schema needs a json_schema with a schema")
        return self.json_schema.schema_


class OpenAIGrammar(NativeGrammar):
    """What the answer must follow, in any dialect. Only one of these may be given."""

    guided_json: Schema | None = None
    guided_regex: Regex | None = None
    guided_grammar: Ebnf | None = None
    guided_choice: Choice | None = None
    structured_outputs: (
        Annotated[StructuredOutputs, AfterValidator(StructuredOutputs.wanted)] | None
    ) = None
    response_format: Annotated[ResponseFormat, AfterValidator(ResponseFormat.wanted)] | None = None


def native_grammar(data: Mapping[str, object]) -> Grammar | None:
    """Return what the fields of sampling parameters ask for, or None."""
    return _read(NativeGrammar, data)


def openai_grammar(data: Mapping[str, object]) -> Grammar | None:
    """Return what the fields of an OpenAI body ask for, or None."""
    return _read(OpenAIGrammar, data)


def _read(kind: type[_GrammarBody], data: Mapping[str, object]) -> Grammar | None:
    if data.keys().isdisjoint(kind.model_fields):  # as in most bodies
        return None
    body = validate(kind, data)
    try:
        return body.wanted()
    except ValueError as error:
        raise InvalidRequest(str(error)) from error


_UNSUPPORTED_PARTS = frozenset(
    {"disable_additional_properties", "disable_any_whitespace", "whitespace_pattern"}
)
