"""Requests that wait and whose clients wait only so long: pure, but for the clock it is given."""

import heapq
import itertools
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from typing_extensions import override

from tandem.wire.errors import DeadlinePassed

T = TypeVar("T")


def not_started() -> DeadlinePassed:
    """Return the error of a request that waited here until its client's time was over."""
    return DeadlinePassed("the time that the client would wait passed before a node could begin")


class Deadlines(Generic[T]):
    """Items by when their time is over. Those that began meanwhile are the caller's to pass over.

    Keeps no item alive: OpenAI's clients wait for 600 s, and few requests take that long.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._numbers = itertools.count()
        self._heap: list[tuple[float, int, weakref.ref[T]]] = []

    @override
    def __repr__(self) -> str:
        return f"Deadlines({len(self._heap)} noted)"

    def note(self, item: T, seconds_left: float | None) -> None:
        """Note when an item's time is over, counted from now; None is never."""
        if seconds_left is not None:
            entry = (self._clock() + seconds_left, next(self._numbers), weakref.ref(item))
            heapq.heappush(self._heap, entry)

    def passed(self) -> Iterator[T]:
        """Yield, once, each item that is still there and whose time is over."""
        while self._heap and self._heap[0][0] <= self._clock():
            item = heapq.heappop(self._heap)[2]()
            if item is not None:
                yield item
