"""Merges the number keywords of several schemas into one schema."""

import math
from fractions import Fraction
from typing import Any

from tandem.frontend.schemas.keywords import Place, Schema

_LARGEST = 2**63 - 1  # integer of the grammar library
_MAX_VALUES, _MAX_MULTIPLE = 1000, 1024
_LOWER = {"minimum": False, "exclusiveMinimum": True}
_UPPER = {"maximum": False, "exclusiveMaximum": True}
_NONE = (-math.inf, False)


class Numbers:
    """Bounds and multiples of numbers."""

    KEYWORDS = frozenset({*_LOWER, *_UPPER, "multipleOf"})

    def __init__(self) -> None:
        # Value, and whether it is excluded; the upper bound is negated, so that the larger one is stricter for both.
        self._low: tuple[float, bool] = _NONE
        self._high: tuple[float, bool] = _NONE
        self._step: Fraction | None = None

    def add(self, place: Place) -> None:
        """Add the keywords of a schema."""
        for keyword, is_exclusive in (_LOWER | _UPPER).items():
            if keyword not in place.schema:
                continue
            source = keyword
            if is_exclusive and isinstance(
                place.schema[keyword], bool
            ):  # draft 4: a note about the inclusive bound
                source = "m" + keyword.removeprefix("exclusiveM")
                if not place.schema[keyword] or source not in place.schema:
                    continue
            value = place.number(source)
            if keyword in _LOWER:
                self._low = max(self._low, (value, is_exclusive))
            else:
                self._high = max(self._high, (-value, is_exclusive))
        if "multipleOf" in place.schema:
            step = Fraction(str(place.number("multipleOf")))
            if step <= 0:
                raise place.refusal("multipleOf", "must be more than 0")
            if self._step not in (None, step):
                raise place.refusal("multipleOf")
            self._step = step

    def allows(self, place: Place, value: float) -> bool:
        """Return whether a value fits. `place` is that of the value."""
        if abs(value) > _LARGEST:
            raise place.refusal(
                "enum" if "enum" in place.schema else "const", "has a number beyond 64 bits"
            )
        low, high = (value, False), (-value, False)
        return (
            low >= self._low
            and high >= self._high
            and not (self._step and Fraction(str(value)) % self._step)
        )

    def write(self, name: str, place: Place) -> Schema:
        """Return the schema of `integer` or `number`. `place` is that of `multipleOf`."""
        if self._step is not None:
            return self._multiples(
                self._step if name == "number" else Fraction(self._step.numerator), place
            )
        if name == "integer":
            return self._integers()
        schema: dict[str, Any] = {"type": name}
        if math.isfinite(self._low[0]):
            schema["exclusiveMinimum" if self._low[1] else "minimum"] = self._low[0]
        if math.isfinite(self._high[0]):
            schema["exclusiveMaximum" if self._high[1] else "maximum"] = -self._high[0]
        is_empty = self._low[0] > -self._high[0] or (
            self._low[0] == -self._high[0] and (self._low[1] or self._high[1])
        )
        return not is_empty and schema

    def _integers(self) -> Schema:
        least, most = _turns(self._low, Fraction(1)), _turns(self._high, Fraction(1))
        schema: dict[str, Any] = {"type": "integer"}
        if least is not None:
            schema["minimum"] = max(least, -_LARGEST)
        if most is not None:
            schema["maximum"] = min(-most, _LARGEST)
        return schema.get("minimum", -_LARGEST) <= schema.get("maximum", _LARGEST) and schema

    def _multiples(self, step: Fraction, place: Place) -> Schema:
        first, last = _turns(self._low, step), _turns(self._high, step)
        if step == 1:
            return self._integers()
        if first is None or last is None:
            if (first, last) != (None, None) or step.denominator > 1 or step > _MAX_MULTIPLE:
                raise place.refusal("multipleOf")
            return {"type": "integer", "multipleOf": int(step)}
        if -last - first >= _MAX_VALUES:
            raise place.refusal("multipleOf")
        place.budget.spend(2 * max(0, 1 - last - first))
        multiples = [turn * step for turn in range(first, -last + 1)]
        values = [int(each) if each.denominator == 1 else float(each) for each in multiples]
        return bool(values) and {"enum": values}


def _turns(bound: tuple[float, bool], step: Fraction) -> int | None:
    """Return the first multiple of a step, in steps, that a lower bound allows. None: there is no bound."""
    if not math.isfinite(bound[0]):
        return None
    exact = Fraction(str(bound[0])) / step
    return math.floor(exact) + 1 if bound[1] else math.ceil(exact)
