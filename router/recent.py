"""The timings of the requests that ended last, for whoever looks."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
from typing_extensions import override

# What a person scrolls through; some 200 KB.
NUM_KEPT = 200


class RecentRequests:
    """A ring of timings, as `X-Tandem-Timings: 1` has them in an answer: numbers, names and URLs, no text.

    Args:
        clock: Unix time.
    """

    def __init__(self, num_kept: int = NUM_KEPT, clock: Callable[[], float] = time.time) -> None:
        self._kept: deque[tuple[float, object]] = deque(maxlen=num_kept)
        self._clock = clock

    @override
    def __repr__(self) -> str:
        return f"<RecentRequests {len(self._kept)} of {self._kept.maxlen}>"

    def request_ended(self, report: object) -> None:
        """Keep the timings of a request, a struct or a dict that is not changed any more."""
        self._kept.append((self._clock(), report))

    def all(self) -> list[dict[str, Any]]:
        """Return what is kept as JSON-like values, the oldest first, each with `ended_unix_s`."""
        return [{**msgspec.to_builtins(report), "ended_unix_s": at} for at, report in self._kept]
