"""The cheapest fleet that meets the goals, by as few simulations as it takes. Pure, over a function that tries one.

More nodes of either role are taken to be no worse. Then the fleets that meet the goals have a lower edge, a
staircase in (prefills, decodes), and the cheapest stands on it:

```
 decodes                       1. from the bounds, add what is short, until one meets the goals
   │ ✓ ✓ ✓ ✓ ✓ ✓               2. all cheaper fleets lie below a line of equal cost. Of a stretch of that
   │ ✗ ✓ ✓ ✓ ✓ ✓                  line try the fleet with as many decodes as its one end and as many
   │ ✗ ✗ ✗ ✓ ✓ ✓                  prefills as its other: if even that misses, so does all of the stretch.
   │ ✗ ✗ ✗ ✗ ✗ ✗ ── prefills      Else halve it.
```

Where the assumption does not hold, a cheaper fleet may be missed; what is reported was tried all the same.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol


class Tried(Protocol):
    """What came of a fleet."""

    @property
    def is_met(self) -> bool:
        """Whether it meets the goals."""
        ...

    @property
    def misses_ttft(self) -> bool:
        """Whether the first token is late: prefills are short, as a rule."""
        ...

    @property
    def misses_itl(self) -> bool:
        """Whether later tokens are: decodes are short, as a rule."""
        ...


@dataclass(frozen=True, slots=True, order=True)
class Size:
    """How many nodes of each role."""

    num_prefill: int
    num_decode: int

    @property
    def total(self) -> int:
        """Of both."""
        return self.num_prefill + self.num_decode

    def covers(self, other: "Size") -> bool:
        """Tell whether it has no fewer of either."""
        return self.num_prefill >= other.num_prefill and self.num_decode >= other.num_decode


class TooMany(Exception):
    """As many fleets were tried as may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Where a search looks.

    Attributes:
        least: Below this in either role nothing can do.
        most_nodes: Of a fleet, both roles together.
        prefill_cost, decode_cost: Of a node.
        tolerance: A fleet that is cheaper by no more than this share is not looked for.
    """

    least: Size
    most_nodes: int
    prefill_cost: float = 1.0
    decode_cost: float = 1.0
    tolerance: float = 0.0

    def cost(self, size: Size) -> float:
        """Return what a fleet costs."""
        return size.num_prefill * self.prefill_cost + size.num_decode * self.decode_cost

    def most_prefills(self, num_decode: int, below: float) -> int:
        """Return the most prefills beside so many decodes of a fleet that costs less than `below`."""
        room = self.most_nodes - num_decode
        if math.isinf(below):
            return room
        left = below * (1 - self.tolerance) - num_decode * self.decode_cost
        # The last that is below, and not at it, whatever the rounding.
        count = min(room, math.ceil(left / self.prefill_cost))
        while (
            count > 0 and self.cost(Size(count, num_decode)) >= below * (1 - self.tolerance) - 1e-9
        ):
            count -= 1
        return count


@dataclass(slots=True)
class Search:
    """One search.

    Args:
        space: Where.
        attempt: Tries a fleet.
        most_tries: Fleets at most.
        below: Only a fleet that costs less is looked for.

    Attributes:
        tried: All that was tried, in order.
        best: The cheapest of these that meets the goals; None: none does.
        is_complete: Nothing cheaper is left, by the assumption above. Else tries ended.
    """

    space: Space
    attempt: Callable[[Size], Tried]
    most_tries: int = 200
    below: float = math.inf
    tried: dict[Size, Tried] = field(default_factory=dict)
    best: Size | None = None
    is_complete: bool = False

    def run(self) -> None:
        """Search; whatever ends it, `best` and `tried` hold what was found."""
        try:
            self._grow()
            self._prune()
            self.is_complete = True
        except TooMany:
            self.is_complete = False

    # ── how ──────────────────────────────────────────────────────────────────────────────────────

    def _grow(self) -> None:
        """Find some fleet that meets the goals, by adding what is short; none is no answer yet."""
        size = self.space.least
        while self._is_inside(size):
            tried = self._try(size)
            if tried.is_met:
                self._lower_prefills(size)
                assert self.best is not None
                self._lower_decodes(self.best)
                return
            adds_prefill = tried.misses_ttft or not tried.misses_itl
            size = Size(
                _more(size.num_prefill) if adds_prefill else size.num_prefill,
                _more(size.num_decode) if tried.misses_itl else size.num_decode,
            )

    def _prune(self) -> None:
        """Look through all that is cheaper than the best, until nothing is left."""
        stretches = [
            (self.space.least.num_decode, self.space.most_nodes - self.space.least.num_prefill)
        ]
        while stretches:
            low, high = self._cut(*stretches.pop())
            if low > high:
                continue
            corner = Size(self.space.most_prefills(low, self._below), high)
            if not self._may_meet(corner):
                continue
            if low < high:
                middle = (low + high) // 2
                parts = [(low, middle), (middle + 1, high)]
                # The last is looked at first: that with the best, whose neighbours are the likeliest.
                wanted = self.best.num_decode if self.best is not None else low
                stretches += sorted(parts, key=lambda part: -_distance(wanted, part))
                continue
            if self._try(corner).is_met:
                self._lower_prefills(corner)

    def _cut(self, low: int, high: int) -> tuple[int, int]:
        """Return the part of a stretch in which there is something cheaper than the best."""
        least = self.space.least.num_prefill
        while low <= high and self.space.most_prefills(high, self._below) < least:
            high -= 1
        return low, high

    def _lower_prefills(self, size: Size) -> None:
        """Find the fewest prefills beside so many decodes; this fleet meets the goals."""
        self._first(
            self.space.least.num_prefill,
            size.num_prefill,
            lambda count: Size(count, size.num_decode),
        )

    def _lower_decodes(self, size: Size) -> None:
        """Find the fewest decodes beside so many prefills; this fleet meets the goals."""
        self._first(
            self.space.least.num_decode,
            size.num_decode,
            lambda count: Size(size.num_prefill, count),
        )

    def _first(self, low: int, high: int, size_of: Callable[[int], Size]) -> None:
        """Halve the way to the first number whose fleet meets the goals; that of `high` does."""
        while low < high:
            middle = (low + high) // 2
            if self._may_meet(size_of(middle)) and self._try(size_of(middle)).is_met:
                high = middle
            else:
                low = middle + 1

    def _may_meet(self, size: Size) -> bool:
        """Tell whether a fleet meets the goals, or by what is known must."""
        met = [known for known, tried in self.tried.items() if tried.is_met]
        missed = [known for known, tried in self.tried.items() if not tried.is_met]
        if any(known.covers(size) for known in missed):
            return False
        return any(size.covers(known) for known in met) or self._try(size).is_met

    def _try(self, size: Size) -> Tried:
        if (known := self.tried.get(size)) is not None:
            return known
        if len(self.tried) >= self.most_tries:
            raise TooMany
        tried = self.tried[size] = self.attempt(size)
        if tried.is_met and self._is_inside(size) and self.space.cost(size) < self._below:
            self.best = size
        return tried

    @property
    def _below(self) -> float:
        return self.below if self.best is None else self.space.cost(self.best)

    def _is_inside(self, size: Size) -> bool:
        return size.total <= self.space.most_nodes and self.space.cost(size) < self.below


def _more(count: int) -> int:
    """Return the next number of nodes to try: a quarter more."""
    return max(count + 1, math.ceil(count * 1.25))


def _distance(wanted: int, part: tuple[int, int]) -> int:
    return max(part[0] - wanted, wanted - part[1], 0)
