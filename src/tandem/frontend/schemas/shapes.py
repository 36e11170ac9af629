"""Merges the keywords of several schemas into one schema, apart from references and alternatives.

The grammar library reads one of `$ref`, `const`, `enum`, `anyOf` and `type` of a schema and ignores the others. So
each schema that is written here has only one of them.
"""

import math
from typing import Any, Final

from tandem.frontend.schemas.arrays import Arrays
from tandem.frontend.schemas.budget import Budget
from tandem.frontend.schemas.keywords import Conjunction, Place, Schema, Write
from tandem.frontend.schemas.numbers import Numbers
from tandem.frontend.schemas.objects import Objects
from tandem.frontend.schemas.patterns import Matcher
from tandem.frontend.schemas.strings import Strings

# Marks a written schema whose type follows only from its keywords: other types match the original too.
IMPLIED: Final = "implied"
_KEYWORDS = {
    "object": Objects.KEYWORDS,
    "array": Arrays.KEYWORDS,
    "string": Strings.KEYWORDS,
    "number": Numbers.KEYWORDS,
}
_TYPES = {*_KEYWORDS, "integer", "boolean", "null"}
PLAIN: Final = frozenset({"type", "enum", "const", "not"}).union(*_KEYWORDS.values())


def type_of(value: object) -> str:
    """Return the type of a JSON value; of a whole number, `integer`."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "integer" if value == int(value) else "number"
        case str():
            return "string"
        case _:
            return "array" if isinstance(value, list) else "object"


def key_of(value: object, budget: Budget) -> object:
    """Return what equal JSON values share: `1` is `1.0`, but not `true`."""
    match value:
        case bool():
            key: object = "boolean", value
        case list():
            key = "array", tuple(key_of(each, budget) for each in value)
        case dict():
            budget.spend(sum(map(len, value)) // 2)
            key = "object", frozenset((name, key_of(each, budget)) for name, each in value.items())
        case _:
            key = value
    budget.spend(2 + (len(value) // 2 if isinstance(value, str) else 0))
    return key


class Shape:
    """The conjunction of the plain keywords of several schemas."""

    def __init__(self, places: Conjunction, matcher: Matcher) -> None:
        self._objects, self._arrays, self._strings, self._numbers = (
            Objects(matcher),
            Arrays(),
            Strings(matcher),
            Numbers(),
        )
        self._last: Place
        self._places = dict[str, Place]()
        self._types: list[str] | None = None
        self._values: dict[object, Any] | None = None
        self._excluded = set[object]()
        for place in places:
            self._add(place)

    def _add(self, place: Place) -> None:
        schema, self._last = place.schema, place
        self._places |= dict.fromkeys(schema.keys() & PLAIN, place)
        if "type" in schema:
            self._add_types(place)
        if "const" in schema:
            self._add_values(place, "const", [schema["const"]])
        if "enum" in schema:
            self._add_values(place, "enum", place.members("enum"))
        if "not" in schema:
            excluded = schema["not"].get("enum", [schema["not"].get("const")])
            self._excluded.update(key_of(each, place.budget) for each in excluded)
        for part in (self._objects, self._arrays, self._strings, self._numbers):
            if not schema.keys().isdisjoint(part.KEYWORDS):
                part.add(place)

    def _add_types(self, place: Place) -> None:
        value = place.schema["type"]
        types = place.names("type", [value] if isinstance(value, str) else value)
        if unknown := [name for name in types if name not in _TYPES]:
            raise place.refusal("type", f"is {unknown[0]!r}, which is no type")
        types = [
            name for name in dict.fromkeys(types) if name != "integer" or "number" not in types
        ]
        if self._types is not None:
            mine, theirs = set(self._types), set(types)
            both = dict.fromkeys([*self._types, *types])
            types = [
                name
                for name in both
                if name in mine & theirs or (name == "integer" and "number" in mine | theirs)
            ]
        self._types = types

    def _add_values(self, place: Place, keyword: str, values: list[Any]) -> None:
        if any(isinstance(each, float) and not math.isfinite(each) for each in values):
            raise place.refusal(keyword, "has a number that is not finite")
        theirs = {key_of(each, place.budget): each for each in values}
        mine = theirs if self._values is None else self._values
        self._values = {key: each for key, each in mine.items() if key in theirs}

    def close(self, place: Place) -> None:
        """Apply `unevaluatedProperties` and `unevaluatedItems` of a schema that contains all the others."""
        if "unevaluatedProperties" in place.schema:
            self._objects.close(place.child("unevaluatedProperties"))
        if "unevaluatedItems" in place.schema:
            self._arrays.close(place.child("unevaluatedItems"))

    def write(self, write: Write) -> Schema:
        """Return the schema of this shape.

        Args:
            write: Returns the schema of the conjunction of the schemas of a property or an item.

        Raises:
            SchemaRefused: The keywords cannot be served.
        """
        if self._values is not None:
            values = [
                each
                for key, each in self._values.items()
                if key not in self._excluded and self._allows(each)
            ]
            return bool(values) and {"enum": values}
        if self._excluded:
            raise self._places["not"].refusal("not")
        types = self._types
        if types is None:
            types = [
                name
                for name, keywords in _KEYWORDS.items()
                if not self._places.keys().isdisjoint(keywords)
            ]
            if not types:
                return {}
        options = [self._typed(name, write) for name in types]
        if self._types is None:
            options = [
                (option or {"enum": []}) | {IMPLIED: True}
                for option in options
                if option is not True
            ]
        return options[0] if len(options) == 1 else {"anyOf": options}

    def _typed(self, name: str, write: Write) -> Schema:
        match name:
            case "object":
                return self._objects.write(self._last, write)
            case "array":
                return self._arrays.write(write)
            case "string":
                return self._strings.write(self._places.get("pattern", self._last))
            case "integer" | "number":
                return self._numbers.write(name, self._places.get("multipleOf", self._last))
            case _:
                return {"type": name}

    def _allows(self, value: Any) -> bool:
        """Return whether a value of `enum` or `const` fits the other keywords."""
        keyword = "const" if "const" in self._places else "enum"
        place, name = self._places[keyword], type_of(value)
        if (
            self._types is not None
            and name not in self._types
            and not (name == "integer" and "number" in self._types)
        ):
            return False
        match value:
            case bool() | None:
                return True
            case str():
                return self._strings.allows(value)
            case int() | float():
                return self._numbers.allows(place, value)
            case _:
                if not self._places.keys().isdisjoint(_KEYWORDS[name]):
                    raise place.refusal(
                        keyword, f"has an {name}, which is not supported next to other keywords"
                    )
                return True
