"""Merges the string keywords of several schemas into one schema."""

import math
from typing import Any

from tandem.frontend.schemas import patterns
from tandem.frontend.schemas.keywords import Place, Schema
from tandem.frontend.schemas.string_formats import PATTERNS, expression_of

# zod's pattern of e-mail addresses. Its lookaheads forbid a dot at the start and two dots in sequence.
_KNOWN = {
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        r"^(?:[A-Za-z0-9_'+-]+\.)*[A-Za-z0-9_'+-]*[A-Za-z0-9_+-]@(?:[A-Za-z0-9][A-Za-z0-9-]*\.)+[A-Za-z]{2,}$"
    )
}


class Strings:
    """Lengths, a pattern and a format."""

    KEYWORDS = frozenset({"minLength", "maxLength", "pattern", "format"})

    def __init__(self, matcher: patterns.Matcher) -> None:
        self._matcher = matcher
        self._least, self._most = 0, math.inf
        self._pattern: patterns.Expression | None = None
        self._format = ""

    def add(self, place: Place) -> None:
        """Add the keywords of a schema."""
        schema = place.schema
        self._least = max(self._least, place.count("minLength", 0))
        self._most = min(self._most, place.count("maxLength", math.inf))
        if "pattern" in schema:
            text = place.text("pattern")
            pattern = parsed(place, "pattern", _KNOWN.get(text, text), self._matcher)
            if self._pattern not in (None, pattern):
                raise place.refusal("pattern")
            self._pattern = pattern
        if "format" in schema:
            self._format = place.text("format")

    def allows(self, value: str) -> bool:
        """Return whether a value fits."""
        is_found = self._pattern is None or self._matcher.matches(self._pattern, value)
        return is_found and self._least <= len(value) <= self._most

    def write(self, place: Place) -> Schema:
        """Return the schema of a string. `place` is that of the pattern or the format."""
        if self._least > self._most:
            return False
        most = None if math.isinf(self._most) else int(self._most)
        fitting = self._pattern
        if fitting is None and self._format in PATTERNS:
            fitting = expression_of(self._format)
        if fitting is not None:
            fitting = patterns.bounded(fitting, self._least, most)
            if fitting is None and self._pattern is not None:
                raise place.refusal(
                    "pattern",
                    "has several parts of varying length, so minLength or maxLength cannot be held; "
                    "drop the length",
                )
        if (
            fitting is None and most == 1
        ):  # the library allows control characters in a string of one
            fitting = patterns.Repeat(patterns.ALL, self._least, 1)
        if fitting is not None and fitting != patterns.ANY:
            text = written(place, "pattern", fitting)
            return text is not None and {"type": "string", "pattern": text}
        schema: dict[str, Any] = {"type": "string"}
        if self._least:
            schema["minLength"] = self._least
        if most is not None:
            schema["maxLength"] = most
        return schema


def parsed(
    place: Place, keyword: str, pattern: str, matcher: patterns.Matcher
) -> patterns.Expression:
    """Return the expression of a pattern in a keyword of a schema."""
    try:
        return matcher.parse(pattern)
    except ValueError as error:
        raise place.refusal(keyword, f"{error}: {pattern[:100]}") from error


def written(place: Place, keyword: str, node: patterns.Expression) -> str | None:
    """Return the pattern of an expression that comes from a keyword of a schema, as `json_pattern` does."""
    place.budget.spend(4 * node.size)
    try:
        text = patterns.json_pattern(node)
    except ValueError as error:
        raise place.refusal(keyword, str(error)) from error
    place.budget.spend(len(text or "") // 2)
    return text
