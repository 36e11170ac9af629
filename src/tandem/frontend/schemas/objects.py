"""Merges the object keywords of several schemas into one schema."""

import math
from itertools import pairwise
from typing import Any

from tandem.frontend.schemas import patterns
from tandem.frontend.schemas.keywords import Conjunction, Place, Schema, Write
from tandem.frontend.schemas.strings import parsed, written

# Characters of all names next to which an object may be open: the pattern of other names takes thirty times as many.
_MAX_NAMES = 4_000


class _Fields:
    """The schemas of properties: by name, by pattern, and of the rest. `rest` None: anything may follow."""

    def __init__(
        self,
        named: dict[str, Conjunction],
        matched: dict[str, Conjunction],
        rest: Conjunction | None,
        matcher: patterns.Matcher,
    ) -> None:
        self.named, self.matched, self.rest, self._matcher = named, matched, rest, matcher

    def of(self, name: str) -> Conjunction:
        """Return all that applies to a property. `meet` and `write` spend the budget for `named`."""
        found = [
            places
            for key, places in self.matched.items()
            if self._matcher.matches(self._matcher.parse(key), name)
        ]
        if name in self.named:
            found.append(self.named[name])
        return tuple(place for places in found for place in places) if found else self.rest or ()

    def like(
        self,
        named: dict[str, Conjunction],
        matched: dict[str, Conjunction],
        rest: Conjunction | None,
    ) -> "_Fields":
        """Return fields with the same matcher."""
        return _Fields(named, matched, rest, self._matcher)

    def meet(self, other: "_Fields") -> "_Fields":
        named = {name: self.of(name) + other.of(name) for name in (*self.named, *other.named)}
        # No name matches two patterns (`Objects` checks it), so a pattern of one side meets the rest of the other.
        matched = {
            key: (self.matched.get(key, self.rest) or ())
            + (other.matched.get(key, other.rest) or ())
            for key in (*self.matched, *other.matched)
        }
        rests = [each.rest for each in (self, other) if each.rest is not None]
        return self.like(named, matched, sum(rests, ()) if rests else None)


class Objects:
    """Properties and their names."""

    KEYWORDS = frozenset(
        {"properties", "patternProperties", "additionalProperties", "unevaluatedProperties"}
        | {"required", "propertyNames", "minProperties", "maxProperties"}
    )

    def __init__(self, matcher: patterns.Matcher) -> None:
        self._matcher = matcher
        self._fields = _Fields({}, {}, None, matcher)
        self._required = dict[str, None]()
        self._names: Conjunction = ()
        self._least, self._most = 0, math.inf
        self._places = dict[str, Place]()

    def add(self, place: Place) -> None:
        """Add the keywords of a schema."""
        schema = place.schema
        self._places |= dict.fromkeys(schema.keys() & self.KEYWORDS, place)
        rests = ("additionalProperties", "unevaluatedProperties")
        keys = place.entries("patternProperties")
        for key in keys:
            parsed(place, "patternProperties", key, self._matcher)
        place.budget.spend(len(self._fields.named) + len(self._fields.matched))
        self._fields = self._fields.meet(
            self._fields.like(
                {name: (place.child("properties", name),) for name in place.entries("properties")},
                {key: (place.child("patternProperties", key),) for key in keys},
                next(((place.child(key),) for key in rests if key in schema), None),
            )
        )
        self._required |= dict.fromkeys(place.names("required", schema.get("required", [])))
        if "propertyNames" in schema:
            self._names += (place.child("propertyNames"),)
        self._least = max(self._least, place.count("minProperties", 0))
        self._most = min(self._most, place.count("maxProperties", math.inf))

    def close(self, rest: Place) -> None:
        """Apply `unevaluatedProperties`, which holds for the properties that no other keyword has met."""
        if self._fields.rest is None:
            self._fields.rest = (rest,)

    def write(self, place: Place, write: Write) -> Schema:
        """Return the schema of an object. It is closed unless a schema opens it, or names no property.

        Args:
            place: A schema with one of the keywords.
            write: As in `Shape.write`.
        """
        fields = self._fields
        place.budget.spend(sum(8 + len(name) for name in (*fields.named, *self._required)))
        named = fields.named | {name: fields.of(name) for name in self._required}
        others = () if fields.rest is None and self._is_open() else fields.rest
        fields = self._allowed(fields.like(named, fields.matched, others), write)
        named = fields.named
        rest = None if fields.rest is None else write(fields.rest)
        matched = self._matched(fields, named, write)
        if named and sum(map(len, named)) > _MAX_NAMES:
            rest = None
        is_open = rest is not None and rest is not False
        if is_open and named and not matched:
            # The library's additional properties may spell a name of `properties` with an escape or an accent.
            place.budget.spend(4 * sum(map(len, named)))
            matched = {written(place, "properties", patterns.other_than(named)): rest or {}}
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: write(places) for name, places in named.items()},
            "required": list(self._required),
        }
        if matched:
            schema["patternProperties"] = {
                key: each for key, each in matched.items() if key is not None
            }
        elif rest is not None:
            schema["additionalProperties"] = rest
        if not math.isinf(self._most):
            schema["maxProperties"] = int(self._most)
        if self._least > len(self._required):
            # The library counts a name twice if the text has it twice.
            if self._least > 1 and (matched or is_open):
                raise self._places["minProperties"].refusal("minProperties")
            schema["minProperties"] = self._least
        return schema

    def _is_open(self) -> bool:
        """Return whether no schema lists the properties. One that only forbids some does not."""
        forbids = [
            any(place.schema is False for place in places) for places in self._fields.named.values()
        ]
        is_listed = "properties" in self._places and not (forbids and all(forbids))
        return not is_listed and "patternProperties" not in self._places

    def _matched(
        self, fields: _Fields, named: dict[str, Conjunction], write: Write
    ) -> dict[str | None, Schema]:
        if not fields.matched:
            return {}
        place = self._places.get("patternProperties") or self._places["propertyNames"]
        keyword = "patternProperties" if "patternProperties" in self._places else "propertyNames"
        nodes = [self._matcher.parse(key) for key in fields.matched]
        prefixes = sorted(map(patterns.literal_prefix, nodes))
        is_double = any(later.startswith(prefix) for prefix, later in pairwise(prefixes))
        if is_double or any(self._matcher.matches(node, name) for node in nodes for name in named):
            raise place.refusal(keyword)
        schemas = (write(places) for places in fields.matched.values())
        texts = [written(place, keyword, node) for node in nodes]
        return dict(zip(texts, schemas, strict=True))

    def _allowed(self, fields: _Fields, write: Write) -> _Fields:
        """Return the properties whose names `propertyNames` allows."""
        if not self._names:
            return fields
        place = self._places["propertyNames"]
        nothing = (place.also(False),)
        names = write((*self._names, place.also({"type": "string"})))
        if names is False:
            return self._fields.like(dict.fromkeys(fields.named, nothing), {}, nothing)
        if isinstance(names, dict) and "enum" in names:
            others = {name: nothing for name in fields.named if name not in names["enum"]}
            return self._fields.like(
                {name: fields.of(name) for name in names["enum"]} | others, {}, nothing
            )
        if names == {"type": "string"}:
            return fields
        if not isinstance(names, dict) or "type" not in names or fields.matched:
            raise place.refusal("propertyNames")
        lengths = f"{names.get('minLength', 0)},{names.get('maxLength', '')}"
        pattern = names.get("pattern", f"[\\s\\S]{{{lengths}}}")
        if "\\\\" in pattern:
            raise place.refusal("propertyNames")
        return self._with_names(fields, f"^(?:{pattern})$", place)

    def _with_names(self, fields: _Fields, pattern: str, place: Place) -> _Fields:
        node, nothing = parsed(place, "propertyNames", pattern, self._matcher), (place.also(False),)
        named = {
            name: places if self._matcher.matches(node, name) else nothing
            for name, places in fields.named.items()
        }
        if fields.rest is None or any(each.schema is False for each in fields.rest):
            return self._fields.like(named, {}, fields.rest)
        if named:  # closed: a pattern of names that are not listed cannot be combined with another
            return self._fields.like(named, {}, nothing)
        return self._fields.like({}, {pattern: fields.rest}, nothing)
