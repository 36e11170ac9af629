"""Histograms for code that runs for each token or step.

`prometheus_client` takes a lock and 2 µs per value. A node's engine process exports these counts in one
message per scrape; an edge worker exports its counts a few times a second.
"""

from bisect import bisect_left
from collections.abc import Sequence

import msgspec
from typing_extensions import override


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of a histogram.

    Attributes:
        bounds: Upper bounds of the buckets, ascending and inclusive.
        counts: Values per bucket, then values above the last bound: one more entry than `bounds`.
        total: Sum of all values.
    """

    bounds: list[float]
    counts: list[int]
    total: float


class Histogram:
    """Counts values by bucket. Only one thread may call `observe`; any thread may call `spread`.

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
        """Return the counts so far."""
        return Spread(bounds=self._bounds, counts=self._counts.copy(), total=self._total)

    def take(self) -> Spread:
        """Return the counts since the last call, and reset. Call it only on the thread that observes."""
        spread = self.spread()
        self._counts, self._total = [0] * len(self._counts), 0.0
        return spread

    @override
    def __repr__(self) -> str:
        return f"Histogram({sum(self._counts)} values, total {self._total:g})"
