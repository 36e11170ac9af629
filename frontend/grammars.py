"""Structured output as clients ask for it, in any of three dialects, to one `Grammar`.

```
 native           json_schema  regex  ebnf              (also in OpenAI bodies, as SGLang)
 OpenAI           response_format {type: text | json_object | json_schema}
 vLLM             guided_json  guided_regex  guided_grammar  guided_choice
                  structured_outputs {json, regex, grammar, choice, json_object}
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

from tandem.frontend.body import Body, refuse_unsupported, validate
from tandem.wire.errors import InvalidRequest
from tandem.wire.generation import Grammar

# Of the text that the engine compiles. The largest schemas of JSONSchemaBench are of this order.
MAX_GRAMMAR_BYTES = 64 * 1024
_METACHARACTERS = frozenset(r"\.^$*+?{}[]|()")
_ANY_OBJECT = Grammar(kind="json_object")


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


class StructuredOutputs(_GrammarBody):
    """vLLM's `structured_outputs`."""

    json_: Schema | None = Field(None, alias="json")
    regex: Regex | None = None
    grammar: Ebnf | None = None
    choice: Choice | None = None
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

    type: Literal["text", "json_object", "json_schema"]
    json_schema: WrappedSchema | None = None

    def wanted(self) -> Grammar | None:
        """Return what it asks for."""
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
    body = validate(kind, data)
    try:
        return body.wanted()
    except ValueError as error:
        raise InvalidRequest(str(error)) from error


_UNSUPPORTED_PARTS = frozenset(
    {"disable_additional_properties", "disable_any_whitespace", "whitespace_pattern"}
)
