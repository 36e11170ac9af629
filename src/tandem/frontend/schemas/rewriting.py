"""Rewrites a JSON schema so that the grammar library holds what it says.

```
 document ─▶ conjunctions of places ($ref, allOf)
             └─▶ alternatives (anyOf, oneOf, dependentRequired), multiplied out
                 └─▶ one Shape each ─▶ schemas with one keyword ─▶ without dead ends
```

A text that the result matches is valid for the original. The reverse does not hold: objects are closed unless their
schema opens them, and a format is narrower than its standard.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote

from tandem.frontend.schemas.budget import Budget, BudgetSpent
from tandem.frontend.schemas.ends import Alternatives, definitions_with_texts, possible, tidy
from tandem.frontend.schemas.keywords import (
    SEPARABLE,
    Conjunction,
    Place,
    Schema,
    SchemaRefused,
    asserting,
    is_document,
)
from tandem.frontend.schemas.patterns import Matcher
from tandem.frontend.schemas.shapes import PLAIN, Shape

_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
# A level takes nine frames of Python's stack.
_MAX_DEPTH = 64


def served(document: dict[str, Any] | bool, budget: Budget, prefix: str = "") -> dict[str, Any]:
    """Return a schema for the grammar library: what matches it matches `document`.

    Args:
        budget: That of the request.
        prefix: Prefix of the names in `$defs`, so that several results may share one object.

    Raises:
        SchemaRefused: A keyword cannot be served, or no text can match, or the budget is spent.
    """
    rewriter = _Rewriter(document, budget, prefix)
    try:
        return rewriter.result()
    except RecursionError as error:
        raise rewriter.at.refusal("the schema", "nests too deeply") from error
    except BudgetSpent as error:
        raise rewriter.at.refusal(
            "the schema",
            "takes too much work: use fewer alternatives, names, values or patterns",
        ) from error


def served_loosely(document: dict[str, Any], budget: Budget, prefix: str = "") -> dict[str, Any]:
    """Return a schema for the grammar library that allows at least what `served` holds of `document`.

    Keywords that cannot be served are left out, and branches of `oneOf` may overlap. Where that is not enough, any object
    is allowed.
    """
    while True:
        try:
            return served(document, budget, prefix)
        except SchemaRefused as error:
            looser = _without_refused(document, error)
        if looser is None:
            return {"type": "object"}
        document = looser


def _without_refused(document: dict[str, Any], refused: SchemaRefused) -> dict[str, Any] | None:
    """Return a copy of a document without a keyword. None: it might allow less, or any value."""
    keyword, places = refused.keyword, refused.place.ancestry()[1:]
    copy = document.copy()
    schema: Any = copy
    try:
        for place in places:
            schema[place.key] = schema[place.key].copy()
            schema = schema[place.key]
        if keyword == "oneOf" and "anyOf" not in schema:
            schema["anyOf"] = schema.pop("oneOf")
        elif keyword in SEPARABLE and (places or keyword != "type"):
            del schema[keyword]
        else:
            return None
    except (KeyError, TypeError, AttributeError):  # the place follows from other keywords
        return None
    return copy


@dataclass(frozen=True, slots=True)
class _Choice:
    """Alternatives of a place. `is_exclusive`: only one may match."""

    place: Place
    options: tuple[Conjunction, ...]
    is_exclusive: bool = False


@dataclass(frozen=True, slots=True)
class _Parts:
    """A conjunction without references: plain schemas and choices. `closing`: a schema that contains all the others."""

    plain: Conjunction = ()
    choices: tuple[_Choice, ...] = ()
    closing: Place | None = None


class _Rewriter:
    """Rewrites one document. `at`: the place that is being written."""

    def __init__(self, document: Any, budget: Budget, prefix: str) -> None:
        self._document = self.at = Place(document, document, budget)
        self._budget, self._prefix = budget, prefix
        self._documents: dict[str, Place] = {}
        self._roots = {id(document): self._document}
        self._anchors: dict[tuple[int, str], Place] = {}
        self._names: dict[tuple[int, int], str] = {}
        self._waiting: list[tuple[str, Place]] = []
        self._exclusive: list[tuple[Place, list[Schema]]] = []
        self._depth = 0
        self._matcher = Matcher(budget)

    def result(self) -> dict[str, Any]:
        self._index()
        root = self._write((self._document,))
        definitions: dict[str, Schema] = {}
        while self._waiting:
            name, place = self._waiting.pop()
            definitions[name] = self._write((place,))
        alternatives = Alternatives(definitions, self._budget)
        for place, options in self._exclusive:
            self.at = place
            if not alternatives.exclude_each_other(options):
                raise place.refusal("oneOf")
        self.at = self._document
        living = definitions_with_texts(definitions, self._budget)
        schema = possible(root, living.keys(), self._budget)
        if not isinstance(schema, dict):
            raise self.at.refusal(
                "the schema",
                "can match no value" + ": a $ref never ends" * (len(living) < len(definitions)),
            )
        return tidy(schema | {"$defs": living} if living else schema)

    # ── conjunctions ─────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def _part(self, place: Place) -> Iterator[None]:
        """Count a part, one level deeper."""
        self.at = place
        self._budget.spend(40)
        if self._depth >= _MAX_DEPTH:
            raise place.refusal(
                "the schema",
                f"nests deeper than {_MAX_DEPTH} levels, or combines recursive schemas",
            )
        self._depth += 1
        yield
        self._depth -= 1

    def _write(self, places: Conjunction) -> Schema:
        if not places:
            return {}
        with self._part(places[0]):
            if len(places) == 1 and (reference := self._reference(places[0])) is not None:
                return reference
            parts = self._parts(places)
            return parts is not None and self._write_parts(parts)

    def _reference(self, place: Place) -> Schema | None:
        """Return a reference if a schema consists of nothing else, so that recursive schemas end."""
        if (
            not isinstance(place.schema, dict)
            or len(keys := [*asserting(place.schema)]) != 1
            or keys[0] not in _REFERENCES
        ):
            return None
        target = self._target(place, keys[0])
        key = id(target.root), id(target.schema)
        if key not in self._names:
            self._names[key] = f"{self._prefix}{len(self._names)}"
            self._waiting.append((self._names[key], target))
        return {"$ref": f"#/$defs/{self._names[key]}"}

    def _write_parts(self, parts: _Parts) -> Schema:
        if not parts.choices:
            self._budget.spend(20 * len(parts.plain))
            shape = Shape(parts.plain, self._matcher)
            if parts.closing is not None:
                shape.close(parts.closing)
            return shape.write(self._write)
        choice, rest = parts.choices[0], replace(parts, choices=parts.choices[1:])
        if rest == _Parts():
            options = [self._write(option) for option in choice.options]
        else:
            options = [self._write_with(rest, option) for option in choice.options]
        if choice.is_exclusive:
            self._exclusive.append((choice.place, options))
        return {"anyOf": options}

    def _write_with(self, rest: _Parts, option: Conjunction) -> Schema:
        with self._part(option[0]):
            parts = self._parts(option)
            if parts is None:
                return False
            self._budget.spend((len(rest.plain) + len(rest.choices)) // 8)
            return self._write_parts(
                _Parts(rest.plain + parts.plain, rest.choices + parts.choices, rest.closing)
            )

    def _parts(self, places: Conjunction) -> _Parts | None:
        """Follow references and `allOf`. None: nothing matches."""
        waiting, plain, choices = [*reversed(places)], list[Place](), list[_Choice]()
        seen: dict[int, Place] = {}  # a schema twice says no more than once
        closing: Place | None = None
        if len(places) == 1 and isinstance(places[0].schema, dict):
            closing, waiting[0] = _without_closing(places[0])
        while waiting:
            place = waiting.pop()
            self._budget.spend(4)
            schema = place.schema
            if schema is False:
                return None
            if schema is True or id(schema) in seen:
                continue
            if not isinstance(schema, dict):
                raise place.refusal("the schema", "must be an object or a boolean")
            seen[id(schema)] = place
            also = [self._target(place, key) for key in _REFERENCES if key in schema]
            if "allOf" in schema:
                also += [
                    place.child("allOf", index) for index in range(len(place.members("allOf")))
                ]
            waiting += reversed([*also, *_contained(place)])
            choices += _choices(place)
            if not schema.keys().isdisjoint(PLAIN):
                plain.append(_without_plain_not(place))
        return _Parts(tuple(plain), tuple(choices), closing)

    # ── references ───────────────────────────────────────────────────────────────────────────────

    def _index(self) -> None:
        """Find the documents and anchors within the document."""
        waiting = [self._document] if isinstance(self._document.schema, dict) else []
        while waiting:
            place = waiting.pop()
            value = place.schema
            if is_document(value):
                self._documents[value["$id"].rstrip("#")] = self._roots[id(value)] = place
            if isinstance(value, dict):
                for keyword in ("$anchor", "$dynamicAnchor", "$id"):
                    if isinstance(name := value.get(keyword), str):
                        self._anchors[id(place.root), name.removeprefix("#")] = place
            parts = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += [place.child(key) for key, part in parts if isinstance(part, dict | list)]

    def _target(self, place: Place, keyword: str) -> Place:
        reference = place.text(keyword)
        self._budget.spend(5 + len(reference) // 8)
        uri, _, fragment = reference.partition("#")
        if not uri:
            document = self._roots[id(place.root)]
        elif uri in self._documents:
            document = self._documents[uri]
        else:
            raise place.refusal(keyword, f"refers to {uri!r}, which is not part of the schema")
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            if (anchor := self._anchors.get((id(document.root), fragment))) is None:
                raise place.refusal(
                    keyword, f"refers to the anchor {fragment!r}, which does not exist"
                )
            return anchor
        target = document
        for token in fragment.split("/")[1:]:
            key: str | int = token.replace("~1", "/").replace("~0", "~")
            try:
                if isinstance(target.schema, list) and str(key).isdecimal():
                    key = int(key)
                target = target.child(key)
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise place.refusal(
                    keyword, f"refers to {fragment!r}, which does not exist"
                ) from error
        return target


def _without_closing(place: Place) -> tuple[Place | None, Place]:
    """Separate the keywords that hold for what the other keywords of a schema have not met."""
    keywords = {"unevaluatedProperties", "unevaluatedItems"} & place.schema.keys()
    if not keywords:
        return None, place
    return place, place.also(
        {key: each for key, each in place.schema.items() if key not in keywords}
    )


def _without_plain_not(place: Place) -> Place:
    """Leave `not` only where it excludes values."""
    if "not" not in place.schema or _excludes_values(place.schema["not"]):
        return place
    return place.also({key: each for key, each in place.schema.items() if key != "not"})


def _excludes_values(schema: object) -> bool:
    if not isinstance(schema, dict):
        return False
    keys = {*asserting(schema)}
    return keys == {"const"} or (keys == {"enum"} and isinstance(schema["enum"], list))


def _contained(place: Place) -> Iterator[Place]:
    """Return what follows from `contains` and `not` without alternatives."""
    schema = place.schema
    if "contains" in schema:
        least, most = place.count("minContains", 1), place.count("maxContains", -1)
        if schema["contains"] is True or schema["contains"] == {}:
            yield place.also({"minItems": least} | ({"maxItems": most} if most >= 0 else {}))
        elif least > 0 or most >= 0:
            raise place.refusal("contains")
    if "not" in schema:
        match schema["not"]:
            case False:
                pass
            case dict() | True as negated if negated is True or not [*asserting(negated)]:
                yield place.also(False)
            case dict() as negated if [*asserting(negated)] == ["required"] or _excludes_values(
                negated
            ):
                pass
            case _:
                raise place.refusal("not")
    if "if" in schema and ("then" in schema or "else" in schema):
        raise place.refusal("if")


def _choices(place: Place) -> Iterator[_Choice]:
    schema = place.schema
    if "anyOf" in schema:
        options = range(len(place.members("anyOf")))
        yield _Choice(place, tuple((place.child("anyOf", index),) for index in options))
    if "oneOf" in schema:
        # With a discriminator a value without its property is not meant, even if no branch requires it.
        note = schema.get("discriminator")
        name = note.get("propertyName") if isinstance(note, dict) else None
        also = (place.also({"required": [name]}),) if isinstance(name, str) else ()
        options = range(len(place.members("oneOf")))
        yield _Choice(
            place,
            tuple((place.child("oneOf", index), *also) for index in options),
            is_exclusive=True,
        )
    if isinstance(schema.get("not"), dict) and "required" in schema["not"]:
        names = place.child("not").names("required", schema["not"]["required"])
        # Values of other types have every property that `required` names.
        is_object = place.also({"type": "object"})
        yield _Choice(place, tuple((is_object, _without(place, name)) for name in names))
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        for name, value in place.entries(keyword).items():
            if isinstance(value, list):
                then = place.also({"required": place.names(keyword, value)})
            else:
                then = place.child(keyword, name)
            yield _Choice(place, ((then,), (_without(place, name),)))


def _without(place: Place, name: str) -> Place:
    return place.also({"properties": {name: False}})
