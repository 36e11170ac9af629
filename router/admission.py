"""Who may start now, who waits and who is told to come back: pure, given the time with each call.

```
 join ──▶ waiting ──take──▶ starts
   │         ├─ leave: its client went, or its time is over
   │         └─ sent away: the line is full, and one came that goes before it
   └─ Overloaded: the line is full, or the wait would be too long; DeadlinePassed: it is too late
```

How long a request would wait is what those before it have taken lately, each. Waiting for nodes is
not counted as such a time: the line is served as fast as nodes end what they have.
"""

import math
from dataclasses import dataclass

from typing_extensions import override

from router.line import Line, Waiting
from wire.errors import DeadlinePassed, Overloaded

# Of what was observed, a half is forgotten in this time: longer than most answers take, and short
# enough that a minute after a change the old is gone.
HALF_LIFE_S = 20.0
# How slowly requests began is forgotten sooner: while none begins, nobody can be seen to be faster.
BEGIN_HALF_LIFE_S = 5.0
# An hour: who would have to wait longer had better ask a person.
MAX_RETRY_AFTER_S = 3600
# An expected wait is a mean: who waits and then is too late had better been told at once.
CAUTION = 1.25


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one edge worker's line.

    Attributes:
        max_requests: In line at once; 0: nobody waits.
        max_tokens: Of all their prompts: 36 bytes each of memory.
        max_wait_s: Who would wait longer is refused. Clients may ask for less.
    """

    # What a node's own line has held.
    max_requests: int = 4096
    # 300 MB.
    max_tokens: int = 8 * 1024 * 1024
    # After which common proxies and balancers give an answer up that has not begun.
    max_wait_s: float = 60.0


@dataclass(frozen=True, slots=True)
class LineState:
    """What one can see of a line.

    Attributes:
        wait_s: What a newcomer of priority 0 would wait.
    """

    num_waiting: int
    num_tokens: int
    wait_s: float


class Pace:
    """How long the line takes for each request, seen while somebody waited."""

    def __init__(self) -> None:
        self._seconds = self._taken = self._at = 0.0

    @property
    def seconds_each(self) -> float:
        """Until one was taken, as long as the first has waited: at least so long it is."""
        return self._seconds / (self._taken or 1.0)

    def pass_time(self, now: float, *, is_busy: bool) -> None:
        """Note that time has passed since it was last called, in which somebody waited or not."""
        if is_busy:
            past_s = max(0.0, now - self._at)
            kept = 0.5 ** (past_s / HALF_LIFE_S) if self._taken else 1.0
            self._seconds = (self._seconds + past_s) * kept
            self._taken *= kept
        self._at = now

    def took(self) -> None:
        """Note that one was taken."""
        self._taken += 1


class Begin:
    """How long requests take from their start to their first token, most of them.

    Source: the mean and the mean deviation of Jacobson, Congestion avoidance and control, 1988.
    """

    def __init__(self) -> None:
        self._mean_s = self._deviation_s = self._at = 0.0

    def observe(self, after_s: float, now: float) -> None:
        """Take one that began."""
        error_s = after_s - self._mean_s
        self._mean_s += error_s / 8
        self._deviation_s += (abs(error_s) - self._deviation_s) / 4
        self._at = now

    def expected_s(self, now: float) -> float:
        """Return in which time one that starts now should have begun."""
        kept = 0.5 ** ((now - self._at) / BEGIN_HALF_LIFE_S)
        return float((self._mean_s + 2 * self._deviation_s) * kept)


class Admission:
    """The line and what is known of its pace. Times are of any one clock that does not go back."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._line = Line()
        self._pace = Pace()
        self._begin = Begin()

    def __len__(self) -> int:
        return len(self._line)

    @override
    def __repr__(self) -> str:
        return f"Admission({self._line!r})"

    def expiry(self, now: float, deadline: float | None) -> float:
        """Return until when a request that comes now may wait."""
        latest = now + self._limits.max_wait_s
        return latest if deadline is None else min(latest, deadline)

    def join(self, waiting: Waiting, now: float) -> Waiting | None:
        """Put a request in line; return the one that is sent away for it, if any.

        Raises:
            Overloaded: There is no place, or it would wait for too long; with when to come back.
            DeadlinePassed: Its client's time is over.
        """
        self._pass_time(now)
        left_s = waiting.expires - now
        if waiting.has_deadline and left_s <= 0:
            raise self.too_late(waiting)
        wait_s = self.wait_s(waiting.priority, waiting.client)
        if waiting.has_deadline:
            wait_s = wait_s * CAUTION + self._begin.expected_s(now)
        if wait_s > left_s:
            raise Overloaded(
                f"the request would wait about {wait_s:.1f} s and may wait {max(0.0, left_s):.1f} s: "
                "send it again later",
                self.retry_after_s(waiting),
            )
        sent_away = self._make_room(waiting)
        self._line.add(waiting)
        return sent_away

    def take(self, now: float) -> Waiting | None:
        """Take the next one out of line, to start now; None when nobody waits."""
        self._pass_time(now)
        waiting = self._line.take()
        # Who is too late takes no place, so the next one is not as far behind as it seemed.
        if waiting is not None and not self.is_too_late(waiting, now):
            self._pace.took()
        return waiting

    def leave(self, waiting: Waiting, now: float) -> bool:
        """Take a request out of line that does not want to start any more. False if it is not in line."""
        self._pass_time(now)
        return self._line.remove(waiting)

    def began(self, after_s: float, now: float) -> None:
        """Note how long after its start a request had its first token."""
        self._begin.observe(after_s, now)

    def is_too_late(self, waiting: Waiting, now: float) -> bool:
        """Tell whether a request could not have its first token before its client's time is over."""
        return waiting.has_deadline and now + self._begin.expected_s(now) > waiting.expires

    def wait_s(self, priority: int, client: str) -> float:
        """Return how long a request that comes now is expected to wait in line."""
        num_before = self._line.num_before(priority, client)
        return (num_before + 1) * self._pace.seconds_each

    def retry_after_s(self, waiting: Waiting) -> int:
        """Return when to come back: when those who would go before it are expected to be gone."""
        wait_s = self.wait_s(waiting.priority, waiting.client)
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(wait_s)))

    def too_late(self, waiting: Waiting) -> DeadlinePassed | Overloaded:
        """Return the error of a request whose time is over, be it its client's or the line's."""
        if waiting.has_deadline:
            return DeadlinePassed(
                "the time that the client would wait is over; nothing was started"
            )
        return Overloaded(
            f"nothing became free for {self._limits.max_wait_s:g} s: send it again later",
            self.retry_after_s(waiting),
        )

    def no_place(self, waiting: Waiting) -> Overloaded:
        """Return the error of a request for which there is no place in line."""
        return Overloaded(
            f"{len(self._line)} requests are waiting: send it again later",
            self.retry_after_s(waiting),
        )

    def state(self, now: float) -> LineState:
        """Return what one can see of the line."""
        self._pass_time(now)
        return LineState(len(self._line), self._line.num_tokens, self.wait_s(0, ""))

    def _make_room(self, newcomer: Waiting) -> Waiting | None:
        """Return who was sent away so that there is a place.

        Raises:
            Overloaded: Nobody in line yields to the newcomer.
        """
        num_tokens = self._line.num_tokens + newcomer.num_tokens
        has_place = len(self._line) < self._limits.max_requests
        # One that alone passes the limit may wait alone: it may be as long as the model's context.
        if has_place and (num_tokens <= self._limits.max_tokens or not len(self._line)):
            return None
        least = self._line.least()
        if least is None or not self._line.yields_to(least, newcomer):
            raise self.no_place(newcomer)
        if num_tokens - least.num_tokens > self._limits.max_tokens:
            raise self.no_place(newcomer)
        self._line.remove(least)
        return least

    def _pass_time(self, now: float) -> None:
        self._pace.pass_time(now, is_busy=len(self._line) > 0)
