"""Checks of written schemas: whether a text can end, and whether alternatives exclude each other."""

from collections.abc import Mapping, Set
from typing import Any

from tandem.frontend.schemas.budget import Budget
from tandem.frontend.schemas.keywords import Schema
from tandem.frontend.schemas.shapes import IMPLIED, key_of, type_of

_MAX_REFERENCES = 100
# Properties below each other that are compared; recursive schemas have no end.
_MAX_NESTED = 30


def definitions_with_texts(definitions: Mapping[str, Schema], budget: Budget) -> dict[str, Schema]:
    """Return the definitions that some text matches, without the alternatives that none matches.

    A reference counts only after its definition is known to match a text, so cycles that never end are left out.
    """
    living = dict[str, Schema]()
    count = -1
    while len(living) > count:  # most schemas take two rounds
        count = len(living)
        budget.spend(len(definitions))
        for name in reversed(list(definitions)):  # references mostly lead to later definitions
            if (
                name not in living
                and (found := possible(definitions[name], living.keys(), budget)) is not False
            ):
                living[name] = found
    return {name: possible(definitions[name], living.keys(), budget) for name in living}


def possible(schema: Schema, living: Set[str], budget: Budget) -> Schema:
    """Return a schema without what no text matches. False: nothing is left.

    Args:
        living: The definitions that some text matches.
    """
    budget.spend(3)
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema:
        return definition_of(schema) in living and schema
    if "anyOf" in schema:
        left = [
            each
            for option in schema["anyOf"]
            if (each := possible(option, living, budget)) is not False
        ]
        return {"anyOf": left} if len(left) > 1 else bool(left) and left[0]
    if schema.get("enum") == []:
        return False
    if schema.get("type") == "object":
        return _possible_object(schema, living, budget)
    return _possible_array(schema, living, budget) if schema.get("type") == "array" else schema


def definition_of(schema: dict[str, Any]) -> str:
    """Return the name of the definition to which a reference leads."""
    return str(schema["$ref"]).rpartition("/")[2]


def _possible_object(schema: dict[str, Any], living: Set[str], budget: Budget) -> Schema:
    schema = dict(schema)
    for keyword in ("properties", "patternProperties"):
        each = {
            name: possible(part, living, budget) for name, part in schema.get(keyword, {}).items()
        }
        schema[keyword] = {name: part for name, part in each.items() if part is not False}
    budget.spend(len(schema["required"]) // 8)
    if any(name not in schema["properties"] for name in schema["required"]):
        return False
    if "additionalProperties" in schema:
        schema["additionalProperties"] = possible(schema["additionalProperties"], living, budget)
    is_open = schema["patternProperties"] or schema.get("additionalProperties", False) is not False
    if not is_open and schema.get("minProperties", 0) > len(schema["properties"]):
        return False
    fewest = max(len(schema["required"]), schema.get("minProperties", 0))
    return schema.get("maxProperties", fewest) >= fewest and schema


def _possible_array(schema: dict[str, Any], living: Set[str], budget: Budget) -> Schema:
    first, rest = (
        [possible(each, living, budget) for each in schema["prefixItems"]],
        possible(schema["items"], living, budget),
    )
    most = schema.get("maxItems")
    if False in first:
        first, rest = first[: first.index(False)], False
    if most is not None and most <= len(first):
        first, rest = first[:most], False
    if schema["minItems"] > (
        len(first) if rest is False else schema.get("maxItems", schema["minItems"])
    ):
        return False
    schema = schema | {"prefixItems": first, "items": rest}
    return (
        schema if rest is not False else {key: schema[key] for key in schema if key != "maxItems"}
    )


def tidy(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a written schema without notes and without keywords that say nothing."""
    idle = {
        key for key in ("required", "prefixItems", "patternProperties") if not schema.get(key, True)
    }
    idle |= {IMPLIED, "minItems"} if schema.get("minItems") == 0 else {IMPLIED}
    if schema.get("properties") == {} and schema.get("additionalProperties", False) is not False:
        idle.add("properties")
        if (
            schema.keys() - idle == {"type", "additionalProperties"}
            and not schema["additionalProperties"]
        ):
            idle.add("additionalProperties")
    return {key: _tidied(key, value) for key, value in schema.items() if key not in idle}


def _tidied(key: str, value: Any) -> Any:
    if key in {"properties", "patternProperties", "$defs"}:
        return {name: tidy(each) for name, each in value.items()}
    if key in {"prefixItems", "anyOf"}:
        return [tidy(each) for each in value]
    return tidy(value) if key in {"items", "additionalProperties"} and value is not False else value


# ── alternatives ─────────────────────────────────────────────────────────────────────────────────


class Alternatives:
    """Compares written schemas. References lead to `definitions`."""

    def __init__(self, definitions: Mapping[str, Schema], budget: Budget) -> None:
        self._definitions, self._budget, self._depth = definitions, budget, 0

    def exclude_each_other(self, options: list[Schema]) -> bool:
        """Return whether no text that is written for one option matches the original of another."""
        return all(
            self._misses(left, right)
            for index, left in enumerate(options)
            for other, right in enumerate(options)
            if index != other
        )

    def _options(self, schema: Schema) -> list[dict[str, Any]]:
        """Return the schemas with `enum` or `type` that a schema consists of; empty ones allow everything."""
        waiting, found = [schema], list[dict[str, Any]]()
        for _ in range(_MAX_REFERENCES):
            if not waiting:
                return found
            option = waiting.pop()
            self._budget.spend(1)
            if isinstance(option, bool):
                found += [{}] * option
            elif "$ref" in option:
                waiting.append(self._definitions.get(definition_of(option), False))
            elif "anyOf" in option:
                self._budget.spend(len(option["anyOf"]))
                waiting += option["anyOf"]
            else:
                found.append(option)
        return [{}]

    def _misses(self, left: Schema, right: Schema) -> bool:
        return all(
            self._simple_misses(a, b) for a in self._options(left) for b in self._options(right)
        )

    def _simple_misses(self, left: dict[str, Any], right: dict[str, Any]) -> bool:
        self._budget.spend(5 + len(left.get("enum", ())) + len(right.get("enum", ())))
        if not left or not right:
            return False
        if "enum" in left and "enum" in right and IMPLIED not in right:
            values, others = (
                {key_of(value, self._budget) for value in schema["enum"]}
                for schema in (left, right)
            )
            return values.isdisjoint(others)
        mine, theirs = _types(left), _types(right)
        if not mine & theirs:
            return IMPLIED not in right
        if mine == theirs == {"object"} and "enum" not in left and "enum" not in right:
            return self._objects_miss(left, right)
        return False

    def _objects_miss(self, left: dict[str, Any], right: dict[str, Any]) -> bool:
        mine, theirs = left["properties"], right["properties"]
        self._budget.spend((len(mine) + len(left["required"]) + len(right["required"])) // 8)
        is_closed = left.get("additionalProperties", False) is False and not left.get(
            "patternProperties"
        )
        if is_closed and any(name not in mine for name in right["required"]):
            return True
        if right.get("additionalProperties") is False and any(
            name not in theirs for name in left["required"]
        ):
            return True
        shared = mine.keys() & theirs.keys() & {*left["required"], *right["required"]}
        if self._depth >= _MAX_NESTED:
            return False
        self._depth += 1
        is_missed = any(self._misses(mine[name], theirs[name]) for name in shared)
        self._depth -= 1
        return is_missed


def _types(schema: dict[str, Any]) -> set[str]:
    """Return the types of a schema. A whole number is both an integer and a number."""
    names = {schema["type"]} if "type" in schema else set(map(type_of, schema["enum"]))
    return names | {"integer"} if "number" in names else names
