"""How values are spread, counted where a token or a step may cost next to nothing.

`prometheus_client` takes a lock and 2 µs for each value. What is counted here is told to it when somebody
looks: by a node's engine process in one message, by an edge a few times a second.
"""

from bisect import bisect_left
from collections.abc import Sequence

import msgspec
from typing_extensions import override


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """A histogram at one moment.

    Attributes:
        bounds: Upper ends of the buckets, rising; each end belongs to its bucket.
        counts: Values in each bucket, and behind the last end. One more than `bounds`.
        total: Sum of all values.
    """

    bounds: list[float]
    counts: list[int]
    total: float


class Histogram:
    """Counts values by bucket. One thread observes; any may look.

    Args:
        bounds: See `Spread`.
    """

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = list(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, or the same value several times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    def spread(self) -> Spread:
        """Return what was counted so far."""
        return Spread(bounds=self._bounds, counts=self._counts.copy(), total=self._total)

    def take(self) -> Spread:
        """Return what was counted since this was last called. For the thread that observes."""
        spread = self.spread()
        self._counts, self._total = [0] * len(self._counts), 0.0
        return spread

    @override
    def __repr__(self) -> str:
        return f"Histogram({sum(self._counts)} values, total {self._total:g})"
