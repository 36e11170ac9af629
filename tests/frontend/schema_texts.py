"""JSON schemas as libraries and tools emit them, each with texts that it must allow and must not."""

from typing import Any, NamedTuple


class Emitted(NamedTuple):
    """A schema, valid texts and invalid ones."""

    schema: Any
    valid: list[str]
    invalid: list[str]


def _object(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties} | (
        {"required": required} if required else {}
    )


_TEXT, _WHOLE = {"type": "string"}, {"type": "integer"}
_STRICT = {"additionalProperties": False}
_DRAFT_7 = {"$schema": "http://json-schema.org/draft-07/schema#"}
_DRAFT_2020 = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
_ZOD_EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"

EMITTED = {
    "pydantic: optional, default, literal": Emitted(
        _object(
            ["name"],
            name={"title": "Name", **_TEXT},
            age={"anyOf": [_WHOLE, {"type": "null"}], "default": None, "title": "Age"},
            mood={"default": "ok", "enum": ["ok", "bad"], "title": "Mood", **_TEXT},
        )
        | {"title": "Person"},
        ['{"name": "a", "age": null, "mood": "bad"}', '{"name": "a"}'],
        ['{"age": 1}', '{"name": "a", "mood": "x"}', '{"name": "a", "age": "1"}'],
    ),
    "pydantic: reference with a description": Emitted(
        {
            "$defs": {
                "Place": _object(["lat"], lat={"maximum": 90, "minimum": -90, "type": "number"})
            },
            **_object(["at"], at={"$ref": "#/$defs/Place", "description": "Where"}),
        },
        ['{"at": {"lat": 45.5}}'],
        ['{"at": {"lat": 91}}', '{"at": 5}'],
    ),
    "pydantic: allOf of one reference": Emitted(
        {
            "definitions": {"Kind": {"enum": ["a", "b"], **_TEXT}},
            **_object(["kind"], kind={"allOf": [{"$ref": "#/definitions/Kind"}], "default": "a"}),
        },
        ['{"kind": "b"}'],
        ['{"kind": "c"}'],
    ),
    "pydantic: discriminated union": Emitted(
        {
            "$defs": {
                "Cat": _object(lives=_WHOLE, kind={"const": "cat", "default": "cat", **_TEXT}),
                "Dog": _object(tricks=_WHOLE, kind={"const": "dog", "default": "dog", **_TEXT}),
            },
            **_object(
                ["pet"],
                pet={
                    "discriminator": {"mapping": {"cat": "#/$defs/Cat"}, "propertyName": "kind"},
                    "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
                },
            ),
        },
        ['{"pet": {"lives": 9, "kind": "cat"}}', '{"pet": {"kind": "dog"}}'],
        ['{"pet": {"lives": 9, "kind": "dog"}}', '{"pet": {}}'],
    ),
    "pydantic: recursive model": Emitted(
        {
            "$defs": {
                "Node": _object(
                    ["value"],
                    value=_WHOLE,
                    next={"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]},
                )
            },
            "$ref": "#/$defs/Node",
        },
        ['{"value": 1, "next": {"value": 2, "next": null}}'],
        ['{"value": 1, "next": {}}'],
    ),
    "pydantic: constrained string, list and dict": Emitted(
        _object(
            code={"maxLength": 8, "minLength": 2, "pattern": "^[A-Z]+$", **_TEXT},
            tags={"items": _TEXT, "maxItems": 2, "minItems": 1, "type": "array"},
            scores={"additionalProperties": {"type": "number"}, "type": "object"},
        ),
        ['{"code": "ABC", "tags": ["x"], "scores": {"a": 1.5}}'],
        ['{"code": "A"}', '{"code": "ABCDEFGHI"}', '{"tags": []}', '{"scores": {"a": "b"}}'],
    ),
    "pydantic: date-time, URL, UUID, tuple, decimal": Emitted(
        _object(
            at={"format": "date-time", **_TEXT},
            url={"format": "uri", "maxLength": 50, "minLength": 1, **_TEXT},
            id={"format": "uuid", **_TEXT},
            pair={"maxItems": 2, "minItems": 2, "prefixItems": [_WHOLE, _TEXT], "type": "array"},
            price={"anyOf": [{"type": "number"}, {"pattern": r"^(?:\d*)\.?\d*$", **_TEXT}]},
        ),
        [
            '{"at": "2024-02-29T10:00:00Z", "pair": [1, "a"]}',
            '{"url": "https://a.b", "price": "1.5"}',
        ],
        ['{"at": "today"}', '{"pair": [1]}', '{"pair": ["a", 1]}', '{"price": "x"}', '{"id": "x"}'],
    ),
    "pydantic: extra fields allowed": Emitted(
        _object(["a"], a=_WHOLE) | {"additionalProperties": True},
        ['{"a": 1, "b": "x"}', '{"a": 1}'],
        ['{"a": 1, "a": "x"}', '{"a": 1, "\\u0061": "x"}', '{"b": 1}'],
    ),
    "zod: strict object with never and nullable": Emitted(
        _DRAFT_7
        | _STRICT
        | _object(
            ["a"], a={"type": ["string", "null"]}, b={"anyOf": [{"not": {}}, {"type": "boolean"}]}
        ),
        ['{"a": null, "b": true}'],
        ['{"a": 1}', '{"a": "x", "b": 1}', '{"a": "x", "c": 1}'],
    ),
    "zod: number checks": Emitted(
        _DRAFT_2020
        | _object(
            a={"exclusiveMinimum": 0, "maximum": 9007199254740991, **_WHOLE},
            b={"minimum": 0, "maximum": 1, "type": "number"},
            c={"minimum": 0, "maximum": 5, "multipleOf": 0.5, "type": "number"},
        ),
        ['{"a": 1, "b": 0.25, "c": 4.5}'],
        ['{"a": 0}', '{"b": 1.5}', '{"c": 4.4}'],
    ),
    "zod: e-mail with lookaheads": Emitted(
        _object(mail={"format": "email", "pattern": _ZOD_EMAIL, **_TEXT}),
        ['{"mail": "a.b+c@example.org"}'],
        ['{"mail": ".a@example.org"}', '{"mail": "a..b@example.org"}', '{"mail": "a"}'],
    ),
    "zod: records": Emitted(
        _object(
            any={"type": "object", "propertyNames": _TEXT, "additionalProperties": {}},
            some={
                "type": "object",
                "propertyNames": {"enum": ["x", "y"], **_TEXT},
                "additionalProperties": _WHOLE,
                "required": ["x", "y"],
            },
        ),
        ['{"any": {"k": [1]}, "some": {"x": 1, "y": 2}}'],
        ['{"some": {"x": 1}}', '{"some": {"x": 1, "y": 2, "z": 3}}'],
    ),
    "zod: tuple with a rest, draft 7": Emitted(
        {"type": "array", "minItems": 1, "items": [_TEXT], "additionalItems": _WHOLE},
        ['["a"]', '["a", 1, 2]'],
        ["[]", '["a", "b"]'],
    ),
    "zod: intersection": Emitted(
        {
            "allOf": [_object(["a"], a=_TEXT), _object(["b"], b=_WHOLE)],
            "unevaluatedProperties": False,
        },
        ['{"a": "x", "b": 1}'],
        ['{"a": "x"}', '{"b": 1}', "{}"],
    ),
    "OpenAI strict: steps": Emitted(
        _STRICT
        | _object(
            ["steps", "answer"],
            steps={
                "type": "array",
                "items": _STRICT
                | _object(["text"], text={"type": "string", "description": "A step"}),
            },
            answer={"type": ["string", "null"]},
        ),
        ['{"steps": [{"text": "x"}], "answer": null}'],
        ['{"steps": []}', '{"steps": [{}], "answer": "x"}'],
    ),
    "OpenAI strict: recursive root": Emitted(
        _STRICT
        | _object(
            ["tag", "children"],
            tag={"enum": ["div", "p"], **_TEXT},
            children={"type": "array", "items": {"$ref": "#"}},
        ),
        ['{"tag": "div", "children": [{"tag": "p", "children": []}]}'],
        ['{"tag": "div", "children": [{}]}'],
    ),
    "MCP: no arguments": Emitted(
        {"type": "object", "properties": {}, **_DRAFT_7}, ["{}"], ['{"a": 1}']
    ),
    "MCP: options with URLs and bounds": Emitted(
        _DRAFT_7
        | _STRICT
        | _object(
            ["url"],
            url={"type": "string", "format": "uri", "description": "URL to fetch"},
            max_length={
                "type": "integer",
                "exclusiveMinimum": 0,
                "exclusiveMaximum": 1000000,
                "default": 5000,
            },
            raw={"type": "boolean", "default": False},
        ),
        ['{"url": "https://a.b/c?d", "max_length": 10, "raw": true}'],
        ['{"url": "x y"}', '{"url": "https://a.b", "max_length": 0}'],
    ),
    "MCP: one of two arguments": Emitted(
        _object(path=_TEXT, url=_TEXT) | {"anyOf": [{"required": ["path"]}, {"required": ["url"]}]},
        ['{"path": "a"}', '{"url": "b"}', '{"path": "a", "url": "b"}'],
        ["{}"],
    ),
    "OpenAPI: nullable, example, extension": Emitted(
        {
            "$defs": {"a/b %": {"type": "integer", "format": "int32", "example": 5}},
            **_object(
                id={"$ref": "#/$defs/a~1b%20%25", "nullable": True}, name=_TEXT | {"x-order": 1}
            ),
        },
        ['{"id": 1, "name": "x"}'],
        ['{"id": "1"}'],
    ),
}
