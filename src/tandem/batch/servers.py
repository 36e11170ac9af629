"""The servers, and which of them gets the next request: the least busy one that is there and has room."""

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Callable, Sequence

from typing_extensions import override

from tandem.batch.pace import Pace

FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0
# What a server may ask for with Retry-After: more is a mistake, or another day's business.
MAX_RETRY_AFTER_S = 300.0
# In a row: one is the request's fault, three are the server's. It would else take everything, for nobody
# is less busy than who fails at once.
NUM_FAILURES = 3


class BatchStopped(Exception):
    """Nothing more can be sent; what was done stays done."""


class Stopping(Exception):
    """Whoever waits for a place or a pause is to wait no longer."""


class KeyRefused(BatchStopped):
    """A server wants another API key."""


class ServersAway(BatchStopped):
    """No server has answered for too long."""


def pause_s(attempt: int, chance: random.Random) -> float:
    """Return how long to wait after a failure: doubling, and anywhere in the upper half of that.

    Args:
        attempt: 1 for the first failure in a row.
    """
    most_s: float = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** min(attempt, 16))
    return most_s * (0.5 + 0.5 * chance.random())


class Server:
    """One server, as far as it is known here.

    Attributes:
        url: Without a slash at its end.
        in_flight: Our requests there.
        peak: The most of them since it was last taken.
        problem: Why it is not used now; empty: it is.
    """

    def __init__(self, url: str, pace: Pace, clock: Callable[[], float]) -> None:
        self.url, self.pace, self._clock = url, pace, clock
        self.in_flight = self.peak = 0
        self.problem = ""
        self.open_at = 0.0
        self._num_shut = self._num_failed = 0

    @override
    def __repr__(self) -> str:
        return f"Server({self.url}, {self.in_flight} of {self.pace.limit}, {self.problem or 'up'})"

    @property
    def has_room(self) -> bool:
        """Whether it may be given a request now."""
        return self.in_flight < self.pace.limit and not self.is_shut

    @property
    def is_shut(self) -> bool:
        """Whether it is left alone for a while."""
        return self._clock() < self.open_at

    @property
    def busyness(self) -> float:
        """What it has by what it should have."""
        return self.in_flight / self.pace.limit

    def hear(self) -> None:
        """It answered."""
        self._num_shut, self._num_failed, self.problem = 0, 0, ""

    def fail(self, chance: random.Random) -> None:
        """It ended a request with an error that may be its own."""
        self._num_failed += 1
        if self._num_failed >= NUM_FAILURES:
            self.pace.refuse(self.in_flight)
            self._shut(0.0, chance)
            self.problem = "fails"

    def refuse(self, retry_after_s: float, chance: random.Random) -> None:
        """It has no room now.

        Args:
            retry_after_s: As it said; 0: it did not.
        """
        self.pace.refuse(self.in_flight)
        self._shut(min(retry_after_s, MAX_RETRY_AFTER_S), chance)
        self.problem = "has no room"

    def lose(self, reason: str, chance: random.Random) -> None:
        """It cannot be reached."""
        self.pace.lose()
        self._shut(0.0, chance)
        self.problem = reason

    def _shut(self, least_s: float, chance: random.Random) -> None:
        now_s = self._clock()
        if not self.is_shut:  # what was under way fails beside the first: one event
            self._num_shut += 1
            self.open_at = now_s + pause_s(self._num_shut, chance)
        self.open_at = max(self.open_at, now_s + least_s)

    def take_peak(self) -> int:
        """Return the most requests under way since this was last called."""
        peak, self.peak = self.peak, self.in_flight
        return peak


class Servers:
    """Gives out places at servers, first to who tries again.

    Args:
        most: Requests at all servers together.
    """

    def __init__(self, servers: Sequence[Server], most: int, chance: random.Random) -> None:
        self.all = list(servers)
        self._most, self._chance = most, chance
        # Equal ones in an order of this process's own: several commands do not fill one server first.
        chance.shuffle(self.all)
        self._waiting: deque[asyncio.Future[Server]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._is_stopping = asyncio.Event()

    @property
    def in_flight(self) -> int:
        """Requests at all of them."""
        return sum(server.in_flight for server in self.all)

    async def take(self, *, is_first: bool) -> Server:
        """Wait for a place, and take it; `give_back` is to follow.

        Args:
            is_first: Before all others who wait.

        Raises:
            Stopping: There are no places any more.
        """
        if self._is_stopping.is_set():
            raise Stopping
        place: asyncio.Future[Server] = asyncio.get_running_loop().create_future()
        (self._waiting.appendleft if is_first else self._waiting.append)(place)
        self.wake()
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self.give_back(place.result())
            raise

    def give_back(self, server: Server) -> None:
        """End a request's place."""
        server.in_flight -= 1
        self.wake()

    def wake(self) -> None:
        """Give out what there is; to be called when there may be more room than before."""
        while self._waiting and self.in_flight < self._most:
            if self._waiting[0].done():  # it was cancelled
                self._waiting.popleft()
                continue
            open_ones = [server for server in self.all if server.has_room]
            if not open_ones:
                self._wake_later()
                return
            server = min(open_ones, key=lambda each: each.busyness)
            server.in_flight += 1
            server.peak = max(server.peak, server.in_flight)
            self._waiting.popleft().set_result(server)

    def _wake_later(self) -> None:
        """Wake again when the first server that is left alone is not any more."""
        if self._timer is not None:
            self._timer.cancel()
        shut = [server.open_at for server in self.all if server.is_shut]
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(min(shut), self.wake) if shut else None

    async def pause(self, seconds: float) -> None:
        """Wait.

        Raises:
            Stopping: There is nothing to wait for any more.
        """
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_stopping.wait(), seconds)
            raise Stopping

    def stop(self) -> None:
        """Give out no more places."""
        self._is_stopping.set()
        for place in self._waiting:
            if not place.done():
                place.set_exception(Stopping())
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
