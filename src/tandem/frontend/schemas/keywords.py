"""The keywords of JSON Schema, and places in a schema.

The three tables are the only list of what is served; docs/features.md shows them. Unknown keywords are
ignored, as the specification says.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from tandem.frontend.schemas.budget import Budget

_SERVED = """
    type enum const properties required additionalProperties unevaluatedProperties maxProperties items prefixItems
    additionalItems unevaluatedItems minItems maxItems minLength maxLength minimum maximum exclusiveMinimum
    exclusiveMaximum allOf anyOf dependentRequired dependentSchemas dependencies $ref $dynamicRef $recursiveRef $defs
    definitions $id $anchor $dynamicAnchor
"""
_ANNOTATIONS = """
    $schema $vocabulary $comment title description default examples deprecated readOnly writeOnly contentEncoding
    contentMediaType contentSchema
"""
SERVED: Final = frozenset(_SERVED.split())
# Served under a condition, which is part of the refusal.
PARTLY: Final[Mapping[str, str]] = {
    "oneOf": "if no value can match two branches, for example by a required property with a different `const` in each",
    "pattern": "without lookaround, back-references, `\\b`, `\\p` and flags; next to a length if one part varies in length",
    "format": "for the formats below; a format that does not fit a length, and other formats, assert nothing",
    "patternProperties": "if no name can match two patterns, or a pattern and `properties`",
    "propertyNames": "with `enum`, `const`, `pattern` or a length",
    "minProperties": "up to 1, or if all names are in `properties`",
    "multipleOf": "for integers up to 1024 without bounds, or with bounds that leave at most 1000 values",
    "contains": "if it allows every item, or if `minContains` is 0",
    "minContains": "with such a `contains`",
    "maxContains": "with such a `contains`",
    "uniqueItems": "with `maxItems` of at most 1",
    "not": "with `required`; with values, next to `enum`; or with a schema that allows everything or nothing",
}
REFUSED: Final = frozenset({"if", "then", "else"})
ANNOTATIONS: Final = frozenset(_ANNOTATIONS.split())

# Keywords without which a schema allows more: no other keyword of the schema depends on them.
SEPARABLE: Final = frozenset(
    [
        "type",
        "enum",
        "const",
        "required",
        "minProperties",
        "maxProperties",
        "propertyNames",
        "minItems",
        "maxItems",
        "uniqueItems",
        "minLength",
        "maxLength",
        "pattern",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "dependentRequired",
        "not",
    ]
)

# Keywords that do not constrain the value.
_IDLE = ANNOTATIONS | {"$defs", "definitions", "$id", "$anchor", "$dynamicAnchor"}
_KNOWN = SERVED | PARTLY.keys() | REFUSED


# Refusals quote names and values of clients.
_MAX_PATH, _MAX_REASON = 200, 400


class SchemaRefused(ValueError):
    """A schema that structured output cannot hold. The message names the keyword and its place."""

    def __init__(self, place: "Place", keyword: str, reason: str) -> None:
        super().__init__(f"{keyword} at {place.path()} {reason[:_MAX_REASON]}")
        self.place, self.keyword = place, keyword


@dataclass(frozen=True, slots=True)
class Place:
    """A schema within a document.

    Attributes:
        root: The document that `#` refers to here.
        parent: The value that contains this one under `key`. None: this is the whole document.
    """

    schema: Any
    root: Any
    budget: Budget
    parent: "Place | None" = None
    key: str | int = ""

    def child(self, *keys: str | int) -> "Place":
        """Return the place of a value below this one. The keys must exist."""
        place = self
        for key in keys:
            schema = place.schema[key]
            self.budget.spend(1)
            place = Place(schema, place.root, self.budget, place, key)
        if is_document(place.schema):
            return Place(place.schema, place.schema, self.budget, place.parent, place.key)
        return place

    def also(self, schema: Any) -> "Place":
        """Return the place of a schema that follows from keywords of this one."""
        self.budget.spend(2 + (len(schema) if isinstance(schema, dict) else 0) // 8)
        return Place(schema, self.root, self.budget, self.parent, self.key)

    def ancestry(self) -> "list[Place]":
        """Return the places from the whole document to this one."""
        places, place = [self], self.parent
        while place is not None:
            places.append(place)
            place = place.parent
        return places[::-1]

    def path(self) -> str:
        """Return the JSON pointer to the schema from its document."""
        path = "#"
        for place in self.ancestry()[1:]:
            path += "/" + str(place.key).replace("~", "~0").replace("/", "~1")
            if place.parent is not None and place.root is not place.parent.root:
                path = place.root["$id"] + "#"
        return path if len(path) < _MAX_PATH else f"…{path[-_MAX_PATH:]}"

    def refusal(self, keyword: str, reason: str = "") -> SchemaRefused:
        """Return the error for a keyword here."""
        if not reason:
            reason = (
                f"is served only {PARTLY[keyword]}" if keyword in PARTLY else "is not supported"
            )
        return SchemaRefused(self, keyword, reason)

    def entries(self, keyword: str) -> dict[str, Any]:
        """Return the value of a keyword, an object; empty if it is absent."""
        value = self.schema.get(keyword, {})
        if not isinstance(value, dict):
            raise self.refusal(keyword, "must be an object")
        self.budget.spend(len(value))
        return value

    def members(self, keyword: str) -> list[Any]:
        """Return the value of a keyword, an array."""
        value = self.schema[keyword]
        if not isinstance(value, list):
            raise self.refusal(keyword, "must be an array")
        self.budget.spend(len(value))
        return value

    def names(self, keyword: str, values: Any) -> list[str]:
        """Check that the value of a keyword is an array of strings, and return it."""
        if not isinstance(values, list) or not all(isinstance(name, str) for name in values):
            raise self.refusal(keyword, "must be an array of strings")
        self.budget.spend(len(values))
        return values

    def number(self, keyword: str) -> int | float:
        """Return the value of a keyword, a number."""
        value = self.schema[keyword]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refusal(keyword, "must be a number")
        if not -sys.float_info.max <= value <= sys.float_info.max:
            raise self.refusal(keyword, "must be a finite number that a double can hold")
        return int(value) if isinstance(value, float) and value.is_integer() else value

    def count(self, keyword: str, default: float) -> Any:
        """Return the value of a keyword, a non-negative integer."""
        if keyword not in self.schema:
            return default
        value = self.number(keyword)
        if not isinstance(value, int) or value < 0:
            raise self.refusal(keyword, "must be a non-negative integer")
        if value >= 2**63:
            raise self.refusal(keyword, "is beyond 64 bits")
        return value

    def text(self, keyword: str) -> str:
        """Return the value of a keyword, a string."""
        value = self.schema[keyword]
        if not isinstance(value, str):
            raise self.refusal(keyword, "must be a string")
        return value


# Schemas that all apply to one value.
Conjunction: TypeAlias = tuple[Place, ...]
# A schema as it is written for the grammar library. False: no text matches.
Schema: TypeAlias = dict[str, Any] | bool
# Writes what a conjunction says.
Write: TypeAlias = Callable[[Conjunction], Schema]


def is_document(schema: object) -> bool:
    """Return whether a schema is a document of its own, to which `#` refers within it."""
    return (
        isinstance(schema, dict)
        and isinstance(uri := schema.get("$id"), str)
        and not uri.startswith("#")
    )


def asserting(schema: Mapping[str, Any]) -> Iterable[str]:
    """Return the keywords of a schema that may assert something."""
    return schema.keys() & _KNOWN - _IDLE
