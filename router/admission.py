"""Which requests start now and which wait: the queue of one edge worker, its bounds, and the nodes' capacity.

```
 admitted ─▶ limits of its key ─▶ a place is free, and no request waits? ─▶ started ─▶ left
                │ 429                 └─▶ queue ──a place becomes free──────┘
                ▼                           └─▶ 429 full or waited too long, 504 deadline, aborted
```

The highest priority goes first, and clients of one priority take turns. Nothing here
predicts how long a request will wait, so no history keeps a request out of a queue that has room. Which nodes a
request gets is decided later, by `pairing.py`.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec

from tandem.router.config import AdmissionConfig, Limits
from tandem.router.key_limits import KeyUsage, Usage
from tandem.router.metrics import RouterMetrics
from tandem.router.policy import ClusterSnapshot, NodeSnapshot, usable_fingerprint
from tandem.wire.errors import DeadlinePassed, Overloaded
from tandem.wire.generation import GenerateRequest

# A count of places is used for this long: counting takes some microseconds a node, so at most a fiftieth of the time.
COUNT_S_PER_NODE = 0.000_1
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


# ── the queue: pure, every call is given the time ────────────────────────────────────────────────


@dataclass(slots=True, eq=False)
class Waiting:
    """One queued request, with times of the caller's clock.

    Attributes:
        client: Its API key's name; requests without a key are one client's.
        num_tokens: Of its prompt.
        has_deadline: Whether the client asked for the end of its wait.
    """

    client: str
    priority: int
    num_tokens: int
    arrived: float
    expires: float
    has_deadline: bool = False


class Queue:
    """Requests in the order in which they start, and the bounds of the queue."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        # By priority, then by client in the order of their turns.
        self._lines: dict[int, dict[str, dict[Waiting, None]]] = {}
        self.num_requests = self.num_tokens = 0

    def __len__(self) -> int:
        return self.num_requests

    def expiry(self, now: float, deadline: float | None) -> float:
        """Return until when a request that comes now may wait."""
        latest = now + self._limits.max_wait_s
        return latest if deadline is None else min(latest, deadline)

    def join(self, waiting: Waiting, now: float) -> Waiting | None:
        """Queue a request; return the request that is rejected for it, if any.

        Raises:
            Overloaded: The queue is full; with when to come back.
            DeadlinePassed: Its client's deadline has passed.
        """
        if waiting.has_deadline and waiting.expires <= now:
            raise self.too_late(waiting, now)
        rejected = self._make_room(waiting, now)
        line = self._lines.setdefault(waiting.priority, {})
        line.setdefault(waiting.client, {})[waiting] = None
        self.num_requests += 1
        self.num_tokens += waiting.num_tokens
        return rejected

    def take(self) -> Waiting | None:
        """Take the next request out of the queue; None when it is empty. Its client's next turn is the last."""
        first = self._first()
        if first is not None:
            line = self._lines[first.priority]
            line[first.client] = line.pop(first.client)
            self.leave(first)
        return first

    def leave(self, waiting: Waiting) -> bool:
        """Take a request out that is not to start any more. False if it is not queued."""
        line = self._lines.get(waiting.priority, {})
        requests = line.get(waiting.client, {})
        if waiting not in requests:
            return False
        del requests[waiting]
        if not requests:
            del line[waiting.client]
        if not line:
            del self._lines[waiting.priority]
        self.num_requests -= 1
        self.num_tokens -= waiting.num_tokens
        return True

    def retry_after_s(self, now: float) -> int:
        """Return when a rejected client is to come back: as long as the next request has waited."""
        first = self._first()
        return 1 if first is None else max(1, math.ceil(now - first.arrived))

    def too_late(self, waiting: Waiting, now: float) -> DeadlinePassed | Overloaded:
        """Return the error of a request whose wait is over."""
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
            f"{len(self)} requests are waiting: send it again later", self.retry_after_s(now)
        )

    def _first(self) -> Waiting | None:
        if not self._lines:
            return None
        requests = next(iter(self._lines[max(self._lines)].values()))
        return next(iter(requests))

    def _make_room(self, waiting: Waiting, now: float) -> Waiting | None:
        """Remove and return the request that yields to a newcomer; None when no request has to.

        The newest request of the client with most yields, in the lowest priority: to a higher priority, or
        to a client that still has fewer afterwards.

        Raises:
            Overloaded: None yields, or that would not make room.
        """
        num_tokens = self.num_tokens + waiting.num_tokens
        has_place = len(self) < self._limits.max_requests
        # A prompt that alone exceeds the limit may wait alone: it may be as long as the model's context.
        if has_place and (num_tokens <= self._limits.max_tokens or not self._lines):
            return None
        lowest = min(self._lines, default=waiting.priority)
        if waiting.priority < lowest or not self._lines:
            raise self.no_place(now)
        line = self._lines[lowest]
        most = max(reversed(line.values()), key=len)
        has_more = len(most) > len(line.get(waiting.client, ())) + 1
        last = next(reversed(most))
        yields = waiting.priority > lowest or has_more
        if not yields or num_tokens - last.num_tokens > self._limits.max_tokens:
            raise self.no_place(now)
        self.leave(last)
        return last


# ── the nodes' capacity, as one edge worker can know it: pure ─────────────────────────────────────
#
#   what a node reported, a fifth of a second ago     what this worker did since
#     free places / edge workers there              -  started there and not ended
#
# Each worker takes its share of what a load shows free, and no more before the next one: so all together do not start
# more than there is room for. Places of its own requests that ended since then it may use again at once. And each may
# always have its share of the whole: one that comes late gets it as others' requests end.


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
        # Of hundreds of nodes few have changed since the last count.
        self._counted: dict[str, tuple[NodeSnapshot, int]] = {}

    def count(
        self, prefills: Sequence[NodeSnapshot], decodes: Sequence[NodeSnapshot], now: float
    ) -> int:
        """Return how many more requests may start now: none where a role has no node."""
        counted = self._counted
        if len(counted) > len(prefills) + len(decodes):  # some have gone
            counted.clear()
            urls = {node.url for node in prefills}
            self._paces = {url: pace for url, pace in self._paces.items() if url in urls}
        num_free = []
        for nodes in (prefills, decodes):
            total = 0
            for node in nodes:
                seen, places = counted.get(node.url, (None, 0))
                # How fast a prefill is shows as well where it reports nothing new.
                if seen is not node or (node.role == "prefill" and node.load.num_running):
                    places = max(0, self._at(node, now))
                    counted[node.url] = (node, places)
                total += places
            num_free.append(total)
        return min(num_free)

    def _at(self, node: NodeSnapshot, now: float) -> int:
        # A decode that stands in for prefills reports tokens where these report prompts.
        return self.at_decode(node) if node.role == "decode" else self.at_prefill(node, now)

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


# ── around it: asyncio ───────────────────────────────────────────────────────────────────────────


class Admitted:
    """A request that was started and holds a place.

    Attributes:
        request: As nodes may see it: without its client, with the time that is left.
    """

    def __init__(self, request: GenerateRequest, usage: Usage | None) -> None:
        self.request, self._usage = request, usage

    def answered(self, num_tokens: int) -> None:
        """Count the tokens of its answer for its key."""
        if self._usage is not None:
            self._usage.answered(num_tokens)


class Admission:
    """Starts requests as the nodes in `snapshot()` have room."""

    def __init__(
        self,
        snapshot: Callable[[], ClusterSnapshot],
        config: AdmissionConfig,
        metrics: RouterMetrics,
    ) -> None:
        self._snapshot, self._metrics = snapshot, metrics
        self._is_on = config.is_on
        self._queue = Queue(config.limits)
        self._places = Places(config.max_in_flight, config.num_workers)
        self._keys = KeyUsage(config.key_limits)
        # True once it starts, False when it was aborted.
        self._futures: dict[Waiting, asyncio.Future[bool]] = {}
        self._by_id: dict[str, Waiting] = {}
        self._num_started = self._num_free = 0
        self._counted_at, self._holds_s = -math.inf, 0.0
        # Of the model that is served, and of the last one that was.
        self._fingerprint = self._preferred = ""
        self._looking: asyncio.TimerHandle | None = None

    @property
    def leftovers(self) -> dict[str, int]:
        """What is held for requests now, by name: all zero once every request has ended."""
        return {
            "started": self._num_started,
            "queued": len(self._queue),
            "waiting": len(self._futures) + len(self._by_id),
        }

    @asynccontextmanager
    async def admitted(self, request: GenerateRequest) -> AsyncIterator[Admitted | None]:
        """Wait until a request may start, and hold its place inside the block.

        Yields:
            None when the request was aborted while it waited.

        Raises:
            Overloaded, RateLimited: It may not start; with when to come back.
            DeadlinePassed: Its client's deadline has passed.
        """
        arrived = _now()
        deadline = None if request.deadline_s is None else arrived + request.deadline_s
        usage = self._begin(request, arrived)
        try:
            if not await self._enter(request, arrived, deadline):
                yield None
                return
            try:
                yield Admitted(_for_nodes(request, deadline), usage)
            finally:
                self._left()
        finally:
            if usage is not None:
                usage.end()

    def abort(self, request_id: str) -> bool:
        """End a request that waits. False if it does not wait here."""
        waiting = self._by_id.get(request_id)
        if waiting is None or self._futures[waiting].done():
            return False
        self._queue.leave(waiting)
        self._futures[waiting].set_result(False)
        return True

    def look(self) -> None:
        """Start waiting requests soon: a node has changed, or a request has left.

        Not at once: whoever changes a node is in the middle of something. And not before the last count of
        places is too old to be used.
        """
        if len(self._queue) and self._looking is None:
            delay_s = max(0.0, self._counted_at + self._holds_s - _now())
            self._looking = asyncio.get_running_loop().call_later(delay_s, self._start_waiting)

    def _begin(self, request: GenerateRequest, now: float) -> Usage | None:
        """Count what the request's key uses; None: nothing limits it."""
        usage = self._keys.of(request.client, now)
        if usage is not None:
            with self._metrics.rejections():
                usage.begin(len(request.prompt_ids), now)
        return usage

    async def _enter(self, request: GenerateRequest, now: float, deadline: float | None) -> bool:
        """Wait for a place; return whether the request has one: False when it was aborted."""
        is_late = deadline is not None and deadline <= now
        if not is_late and (not self._is_on or self._is_open(now)):
            self._start(now, now)
            return True
        with self._metrics.rejections():
            if is_late:
                raise DeadlinePassed("the time that the client would wait was over on arrival")
            expires = self._queue.expiry(now, deadline)
            waiting = Waiting(
                request.client,
                request.priority,
                len(request.prompt_ids),
                now,
                expires,
                has_deadline=expires == deadline,
            )
            return await self._wait(request.request_id, waiting, now)

    async def _wait(self, request_id: str, waiting: Waiting, now: float) -> bool:
        rejected = self._queue.join(waiting, now)
        if rejected is not None and not self._futures[rejected].done():
            self._futures[rejected].set_exception(self._queue.no_place(now))
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._futures[waiting] = future
        self._by_id[request_id] = waiting
        self._metrics.queued.set(len(self._queue))
        self.look()
        is_started = False
        try:
            async with asyncio.timeout(waiting.expires - now):
                is_started = await future
        except TimeoutError:
            raise self._queue.too_late(waiting, _now()) from None
        except asyncio.CancelledError:
            self._metrics.requests.labels("cancelled").inc()
            raise
        finally:
            del self._futures[waiting]
            if self._by_id.get(request_id) is waiting:
                del self._by_id[request_id]
            self._queue.leave(waiting)
            self._metrics.queued.set(len(self._queue))
            if not is_started and _has_started(future):  # it gave up at the same moment
                self._left()
        return is_started

    def _start_waiting(self) -> None:
        """Start requests of the queue while places are free."""
        self._looking = None
        now = _now()
        self._recount(now)
        while self._num_free > 0 and (waiting := self._queue.take()) is not None:
            if self._futures[waiting].done():  # cancelled, and its task has not run since
                continue
            self._start(waiting.arrived, now)
            self._futures[waiting].set_result(True)

    def _start(self, arrived: float, now: float) -> None:
        self._num_started += 1
        self._num_free -= 1
        self._metrics.queue_wait.observe(now - arrived)

    def _left(self) -> None:
        self._num_started -= 1
        self.look()

    def _is_open(self, now: float) -> bool:
        has_place = self.num_free(now) > 0
        # Where no pair can serve, a request starts too: its backend reports that.
        return (has_place or not self._fingerprint) and not len(self._queue)

    def num_free(self, now: float) -> int:
        """Return how many requests may start now."""
        if now - self._counted_at >= self._holds_s:
            self._recount(now)
        return self._num_free

    def _recount(self, now: float) -> None:
        self._counted_at, nodes = now, self._snapshot()
        self._holds_s = COUNT_S_PER_NODE * (len(nodes.prefills) + len(nodes.decodes))
        served = usable_fingerprint(nodes, preferred=self._preferred) or ""
        self._fingerprint, self._preferred = served, served or self._preferred
        prefills, decodes = (nodes.in_use(role, served).nodes for role in ("prefill", "decode"))
        # Started, and not yet, or no longer, on a node: between two attempts too.
        num_between = self._num_started - sum(node.in_flight_requests for node in nodes.decodes)
        self._num_free = self._places.count(prefills, decodes, now) - max(0, num_between)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _has_started(future: asyncio.Future[bool]) -> bool:
    is_answered = future.done() and not future.cancelled() and future.exception() is None
    return is_answered and future.result()


def _for_nodes(request: GenerateRequest, deadline: float | None) -> GenerateRequest:
    """Return a request without what nodes are not told, and with the time that is left."""
    if not request.client and deadline is None:
        return request
    left_s = None if deadline is None else max(0.0, deadline - _now())
    return msgspec.structs.replace(request, client="", deadline_s=left_s)
