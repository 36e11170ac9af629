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
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tandem.frontend.chat.body import Body, refuse_unsupported, validate
from tandem.frontend.replies.formats import ReasoningMarks
from tandem.frontend.schemas.budget import Budget
from tandem.frontend.schemas.patterns import without_line_breaks
from tandem.frontend.schemas.rewriting import served, served_loosely
from tandem.frontend.text import json_text
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


def _schema(value: str | dict[str, Any] | bool) -> SentGrammar:
    """Read a JSON schema, sent as JSON or as a string of JSON."""
    schema = _from_json(value)
    if not isinstance(schema, dict | bool):
        raise ValueError("must be a JSON schema, which is an object or a boolean")  # noqa: TRY004
    _check_size(value if isinstance(value, str) else _json(value))
    return SentGrammar("json_schema", schema)


def _text(kind: Literal["regex", "ebnf"], value: str) -> SentGrammar:
    _check_size(value)
    return SentGrammar(kind, without_line_breaks(value) if kind == "regex" else value)


def _choice(value: list[str]) -> SentGrammar:
    """Read a list of strings, one of which must be the answer."""
    return _text("regex", "(" + "|".join(map(_escaped, value)) + ")")


def _structural_tag(value: str | dict[str, Any]) -> SentGrammar:
    """Read xgrammar's structural tag in its current or older form, sent as an object or a string of JSON."""
    match _from_json(value):
        case {"format": dict(form)}:
            pass
        case {"structures": list(structures), "triggers": list(triggers)}:
            tags = [_tag_of(each) for each in structures]
            form = {"type": "triggered_tags", "triggers": triggers, "tags": tags}
        case _:
            raise ValueError("must have either format, or structures and triggers")
    _check_size(_tag(form).text)
    return SentGrammar("structural_tag", form)


def _from_json(value: object) -> Any:
    """Parse a string as JSON; return other values unchanged."""
    if not isinstance(value, str):
        return value
    _check_size(value)
    try:
        return json_text.decode(value.encode())
    except ValueError as error:
        raise ValueError(f"is not valid JSON: {error}") from error


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
            schema = msgspec.json.decode(grammar.text)
            return {"type": "json_schema", "json_schema": schema} | _BLANKS
        case "json_object":
            return {"type": "json_schema", "json_schema": {"type": "object"}} | _BLANKS
        case "regex":
            return {"type": "regex", "pattern": grammar.text}
        case "ebnf":
            return {"type": "grammar", "grammar": grammar.text}
        case "structural_tag":
            form: dict[str, Any] = msgspec.json.decode(grammar.text)["format"]
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


_Schema = str | dict[str, Any] | bool | None
_Choice = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1)] | None


class NativeGrammar(Body):
    """The grammar of the answer. Only one of these fields may be set."""

    json_schema: _Schema = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Any] | None = None


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`."""

    json_: _Schema = msgspec.field(name="json", default=None)
    regex: str | None = None
    grammar: str | None = None
    choice: _Choice = None
    structural_tag: str | dict[str, Any] | None = None
    json_object: bool = False


class WrappedSchema(Body):
    """A schema in OpenAI's format: an object with the schema and a name, which is ignored."""

    schema_: _Schema = msgspec.field(name="schema", default=None)


class ResponseFormat(Body):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: WrappedSchema | None = None
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None

    def to_grammar(self) -> SentGrammar | None:
        """Return the grammar. None: the answer is free text."""
        if self.type == "structural_tag":
            return _structural_tag(msgspec.structs.asdict(self))
        if self.type != "json_schema":
            return _ANY_OBJECT if self.type == "json_object" else None
        if self.json_schema is None or self.json_schema.schema_ is None:
            raise ValueError("type json_schema requires a json_schema with a schema")
        return _schema(self.json_schema.schema_)


class OpenAIGrammar(NativeGrammar):
    """The grammar of the answer, in any dialect. Only one of these fields may be set."""

    guided_json: _Schema = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: _Choice = None
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None


def native_grammar(data: Mapping[str, object]) -> SentGrammar | None:
    """Return the grammar in the native API's sampling parameters, or None."""
    return _read(NativeGrammar, data)


def openai_grammar(data: Mapping[str, object]) -> SentGrammar | None:
    """Return the grammar in the fields of an OpenAI body, or None."""
    if isinstance(outputs := data.get("structured_outputs"), dict):
        refuse_unsupported(outputs, "structured_outputs.", also=_UNSUPPORTED_PARTS)
        data = {**data, "structured_outputs": _not_empty(outputs)}
    return _read(OpenAIGrammar, data)


def _read(kind: type[NativeGrammar], data: Mapping[str, object]) -> SentGrammar | None:
    if data.keys().isdisjoint(kind.__struct_fields__):  # most bodies have no grammar
        return None
    try:
        return _only(validate(kind, _not_empty(data)))
    except ValueError as error:
        raise InvalidRequest(str(error)) from error


def _not_empty(fields: Mapping[str, object]) -> dict[str, object]:
    """Return the fields without empty strings, which clients send to mean "no grammar"."""
    return {name: value for name, value in fields.items() if value != ""}


_READERS: Mapping[str, Callable[[Any], SentGrammar | None]] = {
    **dict.fromkeys(("json_schema", "guided_json", "json"), _schema),
    **dict.fromkeys(("regex", "guided_regex"), partial(_text, "regex")),
    **dict.fromkeys(("ebnf", "guided_grammar", "grammar"), partial(_text, "ebnf")),
    **dict.fromkeys(("choice", "guided_choice"), _choice),
    "structural_tag": _structural_tag,
    "json_object": lambda is_set: _ANY_OBJECT if is_set else None,
    "structured_outputs": lambda outputs: _only(outputs),  # noqa: PLW0108 - defined below
    "response_format": ResponseFormat.to_grammar,
}


def _only(body: Body) -> SentGrammar | None:
    """Return the grammar of the one field that is set. None: no field is set.

    Raises:
        ValueError: Several are set, or one is invalid. The message names the field.
    """
    grammars = list[SentGrammar]()
    for field in msgspec.structs.fields(body):
        name, value = field.encode_name, getattr(body, field.name)
        try:
            grammar = None if value is None else _READERS[name](value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        if grammar is not None:
            grammars.append(replace(grammar, field=name))
    if len(grammars) > 1:
        raise ValueError(f"{' and '.join(each.field for each in grammars)}: send only one of these")
    return next(iter(grammars), None)


_UNSUPPORTED_PARTS = frozenset(
    {"disable_additional_properties", "disable_any_whitespace", "whitespace_pattern"}
)
