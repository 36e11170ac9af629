"""Merges the array keywords of several schemas into one schema."""

import math
from typing import Any

from tandem.frontend.schemas.keywords import Conjunction, Place, Schema, Write


class Arrays:
    """The schemas of the first items and of the rest, and the number of items."""

    KEYWORDS = frozenset(
        {
            "prefixItems",
            "items",
            "additionalItems",
            "unevaluatedItems",
            "minItems",
            "maxItems",
            "uniqueItems",
        }
    )

    def __init__(self) -> None:
        self._first = list[Conjunction]()
        self._rest: Conjunction | None = None  # None: anything may follow
        self._least, self._most = 0, math.inf
        self._unique: Place | None = None

    def add(self, place: Place) -> None:
        """Add the keywords of a schema."""
        schema = place.schema
        first, rests = "prefixItems", ("items", "unevaluatedItems")
        if isinstance(schema.get("items"), list):  # draft 7
            first, rests = "items", ("additionalItems", "unevaluatedItems")
        count = len(place.members(first)) if first in schema else 0
        rest: Conjunction | None = next(
            ((place.child(key),) for key in rests if key in schema), None
        )
        theirs: list[Conjunction] = [(place.child(first, index),) for index in range(count)]
        both = range(max(count, len(self._first)))
        place.budget.spend(len(both))
        self._first = [
            _at(self._first, self._rest, index) + _at(theirs, rest, index) for index in both
        ]
        if rest is not None:
            self._rest = (self._rest or ()) + rest
        self._least = max(self._least, place.count("minItems", 0))
        self._most = min(self._most, place.count("maxItems", math.inf))
        if schema.get("uniqueItems") is True:
            self._unique = place

    def close(self, rest: Place) -> None:
        """Apply `unevaluatedItems`, which holds for the items that no other keyword has met."""
        if self._rest is None:
            self._rest = (rest,)

    def write(self, write: Write) -> Schema:
        """Return the schema of an array."""
        if self._unique is not None and self._most > 1:
            raise self._unique.refusal("uniqueItems")
        first = [write(places) for places in self._first]
        rest: Schema = {}
        if self._rest is not None:
            rest = write(self._rest)
        elif first and self._least <= len(first):
            rest = False  # closed, as objects are
        schema: dict[str, Any] = {
            "type": "array",
            "prefixItems": first,
            "items": rest,
            "minItems": self._least,
        }
        return schema if math.isinf(self._most) else schema | {"maxItems": int(self._most)}


def _at(first: list[Conjunction], rest: Conjunction | None, index: int) -> Conjunction:
    return first[index] if index < len(first) else rest or ()
