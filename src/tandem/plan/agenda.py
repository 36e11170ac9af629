"""Virtual time: what happens when, and a clock for each node. Nothing sleeps.

A node's pass runs in one go at the time it begins, and its clock runs ahead of the agenda to where the pass
ends. What comes to the node meanwhile is read by its next pass, as a node's loop reads its inbox.
"""

import heapq
import itertools
from collections.abc import Callable

from tandem.engine.simulated import Clock


class Agenda:
    """What is to happen, by time.

    Attributes:
        now: When the event under way happens.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, bool, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, at_s: float, act: Callable[[], None], *, is_pass: bool = False) -> None:
        """Have `act` called at a time that is not past.

        Args:
            is_pass: A node's pass: of what happens at the same time it is the last, so that it knows of it.
        """
        heapq.heappush(self._events, (at_s, is_pass, next(self._numbers), act))

    def run(self, until_s: float, is_done: Callable[[], bool] = lambda: False) -> None:
        """Let everything happen that is due before or at a time, or until all is done."""
        while self._events and self._events[0][0] <= until_s and not is_done():
            self.now, _, _, act = heapq.heappop(self._events)
            act()


class NodeClock:
    """The time at one node: of the agenda, or ahead of it within a pass."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def clock(self) -> Clock:
        """Return it as a launcher wants it."""
        return Clock(self.now, self.sleep)

    def now(self) -> float:
        """Return seconds since the beginning."""
        return self.now_s

    def sleep(self, seconds: float) -> None:
        """Let so much time pass."""
        self.now_s += seconds
