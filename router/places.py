"""How many requests the nodes have room for, as one edge worker can know it: pure.

```
 what a node reported, a fifth of a second ago     what this worker did since
   free places / edge workers there              -  started there and not ended
```

Edge workers share nothing but what nodes report. Each takes its share of what a load shows free, and no more before the
next one: so all together do not start more than there is room for. Places of its own requests that ended since then it
may use again at once. And each may always have its share of the whole: one that comes late gets it as others' requests
end, since those start none while they have more.
"""

import math
from collections.abc import Iterable

from tandem.router.policy import NodeSnapshot

# Of a prefill's work, in its hands: more than one forward and the time between two loads, so that it never waits for
# the router. Anything beyond would only wait there, and out of order.
PREFILL_LINE_S = 0.5
# Where a prompt takes longer than that: one in work, others ready.
LEAST_LINE = 4
# For a prefill whose pace is not known yet.
FIRST_LINE = 8
# Over which a prefill's pace is taken: more than two loads.
WINDOW_S = 0.5
# Of a decode's requests, that may wait for pages: about as many pages become free soon, as requests end one by one.
DECODE_LINE_SHARE = 8
# In flight at one node that reports no limit of its own.
UNTOLD = 256


class Pace:
    """How many prompts a second a prefill has finished lately while it had some."""

    def __init__(self) -> None:
        self.per_s = 0.0
        self._num_ended, self._at = -1, 0.0
        self._was_busy = False

    def observe(self, num_ended: int, now: float, *, is_busy: bool) -> None:
        """Take a load: how many prompts the node finished in its life, and whether it computes some."""
        past_s = now - self._at
        is_same_life = 0 <= self._num_ended <= num_ended
        if is_same_life and past_s < WINDOW_S:
            return
        # An idle while shows nothing of what the node could do.
        if is_same_life and is_busy and self._was_busy:
            seen = (num_ended - self._num_ended) / past_s
            self.per_s = (self.per_s + seen) / 2 if self.per_s else seen
        self._num_ended, self._at, self._was_busy = num_ended, now, is_busy


class Places:
    """Counts the places of nodes.

    Args:
        max_in_flight: Requests of all edge workers at one node; 0: as many as the node reports.
        num_workers: Edge workers of this router.
    """

    def __init__(self, max_in_flight: int = 0, num_workers: int = 1) -> None:
        self._max_in_flight, self._num_workers = max_in_flight, num_workers
        self._paces: dict[str, Pace] = {}

    def count(
        self, prefills: Iterable[NodeSnapshot], decodes: Iterable[NodeSnapshot], now: float
    ) -> int:
        """Return how many more requests may start now: none where a role has no node."""
        prefills = list(prefills)
        urls = {node.url for node in prefills}
        self._paces = {url: pace for url, pace in self._paces.items() if url in urls}
        at_prefills = sum(
            # A decode that stands in for prefills reports tokens where these report prompts.
            max(0, self.at_decode(node) if node.role == "decode" else self.at_prefill(node, now))
            for node in prefills
        )
        at_decodes = sum(max(0, self.at_decode(node)) for node in decodes)
        return min(at_prefills, at_decodes)

    def at_prefill(self, node: NodeSnapshot, now: float) -> int:
        """Return the places of one prefill: half a second of work, beside what it is pushing."""
        load, pace = node.load, self._paces.setdefault(node.url, Pace())
        pace.observe(load.generated_tokens, now, is_busy=load.num_running > 0)
        line = max(LEAST_LINE, round(pace.per_s * PREFILL_LINE_S)) if pace.per_s else FIRST_LINE
        # Prompts being pushed take none of its time; those that wait for a grant will be pushed soon.
        elsewhere = load.num_transferring + min(line, load.num_waiting)
        return self._share(node, line + elsewhere)

    def at_decode(self, node: NodeSnapshot) -> int:
        """Return the places of one decode: as many as it runs at once and has pages for."""
        load = node.load
        if load.num_waiting > max(1, load.num_running // DECODE_LINE_SHARE):
            return 0  # it lacks pages for the requests it has
        free = self._share(node, load.max_running or UNTOLD)
        return min(free, _num_fitting(node))

    def _share(self, node: NodeSnapshot, limit: int) -> int:
        """Return how many more this edge worker may start at a node that takes `limit` of all."""
        load = node.load
        bound = min(self._max_in_flight or limit, limit)
        num_edges = load.num_edges + (load.num_own == 0) if load.num_edges else self._num_workers
        num_there = load.num_running + load.num_waiting + load.num_transferring
        free = math.ceil((bound - num_there) / num_edges)
        own_share = max(1, bound // num_edges) - node.in_flight_requests
        return max(free - _num_since_load(node), own_share)


def _num_since_load(node: NodeSnapshot) -> int:
    """Return how many more this edge worker has there now than the load counts; may be negative."""
    return node.in_flight_requests - node.load.num_own


def _num_fitting(node: NodeSnapshot) -> int:
    """Return for how many more prompts of the usual size a node has pages."""
    load = node.load
    if not load.page_size:
        return UNTOLD
    mean_tokens = node.in_flight_tokens / max(1, node.in_flight_requests)
    pages_each = math.ceil(mean_tokens / load.page_size) + 1  # the answer's first
    num_fitting = (load.pages_free + load.pages_cached) // pages_each
    return num_fitting - max(0, _num_since_load(node))
