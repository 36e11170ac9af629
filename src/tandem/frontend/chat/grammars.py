"""Structured output: convert the fields of three API dialects to one `Grammar`.

```
 native           json_schema  regex  ebnf  structural_tag (also in OpenAI bodies, as in SGLang)
 OpenAI           response_format {type: text | json_object | json_schema | structural_tag}
 vLLM             guided_json  guided_regex  guided_grammar  guided_choice
                  structured_outputs {json, regex, grammar, choice, json_object, structural_tag}
```

Reading checks syntax and size of all fields, which is cheap. Only the one grammar that is used is then rewritten so that
the grammar library holds what it says (`frontend/schemas`), within the budget of the request. The engine checks whether
it can compile the result.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import pydantic_core
from pydantic import (
    AfterValidator,
    Field,
    PlainValidator,
    model_validator,
)

from tandem.frontend.chat.body import Body, Many, refuse_unsupported, validate
from tandem.frontend.replies.formats import ReasoningMarks
from tandem.frontend.schemas.budget import Budget
from tandem.frontend.schemas.patterns import without_line_breaks
from tandem.frontend.schemas.rewriting import served, served_loosely
from tandem.wire.errors import InvalidRequest
from tandem.wire.generation import MAX_GRAMMAR_BYTES, Grammar, GrammarKind

# Limit of what a client sends. The largest schemas of JSONSchemaBench are about this large. Rewriting may add to it, up
# to what an engine compiles.
MAX_SENT_BYTES = 64 * 1024
_METACHARACTERS = frozenset(r"\.^$*+?{}[]|()")
# The engine's own whitespace limit for schemas outside a structural tag.
_BLANKS = {"max_whitespace_cnt": 20}


@dataclass(frozen=True, slots=True)
class SentGrammar:
    """A grammar as a client sent it, of checked syntax and size.

    Attributes:
        value: A schema, the format of a structural tag, or a text.
        field: The field of the body that had it.
    """

    kind: GrammarKind
    value: Any = ""
    field: str = ""

    def served(self, budget: Budget) -> Grammar:
        """Return the grammar, rewritten for the grammar library.

        Raises:
            InvalidRequest: A schema has a keyword that cannot be served, or the result is too large.
        """
        try:
            match self.kind:
                case "json_schema":
                    grammar = Grammar(kind=self.kind, text=_json(served(self.value, budget)))
                case "structural_tag":
                    grammar = _tag(_served_format(self.value, budget))
                case _:
                    grammar = Grammar(kind=self.kind, text=self.value)
            _check_size(grammar.text, MAX_GRAMMAR_BYTES)
        except ValueError as error:
            raise InvalidRequest(f"{self.field}: {error}") from error
        return grammar


_ANY_OBJECT = SentGrammar("json_object")


def _schema_grammar(value: object) -> SentGrammar:
    """Read a JSON schema, sent as JSON or as a string of JSON."""
    if isinstance(value, str):
        _check_size(value)
    try:
        if isinstance(value, str):
            schema, text = pydantic_core.from_json(value, allow_inf_nan=False), value
        else:
            schema = value
            text = _json(value)
    except ValueError as error:
        raise ValueError(f"is not valid JSON: {error}") from error
    if not isinstance(schema, dict | bool):
        sentence = "must be a JSON schema, which is an object or a boolean"
        raise ValueError(sentence)  # noqa: TRY004 - pydantic reports no TypeError
    _check_size(text)
    return SentGrammar("json_schema", schema)


def _text_of(kind: Literal["regex", "ebnf"]) -> Callable[[object], SentGrammar]:
    def read(value: object) -> SentGrammar:
        if not isinstance(value, str):
            raise ValueError("must be a string")  # noqa: TRY004
        _check_size(value)
        return SentGrammar(kind, without_line_breaks(value) if kind == "regex" else value)

    return read


def _choice(value: object) -> SentGrammar:
    """Read a list of strings, one of which must be the answer."""
    if not isinstance(value, list) or not all(isinstance(text, str) and text for text in value):
        raise ValueError("must be a list of non-empty strings")
    if not value:
        raise ValueError("must not be empty")
    return _text_of("regex")("(" + "|".join(map(_escaped, value)) + ")")


def _structural_tag(value: object) -> SentGrammar:
    """Read xgrammar's structural tag in its current or older form, sent as an object or a string of JSON."""
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
            raise ValueError("must have either format, or structures and triggers")
    _check_size(_tag(form).text)
    return SentGrammar("structural_tag", form)


def _served_format(part: Any, budget: Budget) -> Any:
    """Return a part of a structural tag with schemas and regular expressions as the grammar library must have them."""
    match part:
        case {"json_schema": dict() | bool() as schema}:
            return part | {"json_schema": served(schema, budget)}
        case {"type": "regex", "pattern": str(pattern)}:
            return part | {"pattern": without_line_breaks(pattern)}
        case dict():
            return {key: _served_format(value, budget) for key, value in part.items()}
        case list():
            return [_served_format(each, budget) for each in part]
        case _:
            return part


def _tag_of(structure: object) -> dict[str, Any]:
    match structure:
        case {"begin": str(begin), "schema": schema, "end": str(end)}:
            content = {"type": "json_schema", "json_schema": schema}
            return {"type": "tag", "begin": begin, "content": content, "end": end}
        case _:
            raise ValueError("each entry of structures must have begin, schema and end")


def _tag(form: Mapping[str, Any]) -> Grammar:
    return Grammar(kind="structural_tag", text=_json({"type": "structural_tag", "format": form}))


@dataclass(frozen=True, slots=True)
class Parameters:
    """The argument schema of a tool. `is_strict`: it is held, or the request is refused."""

    schema: dict[str, Any]
    is_strict: bool


def strict_calls(
    tools: Mapping[str, Parameters],
    call: tuple[str, str, str, str],
    budget: Budget,
    *,
    is_parallel: bool,
) -> Grammar:
    """Return a grammar that allows free text and makes calls of strict tools follow their schemas.

    Args:
        tools: Parameters of each tool, by name.
        call: As in `Format`.

    Raises:
        InvalidRequest: The schemas are too large, or one has a keyword that cannot be served.
    """
    mark, before_name, before_arguments, end = call
    schemas = _served_tools(
        {
            name: each if each.is_strict else Parameters({"type": "object"}, is_strict=False)
            for name, each in tools.items()
        },
        budget,
    )
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
    return _tag(form | {"stop_after_first": not is_parallel})


def forced_call(name: str, parameters: Parameters, budget: Budget) -> Grammar:
    """Return the grammar of the arguments of one tool. It raises as `strict_calls` does."""
    return _schema_text(_served_tools({name: parameters}, budget)[name])


def forced_calls(tools: Mapping[str, Parameters], budget: Budget, *, is_parallel: bool) -> Grammar:
    """Return the grammar of a list of calls. It raises as `strict_calls` does."""
    items, definitions = [], dict[str, Any]()
    for name, parameters in _served_tools(tools, budget).items():
        definitions |= parameters.pop("$defs", {})
        properties = {"name": {"enum": [name]}, "parameters": parameters}
        items.append({"type": "object", "properties": properties, "required": [*properties]})
    bounds = {"minItems": 1} if is_parallel else {"minItems": 1, "maxItems": 1}
    return _schema_text(
        {"type": "array", **bounds, "items": {"anyOf": items}, "$defs": definitions}
    )


def _schema_text(schema: Mapping[str, Any]) -> Grammar:
    text = _json(schema)
    try:
        _check_size(text, MAX_GRAMMAR_BYTES)
    except ValueError as error:
        raise InvalidRequest(f"tools: the grammar of the calls {error}") from error
    return Grammar(kind="json_schema", text=text)


def _served_tools(tools: Mapping[str, Parameters], budget: Budget) -> dict[str, dict[str, Any]]:
    """Return the parameters of tools as the grammar library must have them, with different names in `$defs`."""
    schemas = dict[str, dict[str, Any]]()
    try:
        _check_size(_json({name: each.schema for name, each in tools.items()}))
    except ValueError as error:
        raise InvalidRequest(f"tools: the schemas of the parameters: {error}") from error
    # Strict tools come first: they may not be refused because of work for the others.
    for name, parameters in sorted(tools.items(), key=lambda tool: not tool[1].is_strict):
        serve = served if parameters.is_strict else served_loosely
        try:
            schemas[name] = serve(parameters.schema, budget, f"{len(schemas)}_")
        except ValueError as error:
            raise InvalidRequest(f"tools: the parameters of {name!r}: {error}") from error
    return schemas


def after_reasoning(
    grammar: Grammar, reasoning: ReasoningMarks, is_special: Callable[[str], bool]
) -> Grammar:
    """Return a grammar that allows free reasoning first and then requires `grammar`.

    Args:
        is_special: Returns whether a mark is one special token. The grammar must name such a mark as a token,
            because text never matches it.
    """
    begin, end = (
        {"type": "token", "token": mark} if is_special(mark) else mark
        for mark in (reasoning.opening, reasoning.closing)
    )
    content = {"type": "any_text"}
    region = {
        "type": "tag",
        "begin": "" if reasoning.is_open else begin,
        "content": content,
        "end": end,
    }
    blanks = {"type": "regex", "pattern": "[ \\n]{0,2}"}
    first = {"type": "sequence", "elements": [region, blanks]}
    head = first if reasoning.is_open else {"type": "optional", "content": first}
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


def _json(value: object) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def _escaped(text: str) -> str:
    # Escape only what every regex dialect allows to be escaped. `re.escape` would also escape spaces.
    return "".join(f"\\{char}" if char in _METACHARACTERS else char for char in text)


def _check_size(text: str, most_bytes: int = MAX_SENT_BYTES) -> None:
    size_bytes = len(text.encode())
    if size_bytes > most_bytes:
        rewritten = " when it is rewritten" * (most_bytes > MAX_SENT_BYTES)
        raise ValueError(f"has {size_bytes} bytes{rewritten}; at most {most_bytes} are allowed")


_ANY_SCHEMA = str | dict[str, Any] | bool
SchemaGrammar = Annotated[
    SentGrammar, PlainValidator(_schema_grammar, json_schema_input_type=_ANY_SCHEMA)
]
Regex = Annotated[SentGrammar, PlainValidator(_text_of("regex"), json_schema_input_type=str)]
Ebnf = Annotated[SentGrammar, PlainValidator(_text_of("ebnf"), json_schema_input_type=str)]
_ANY_TAG = str | dict[str, Any]
StructuralTag = Annotated[
    SentGrammar, PlainValidator(_structural_tag, json_schema_input_type=_ANY_TAG)
]
ChoiceGrammar = Annotated[SentGrammar, PlainValidator(_choice, json_schema_input_type=list[str])]


class _GrammarBody(Body):
    """A body with alternative grammar fields. An empty string means absent."""

    @model_validator(mode="before")
    @classmethod
    def _empty_is_absent(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value != ""}

    def to_grammar(self) -> SentGrammar | None:
        """Return the grammar of the one field that is set. None: no field is set."""
        grammars = [
            replace(value, field=field.alias or name)
            for name, field in type(self).model_fields.items()
            if isinstance(value := getattr(self, name), SentGrammar)
        ]
        if len(grammars) > 1:
            names = " and ".join(each.field for each in grammars)
            raise ValueError(f"{names}: send only one of these")
        return next(iter(grammars), None)


class NativeGrammar(_GrammarBody):
    """The grammar of the answer. Only one of these fields may be set."""

    json_schema: SchemaGrammar | None = None
    regex: Regex | None = None
    ebnf: Ebnf | None = None
    structural_tag: StructuralTag | None = None


class StructuredOutputs(_GrammarBody):
    """vLLM's `structured_outputs`."""

    json_: SchemaGrammar | None = Field(None, alias="json")
    regex: Regex | None = None
    grammar: Ebnf | None = None
    choice: ChoiceGrammar | None = None
    structural_tag: StructuralTag | None = None
    json_object: Annotated[bool, AfterValidator(lambda on: _ANY_OBJECT if on else None)] = False

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: object) -> object:
        if isinstance(data, dict):
            refuse_unsupported(data, "structured_outputs.", also=_UNSUPPORTED_PARTS)
        return data


class WrappedSchema(Body):
    """A schema in OpenAI's format: an object with the schema and a name, which is ignored."""

    schema_: SchemaGrammar | None = Field(None, alias="schema")


class ResponseFormat(Body):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: WrappedSchema | None = None
    format: dict[str, Any] | None = None
    structures: Many[dict[str, Any]] | None = None
    triggers: Many[str] | None = None

    def to_grammar(self) -> SentGrammar | None:
        """Return the grammar. None: the answer is free text."""
        if self.type == "structural_tag":
            parts = ("format", "structures", "triggers")
            return _structural_tag({part: getattr(self, part) for part in parts})
        if self.type != "json_schema":
            return _ANY_OBJECT if self.type == "json_object" else None
        if self.json_schema is None or self.json_schema.schema_ is None:
            raise ValueError("type json_schema requires a json_schema with a schema")
        return self.json_schema.schema_


class OpenAIGrammar(NativeGrammar):
    """The grammar of the answer, in any dialect. Only one of these fields may be set."""

    guided_json: SchemaGrammar | None = None
    guided_regex: Regex | None = None
    guided_grammar: Ebnf | None = None
    guided_choice: ChoiceGrammar | None = None
    structured_outputs: (
        Annotated[StructuredOutputs, AfterValidator(StructuredOutputs.to_grammar)] | None
    ) = None
    response_format: Annotated[ResponseFormat, AfterValidator(ResponseFormat.to_grammar)] | None = (
        None
    )


def native_grammar(data: Mapping[str, object]) -> SentGrammar | None:
    """Return the grammar in the native API's sampling parameters, or None."""
    return _read(NativeGrammar, data)


def openai_grammar(data: Mapping[str, object]) -> SentGrammar | None:
    """Return the grammar in the fields of an OpenAI body, or None."""
    return _read(OpenAIGrammar, data)


def _read(kind: type[_GrammarBody], data: Mapping[str, object]) -> SentGrammar | None:
    if data.keys().isdisjoint(kind.model_fields):  # most bodies have no grammar
        return None
    body = validate(kind, data)
    try:
        return body.to_grammar()
    except ValueError as error:
        raise InvalidRequest(str(error)) from error


_UNSUPPORTED_PARTS = frozenset(
    {"disable_additional_properties", "disable_any_whitespace", "whitespace_pattern"}
)
