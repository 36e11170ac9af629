"""Admission: the queue of one edge worker, its limits, and the capacity of the nodes.

```
 arrival ─▶ limits of its key ─▶ a place is free and the queue is empty ─▶ started ─▶ finished
                │ 429                 └─▶ queue ──a place becomes free──────┘
                ▼                           └─▶ 429 full or waited too long, 504 deadline, aborted
```

A place is room for one more request at the nodes. The highest priority starts first, and clients with equal priority
take turns. The queue does not predict waiting times from past load: while it has room, it accepts every request.
`pairing.py` later chooses the nodes of a request.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from tandem.router.config import AdmissionConfig, QueueLimits
from tandem.router.key_limits import KeyState, KeyUsage
from tandem.router.metrics import RouterModelMetrics
from tandem.router.nodes.state import ClusterState, RosterEntry, usable_fingerprint
from tandem.wire.errors import DeadlinePassed, Overloaded
from tandem.wire.generation import GenerateRequest

# A count of places is reused for 0.1 ms per node; counting then takes at most 2 % of the time.
COUNT_S_PER_NODE = 0.000_1
# Length of a prefill node's queue, in seconds of its work. It exceeds one forward pass and the interval of load
# reports, so that the node never waits for the router. Requests beyond it would only wait there, out of order.
PREFILL_QUEUE_S = 0.5
# Minimum length of that queue in prompts, for prompts that take longer: one in progress, others ready.
MIN_PREFILL_QUEUE = 4
# Length of the queue in prompts while the node's finish rate is not known.
INITIAL_PREFILL_QUEUE = 8
# Period over which a prefill node's finish rate is measured: more than two load reports.
WINDOW_S = 0.5
# A decode node is full if more than one request per this many running ones waits for pages. Running requests end one
# by one, so pages for about that many become free soon.
DECODE_WAITING_SHARE = 8
# Pages of a request in addition to those that its prompt fills: one partly filled, and one for the answer.
MORE_PAGES = 2
# Limit of requests in flight for a node that reports none.
DEFAULT_MAX_RUNNING = 256


# ── the queue: no I/O and no clock, the caller passes the time ───────────────────────────────────


@dataclass(slots=True, eq=False)
class Waiting:
    """One queued request. Times are seconds of the caller's clock.

    Attributes:
        client: Name of its API key; all requests without a key count as one client.
        num_tokens: Prompt tokens.
        expires_s: When its wait ends.
        has_deadline: Whether its wait ends at the client's own deadline.
    """

    client: str
    priority: int
    num_tokens: int
    arrived_s: float
    expires_s: float
    has_deadline: bool = False


class Queue:
    """The waiting requests, in the order in which they start, within the limits of the queue."""

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        # By priority, then by client in the order of their turns. Dictionaries serve as ordered sets.
        self._waiting: dict[int, dict[str, dict[Waiting, None]]] = {}
        self.num_requests = self.num_tokens = 0

    def __len__(self) -> int:
        return self.num_requests

    @property
    def may_refuse(self) -> bool:
        """Whether it may refuse a new request: requests are waiting, or it has no places."""
        return self.num_requests > 0 or self._limits.max_requests == 0

    def expiry(self, now: float, deadline: float | None) -> float:
        """Return the time until which a request that arrives now may wait."""
        latest = now + self._limits.max_wait_s
        return latest if deadline is None else min(latest, deadline)

    def join(self, waiting: Waiting, now: float) -> Waiting | None:
        """Queue a request; return the request that it displaces, if any.

        Raises:
            Overloaded: The queue is full; carries the time of a retry.
            DeadlinePassed: The client's deadline has passed.
        """
        if waiting.has_deadline and waiting.expires_s <= now:
            raise self.too_late(waiting, now)
        rejected = self.displaced_by(waiting.client, waiting.priority, waiting.num_tokens, now)
        if rejected is not None:
            self.leave(rejected)
        clients = self._waiting.setdefault(waiting.priority, {})
        clients.setdefault(waiting.client, {})[waiting] = None
        self.num_requests += 1
        self.num_tokens += waiting.num_tokens
        return rejected

    def take(self) -> Waiting | None:
        """Remove and return the next request, or None; its client moves behind the others of that priority."""
        first = self._first()
        if first is not None:
            clients = self._waiting[first.priority]
            clients[first.client] = clients.pop(first.client)
            self.leave(first)
        return first

    def leave(self, waiting: Waiting) -> bool:
        """Remove a request from the queue. Return False if it is not queued."""
        clients = self._waiting.get(waiting.priority, {})
        requests = clients.get(waiting.client, {})
        if waiting not in requests:
            return False
        del requests[waiting]
        if not requests:
            del clients[waiting.client]
        if not clients:
            del self._waiting[waiting.priority]
        self.num_requests -= 1
        self.num_tokens -= waiting.num_tokens
        return True

    def retry_after_s(self, now: float) -> int:
        """Return the seconds after which a rejected client should retry: how long the first in the queue has waited."""
        first = self._first()
        return 1 if first is None else max(1, math.ceil(now - first.arrived_s))

    def too_late(self, waiting: Waiting, now: float) -> DeadlinePassed | Overloaded:
        """Return the error of a request that waited too long."""
        if waiting.has_deadline:
            return DeadlinePassed("the deadline passed while the request was queued")
        return Overloaded(
            f"no place became free for {self._limits.max_wait_s:g} s: send the request again later",
            self.retry_after_s(now),
        )

    def queue_full(self, now: float) -> Overloaded:
        """Return the error of a request that the full queue rejects."""
        return Overloaded(
            f"{len(self)} requests are waiting: send the request again later",
            self.retry_after_s(now),
        )

    def _first(self) -> Waiting | None:
        if not self._waiting:
            return None
        requests = next(iter(self._waiting[max(self._waiting)].values()))
        return next(iter(requests))

    def displaced_by(
        self, client: str, priority: int, new_tokens: int, now: float
    ) -> Waiting | None:
        """Return the request that must leave to make room for a new one; None if there is room already.

        The candidate for removal has the lowest priority: it is the newest request of the client with the most
        requests of that priority. It yields to a request with a higher priority, or to a request of a client that
        has fewer requests, the new one included.

        Raises:
            Overloaded: No request yields, or its removal would not make enough room.
        """
        num_tokens = self.num_tokens + new_tokens
        has_place = len(self) < self._limits.max_requests
        # A valid prompt may exceed `max_tokens` by itself, so an empty queue accepts it.
        if has_place and (num_tokens <= self._limits.max_tokens or not self._waiting):
            return None
        lowest = min(self._waiting, default=priority)
        if priority < lowest or not self._waiting:
            raise self.queue_full(now)
        clients = self._waiting[lowest]
        largest = max(reversed(clients.values()), key=len)
        has_more = len(largest) > len(clients.get(client, ())) + 1
        newest = next(reversed(largest))
        yields = priority > lowest or has_more
        if not yields or num_tokens - newest.num_tokens > self._limits.max_tokens:
            raise self.queue_full(now)
        return newest


# ── the nodes' capacity, as one edge worker estimates it: no I/O and no clock ─────────────────────
#
#   the node's last load report, up to 0.2 s old      this worker since that report
#     free places / edge workers at the node        -  requests started there and not ended
#
# A worker starts at most its share of the free places in a load report, and no more until the next report. So all
# workers together do not exceed the room. A worker may reuse the places of its own requests that ended since the
# report. A worker may always fill its share of the limit, even if others hold more: theirs shrink as their requests
# end.


class FinishRate:
    """Prompts per second that a prefill node finished recently while it was busy."""

    def __init__(self) -> None:
        self.per_s = 0.0
        self._num_finished, self._measured_s = -1, 0.0
        self._was_busy = False

    def observe(self, num_finished: int, now: float, *, is_busy: bool) -> None:
        """Take a load report: prompts that the node has finished since its start, and whether it is busy."""
        elapsed_s = now - self._measured_s
        is_same_life = 0 <= self._num_finished <= num_finished
        if is_same_life and elapsed_s < WINDOW_S:
            return
        # The rate of an idle period says nothing about the node's speed.
        if is_same_life and is_busy and self._was_busy:
            measured = (num_finished - self._num_finished) / elapsed_s
            self.per_s = (self.per_s + measured) / 2 if self.per_s else measured
        self._num_finished, self._measured_s, self._was_busy = num_finished, now, is_busy


class Places(msgspec.Struct, frozen=True):
    """Room for more requests.

    Attributes:
        num_requests: Number of requests that may start.
        num_tokens: Tokens that fit into free pages of decode nodes; infinite if one has not reported its pages.
        page_size: Largest page of these nodes, in tokens.
    """

    num_requests: int
    num_tokens: float = math.inf
    page_size: int = 0

    def without(self, num_requests: int, num_tokens: int) -> "Places":
        """Return the places left after more requests with these prompt tokens in total."""
        taken = num_tokens + MORE_PAGES * self.page_size * num_requests
        return Places(self.num_requests - num_requests, self.num_tokens - taken, self.page_size)

    def __bool__(self) -> bool:
        return self.num_requests > 0 and self.num_tokens > 0


class Capacity:
    """Counts the free places of nodes.

    Args:
        max_in_flight: Limit of requests at one node, over all edge workers; 0: the limit that the node reports.
        num_workers: Number of edge workers of this router.
    """

    def __init__(self, max_in_flight: int = 0, num_workers: int = 1) -> None:
        self._max_in_flight, self._num_workers = max_in_flight, num_workers
        self._finish_rates: dict[str, FinishRate] = {}
        # The last count of each node. Of hundreds of nodes, few change between two counts.
        self._counted: dict[str, tuple[tuple[object, ...], int]] = {}

    def count(
        self, prefills: Sequence[RosterEntry], decodes: Sequence[RosterEntry], now: float
    ) -> Places:
        """Return how many more requests may start now; none if a role has no node."""
        counted = self._counted
        if len(counted) > len(prefills) + len(decodes):  # some nodes were removed
            counted.clear()
            urls = {node.url for node in prefills}
            rates = self._finish_rates.items()
            self._finish_rates = {url: rate for url, rate in rates if url in urls}
        num_free, num_tokens, page_size = [], 0.0, 0
        for nodes in (prefills, decodes):
            total = 0
            for node in nodes:
                previous, places = counted.get(node.url, (None, 0))
                basis = node.role, node.load, node.in_flight_requests, node.fresh_tokens
                # Recount a busy prefill node even if its report is unchanged, because its finish rate then falls.
                is_busy = node.load.num_running or node.in_flight_requests
                if previous != basis or (node.role == "prefill" and is_busy):
                    places = max(0, self._at(node, now))
                    counted[node.url] = (basis, places)
                total += places
                if places and nodes is decodes:
                    num_tokens += _room_tokens(node)
                    page_size = max(page_size, node.load.page_size)
            num_free.append(total)
        return Places(min(num_free), num_tokens, page_size)

    def _at(self, node: RosterEntry, now: float) -> int:
        # Use the node's own role. A decode node that replaces a prefill node reports generated tokens, not prompts.
        return self.at_decode(node) if node.role == "decode" else self.at_prefill(node, now)

    def at_prefill(self, node: RosterEntry, now: float) -> int:
        """Return the free places of a prefill node: half a second of work, in addition to running pushes."""
        load, rate = node.load, self._finish_rates.setdefault(node.url, FinishRate())
        rate.observe(load.generated_tokens, now, is_busy=load.num_running > 0)
        measured = max(MIN_PREFILL_QUEUE, round(rate.per_s * PREFILL_QUEUE_S))
        queue = measured if rate.per_s else INITIAL_PREFILL_QUEUE
        # Pushes take no compute time, and prompts that wait for a grant are pushed soon.
        pushing = load.num_transferring + min(queue, load.num_waiting)
        return self._share(node, queue + pushing)

    def at_decode(self, node: RosterEntry) -> int:
        """Return the free places in the batch of a decode node; 0 if it has no free pages."""
        load = node.load
        is_full = load.num_waiting > max(1, load.num_running // DECODE_WAITING_SHARE)
        if is_full or _room_tokens(node) <= 0:
            return 0  # requests wait for pages there, or a new one would
        return self._share(node, load.max_running or DEFAULT_MAX_RUNNING)

    def _share(self, node: RosterEntry, limit: int) -> int:
        """Return how many more requests this edge worker may start at a node that runs at most `limit`."""
        load = node.load
        bound = min(self._max_in_flight or limit, limit)
        num_edges = load.num_edges + (load.num_own == 0) if load.num_edges else self._num_workers
        num_present = load.num_running + load.num_waiting + load.num_transferring
        free = math.ceil((bound - num_present) / num_edges)
        own_share = max(1, bound // num_edges) - node.in_flight_requests
        return max(free - _num_since_load(node), own_share)


def _num_since_load(node: RosterEntry) -> int:
    """Return how many requests of this edge worker the load report does not count yet; may be negative."""
    return node.in_flight_requests - node.load.num_own


def _room_tokens(node: RosterEntry) -> float:
    """Return the tokens that fit into a node's free pages; infinite before its first report."""
    return node.room_tokens - MORE_PAGES * node.load.page_size * max(0, _num_since_load(node))


# ── admission: the asyncio part ──────────────────────────────────────────────────────────────────


class Admitted:
    """A request that has started. It holds a place until its owner calls `end`.

    Attributes:
        request: The request for the nodes: without its client, and with the remaining time as its deadline.
    """

    def __init__(
        self, admission: "Admission", request: GenerateRequest, usage: KeyState | None
    ) -> None:
        self.request = request
        self._admission, self._usage = admission, usage

    def end(self, num_output_tokens: int) -> None:
        """Release the place, and count the tokens of the answer against the limits of the key."""
        self._admission.release(len(self.request.prompt_ids))
        if self._usage is not None:
            self._usage.count_output(num_output_tokens, _now())
            self._usage.finish()


class Admission:
    """Starts requests when the nodes of `state()` have room, within the limits of `keys`.

    Attributes:
        metrics: Metrics of the model.
    """

    def __init__(
        self,
        state: Callable[[], ClusterState],
        config: AdmissionConfig,
        metrics: RouterModelMetrics,
        keys: KeyUsage | None = None,
    ) -> None:
        self._state, self.metrics = state, metrics
        self._is_on = config.is_on
        self._queue = Queue(config.limits)
        self._capacity = Capacity(config.max_in_flight, config.num_workers)
        self._keys = keys or KeyUsage({})
        # Results: True when the request starts, False when it was aborted.
        self._futures: dict[Waiting, asyncio.Future[bool]] = {}
        self._by_id: dict[str, Waiting] = {}
        # Started requests, and their prompt tokens.
        self._num_started = self._started_tokens = 0
        self._places = Places(0)
        self._counted_at_s, self._count_valid_s = -math.inf, 0.0
        # Fingerprints of the model that is served, and of the model that was served last.
        self._fingerprint = self._last_fingerprint = ""
        self._start_timer: asyncio.TimerHandle | None = None

    @property
    def leftovers(self) -> dict[str, int]:
        """Resources held for requests, by name: all zero once every request has ended."""
        return {
            "started": self._num_started,
            "started_tokens": self._started_tokens,
            "queued": len(self._queue),
            "waiting": len(self._futures) + len(self._by_id),
        }

    async def admit(self, request: GenerateRequest) -> Admitted | None:
        """Wait until a request may start. Returns None if it was aborted while it waited.

        Raises:
            Overloaded, RateLimited: It may not start; carries the time of a retry.
            DeadlinePassed: The client's deadline has passed.
        """
        arrived_s = _now()
        deadline = None if request.deadline_s is None else arrived_s + request.deadline_s
        usage, is_started = self._begin(request, arrived_s), False
        try:
            is_started = await self._enter(request, arrived_s, deadline)
        finally:
            if usage is not None and not is_started:
                usage.finish()
        return Admitted(self, _for_nodes(request, deadline), usage) if is_started else None

    def release(self, num_tokens: int) -> None:
        """Release the place of a request with `num_tokens` prompt tokens."""
        self._num_started -= 1
        self._started_tokens -= num_tokens
        self.schedule_start()

    def check(self, client: str, priority: int) -> None:
        """Raise `Overloaded` if a request of this client would find neither a place nor room in the queue."""
        if self._is_on and self._queue.may_refuse and not self._is_open(now := _now()):
            self._queue.displaced_by(client, priority, 1, now)

    def abort(self, request_id: str) -> bool:
        """End a waiting request. Return False if it does not wait here."""
        waiting = self._by_id.get(request_id)
        if waiting is None or self._futures[waiting].done():
            return False
        self._queue.leave(waiting)
        self._futures[waiting].set_result(False)
        return True

    def schedule_start(self) -> None:
        """Start waiting requests soon. Called when a node has changed or a request has ended.

        They start from the event loop, because the caller may be in the middle of a change, and not before
        the last count of places has expired.
        """
        if len(self._queue) and self._start_timer is None:
            delay_s = max(0.0, self._counted_at_s + self._count_valid_s - _now())
            self._start_timer = asyncio.get_running_loop().call_later(delay_s, self._start_waiting)

    def _begin(self, request: GenerateRequest, now: float) -> KeyState | None:
        """Count the request for its key; return None if the key has no limits."""
        usage = self._keys.of(request.client)
        if usage is not None:
            with self.metrics.rejections():
                usage.begin(len(request.prompt_ids), now)
        return usage

    async def _enter(self, request: GenerateRequest, now: float, deadline: float | None) -> bool:
        """Wait for a place. Return False if the request was aborted."""
        is_late = deadline is not None and deadline <= now
        if not is_late and (not self._is_on or self._is_open(now)):
            self._start(now, now, len(request.prompt_ids))
            return True
        with self.metrics.rejections():
            if is_late:
                raise DeadlinePassed("the deadline had passed when the request arrived")
            expires_s = self._queue.expiry(now, deadline)
            waiting = Waiting(
                request.client,
                request.priority,
                len(request.prompt_ids),
                now,
                expires_s,
                has_deadline=expires_s == deadline,
            )
            return await self._wait(request.request_id, waiting, now)

    async def _wait(self, request_id: str, waiting: Waiting, now: float) -> bool:
        rejected = self._queue.join(waiting, now)
        if rejected is not None and not self._futures[rejected].done():
            self._futures[rejected].set_exception(self._queue.queue_full(now))
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._futures[waiting] = future
        self._by_id[request_id] = waiting
        metrics = self.metrics  # which may change meanwhile
        metrics.queued.inc()
        self.schedule_start()
        is_started = False
        try:
            async with asyncio.timeout(waiting.expires_s - now):
                is_started = await future
        except TimeoutError:
            raise self._queue.too_late(waiting, _now()) from None
        except asyncio.CancelledError:
            metrics.requests["cancelled"].inc()
            raise
        finally:
            del self._futures[waiting]
            del self._by_id[request_id]
            self._queue.leave(waiting)
            metrics.queued.dec()
            if not is_started and _has_started(future):  # started and cancelled at the same moment
                self.release(waiting.num_tokens)
        return is_started

    def _start_waiting(self) -> None:
        """Start queued requests while places are free."""
        self._start_timer = None
        now = _now()
        self._recount(now)
        while self._places and (waiting := self._queue.take()) is not None:
            if self._futures[waiting].done():  # cancelled, but its task has not run since
                continue
            self._start(waiting.arrived_s, now, waiting.num_tokens)
            self._futures[waiting].set_result(True)

    def _start(self, arrived_s: float, now: float, num_tokens: int) -> None:
        self._num_started += 1
        self._started_tokens += num_tokens
        self._places = self._places.without(1, num_tokens)
        self.metrics.queue_wait.observe(now - arrived_s)

    def _is_open(self, now: float) -> bool:
        has_place = bool(self.places(now))
        # If no pair can serve, requests start as well: the backend reports that error.
        return (has_place or not self._fingerprint) and not len(self._queue)

    def places(self, now: float) -> Places:
        """Return the room for more requests."""
        if now - self._counted_at_s >= self._count_valid_s:
            self._recount(now)
        return self._places

    def _recount(self, now: float) -> None:
        self._counted_at_s, nodes = now, self._state()
        self._count_valid_s = COUNT_S_PER_NODE * (len(nodes.prefills) + len(nodes.decodes))
        served = usable_fingerprint(nodes, preferred=self._last_fingerprint) or ""
        self._fingerprint, self._last_fingerprint = served, served or self._last_fingerprint
        prefills, decodes = (nodes.in_use(role, served).nodes for role in ("prefill", "decode"))
        # Requests that have started but run on no node at the moment, for example between two attempts.
        num_between = self._num_started - sum(node.in_flight_requests for node in nodes.decodes)
        num_tokens = self._started_tokens - sum(node.in_flight_tokens for node in nodes.decodes)
        places = self._capacity.count(prefills, decodes, now)
        self._places = places.without(max(0, num_between), max(0, num_tokens))


def _now() -> float:
    return asyncio.get_running_loop().time()


def _has_started(future: asyncio.Future[bool]) -> bool:
    has_result = future.done() and not future.cancelled() and future.exception() is None
    return has_result and future.result()


def _for_nodes(request: GenerateRequest, deadline: float | None) -> GenerateRequest:
    """Return the request without its client, and with the remaining time as its deadline."""
    if not request.client and deadline is None:
        return request
    left_s = None if deadline is None else max(0.0, deadline - _now())
    return msgspec.structs.replace(request, client="", deadline_s=left_s)
