"""Which requests wait in the queue of one edge worker, and which are rejected.

```
 join ──▶ waiting ──take──▶ starts
   │         ├─ leave: its client went, or its time is over
   │         └─ rejected: the queue is full, and a request came that goes before it
   └─ Overloaded: the queue is full; DeadlinePassed: its client's time is over
```

Pure: every call is given the time. Nothing here predicts how long a request will wait, so no history can
keep a request out of a queue that has room.
"""

import math
from dataclasses import dataclass

from typing_extensions import override

from tandem.router.line import Line, Waiting
from tandem.wire.errors import DeadlinePassed, Overloaded

# The measured time to the first token is halved in so many seconds without a first token: while no request
# begins, none can be seen to begin faster.
BEGIN_HALF_LIFE_S = 5.0
# A request that is started a moment too late has its place for nothing, and so has the next: leave a margin.
BEGIN_MARGIN = 1.25


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one edge worker's queue.

    Attributes:
        max_requests: Queued at once; 0: no request waits.
        max_tokens: Of all their prompts: 36 bytes each of memory.
        max_wait_s: A request that waited so long is rejected. Clients may ask for less.
    """

    # What a node's own line has held.
    max_requests: int = 4096
    # 300 MB.
    max_tokens: int = 8 * 1024 * 1024
    # After which common proxies and balancers give an answer up that has not begun.
    max_wait_s: float = 60.0


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
        return float((self._mean_s + 2 * self._deviation_s) * kept * BEGIN_MARGIN)


class Admission:
    """The queue and its bounds. Times are of any one clock that does not go back."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._line = Line()
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
        """Queue a request; return the one that is rejected for it, if any.

        Raises:
            Overloaded: The queue is full; with when to come back.
            DeadlinePassed: Its client's time is over.
        """
        if waiting.has_deadline and waiting.expires <= now:
            raise self.too_late(waiting, now)
        rejected = self._make_room(waiting, now)
        self._line.add(waiting)
        return rejected

    def take(self) -> Waiting | None:
        """Take the next request out of the queue, to start now; None when none waits."""
        return self._line.take()

    def leave(self, waiting: Waiting) -> bool:
        """Take a request out of the queue that is not to start any more. False if it is not queued."""
        return self._line.remove(waiting)

    def began(self, after_s: float, now: float) -> None:
        """Note how long after its start a request had its first token."""
        self._begin.observe(after_s, now)

    def is_too_late(self, waiting: Waiting, now: float) -> bool:
        """Tell whether a request could not have its first token before its client's time is over."""
        return waiting.has_deadline and now + self._begin.expected_s(now) > waiting.expires

    def retry_after_s(self, now: float) -> int:
        """Return when a rejected client is to come back: as long as the next request has waited."""
        first = next(iter(self._line), None)
        return 1 if first is None else max(1, math.ceil(now - first.arrived))

    def too_late(self, waiting: Waiting, now: float) -> DeadlinePassed | Overloaded:
        """Return the error of a request whose time is over, be it its client's or the queue's."""
        if waiting.has_deadline:
            return DeadlinePassed(
                "the time that the client would wait is over; nothing was started"
            )
        return Overloaded(
            f"nothing became free for {self._limits.max_wait_s:g} s: send it again later",
            self.retry_after_s(now),
        )

    def no_place(self, now: float) -> Overloaded:
        """Return the error of a request for which the queue has no place."""
        return Overloaded(
            f"{len(self._line)} requests are waiting: send it again later", self.retry_after_s(now)
        )

    def _make_room(self, newcomer: Waiting, now: float) -> Waiting | None:
        """Return the request that was rejected so that there is a place.

        Raises:
            Overloaded: No queued request yields to the newcomer.
        """
        num_tokens = self._line.num_tokens + newcomer.num_tokens
        has_place = len(self._line) < self._limits.max_requests
        # One that alone passes the limit may wait alone: it may be as long as the model's context.
        if has_place and (num_tokens <= self._limits.max_tokens or not len(self._line)):
            return None
        least = self._line.least()
        if least is None or not self._line.yields_to(least, newcomer):
            raise self.no_place(now)
        if num_tokens - least.num_tokens > self._limits.max_tokens:
            raise self.no_place(now)
        self._line.remove(least)
        return least
