"""Where a request waits until the nodes have room for it: asyncio around `admission.py`.

```
 admitted ─▶ key's limits ─▶ room, and nobody in line? ─────────────▶ inside ─▶ left
                                 └─▶ line ──a place became free───────┘
                                       └─▶ 429, 504, aborted, client gone
```

Places are counted (`places.py`) when a request comes or leaves or a node changes, and every few milliseconds
while somebody waits. Which nodes a request gets is not decided here.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from typing_extensions import override

from tandem.frontend.backend import Tap
from tandem.router.admission import Admission
from tandem.router.config import AdmissionConfig
from tandem.router.key_limits import KeyUsage, Usage
from tandem.router.line import Waiting
from tandem.router.metrics import RouterMetrics
from tandem.router.places import Places
from tandem.router.policy import ClusterSnapshot, in_use, usable_fingerprint
from tandem.router.visit import Visit, for_nodes
from tandem.wire.errors import DeadlinePassed, TandemError
from tandem.wire.generation import GenerateRequest

# While somebody waits: so long a place may stay free that a prefill's report showed.
LOOK_S = 0.01
# A count holds for this long, since counting takes some microseconds a node: a tenth of the time.
COUNT_S_PER_NODE = 0.000_05


class _Entry:
    """One in line, and the task that waits with it. The future is true when it was let in."""

    def __init__(self, waiting: Waiting) -> None:
        self.waiting = waiting
        self.future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    @property
    def is_let_in(self) -> bool:
        future = self.future
        is_answered = future.done() and not future.cancelled() and future.exception() is None
        return is_answered and future.result()


class Gate:
    """Lets requests in as nodes have room.

    Args:
        snapshot: Returns the nodes as they are now.
    """

    def __init__(
        self,
        snapshot: Callable[[], ClusterSnapshot],
        config: AdmissionConfig,
        metrics: RouterMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._snapshot, self._clock, self._metrics = snapshot, clock, metrics
        self._is_on = config.is_on
        self._admission = Admission(config.limits)
        self._places = Places(config.max_in_flight, config.num_workers)
        self._keys = KeyUsage(config.key_limits)
        self._entries: dict[Waiting, _Entry] = {}
        self._by_id: dict[str, _Entry] = {}
        self._num_inside = 0
        self._num_free = 0
        self._counted_at = -1.0
        self._fresh_s = 0.0
        # Of the model that is served, and of the last one that was.
        self._fingerprint = self._preferred = ""
        self._timer: asyncio.TimerHandle | None = None
        self._is_looking = False

    @override
    def __repr__(self) -> str:
        return f"<Gate {len(self._admission)} waiting, {self._num_inside} inside>"

    @asynccontextmanager
    async def admitted(
        self, request: GenerateRequest, tap: Tap | None = None
    ) -> AsyncIterator[Visit | None]:
        """Wait until a request may start, and hold its place inside the block.

        Yields:
            The visit; None when the request was ended by its id while it waited.

        Raises:
            Overloaded, RateLimited: It may not; with when to come back.
            DeadlinePassed: Its client's time is over.
        """
        arrived = self._clock()
        deadline = None if request.deadline_s is None else arrived + request.deadline_s
        try:
            with self._counted(request, arrived) as usage:
                if not await self._enter(request, arrived, deadline):
                    yield None
                    return
                with self._inside(request, deadline, tap, usage) as visit:
                    yield visit
        finally:
            self._metrics.queued(len(self._admission))

    def abort(self, request_id: str) -> bool:
        """End a request that waits. False if it does not wait here."""
        entry = self._by_id.get(request_id)
        if entry is None or entry.future.done():
            return False
        self._admission.leave(entry.waiting)
        entry.future.set_result(False)
        return True

    @contextmanager
    def _counted(self, request: GenerateRequest, now: float) -> Iterator[Usage | None]:
        """Count what the request's key uses."""
        usage = self._keys.of(request.client, now)
        if usage is None:
            yield None
            return
        with self._refusals():
            usage.begin(len(request.prompt_ids), now)
        try:
            yield usage
        finally:
            usage.end()

    @contextmanager
    def _inside(
        self, request: GenerateRequest, deadline: float | None, tap: Tap | None, usage: Usage | None
    ) -> Iterator[Visit]:
        """Give the place back on leaving, and note what was seen."""
        started = self._clock()
        visit = Visit(
            for_nodes(request, deadline, started),
            tap,
            lambda: self._began(started),
            counts_tokens=usage is not None and usage.counts_tokens,
        )
        try:
            yield visit
        finally:
            if usage is not None:
                usage.answered(visit.num_tokens)
            self._left()

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except TandemError as error:
            self._metrics.refused(error)
            raise

    async def _enter(self, request: GenerateRequest, now: float, deadline: float | None) -> bool:
        """Return when the request may start, and whether it may; it has a place then."""
        with self._refusals():
            if deadline is not None and deadline <= now:
                raise DeadlinePassed("the time that the client would wait was over on arrival")
            if not self._is_on or self._is_open(now):
                self._let_in(now, now)
                return True
            expires = self._admission.expiry(now, deadline)
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
        rejected = self._admission.join(waiting, now)
        if rejected is not None:
            self._refuse(rejected, self._admission.no_place(now))
        entry = self._entries[waiting] = self._by_id[request_id] = _Entry(waiting)
        self._metrics.queued(len(self._admission))
        self._pump()
        is_done = False
        try:
            async with asyncio.timeout(waiting.expires - now):
                is_let_in = await entry.future
            is_done = True
        except TimeoutError:
            raise self._admission.too_late(waiting, self._clock()) from None
        except asyncio.CancelledError:
            self._metrics.cancelled_in_queue()
            raise
        finally:
            del self._entries[waiting]
            if self._by_id.get(request_id) is entry:
                del self._by_id[request_id]
            self._admission.leave(waiting)
            if not is_done and entry.is_let_in:  # as it gave up
                self._left()
        return is_let_in

    def look(self) -> None:
        """Look again soon whether there is room: a node has changed."""
        if len(self._admission) and not self._is_looking:
            self._is_looking = True
            # Not at once: whoever changes a node is in the middle of something.
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        self._is_looking = False
        self._pump()

    def _pump(self) -> None:
        """Let in who waits while there are places; look again soon while somebody waits."""
        now = self._clock()
        num_free = self._free(now)
        while num_free > 0 and (waiting := self._admission.take()) is not None:
            if self._admission.is_too_late(waiting, now):
                self._refuse(waiting, self._admission.too_late(waiting, now))
                continue
            entry = self._entries[waiting]
            if entry.future.done():  # cancelled, and its task has not run since
                continue
            self._let_in(waiting.arrived, now)
            entry.future.set_result(True)
            num_free = self._free(now)
        if len(self._admission) and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(
                max(LOOK_S, self._fresh_s), self._on_timer
            )

    def _on_timer(self) -> None:
        self._timer = None
        self._pump()

    def _refuse(self, waiting: Waiting, error: TandemError) -> None:
        future = self._entries[waiting].future
        if not future.done():
            future.set_exception(error)

    def _let_in(self, arrived: float, now: float) -> None:
        self._num_inside += 1
        self._num_free -= 1
        self._metrics.waited(now - arrived)

    def _left(self) -> None:
        self._num_inside -= 1
        if len(self._admission):
            self._pump()

    def _began(self, started: float) -> None:
        now = self._clock()
        self._admission.began(now - started, now)

    def _is_open(self, now: float) -> bool:
        """Tell whether a newcomer goes in at once; also where none can serve: others say that."""
        has_place = self._free(now) > 0 and not len(self._admission)
        return has_place or not self._fingerprint

    def _free(self, now: float) -> int:
        """Return how many may start now."""
        if now - self._counted_at >= self._fresh_s:
            self._recount(self._snapshot(), now)
        return self._num_free

    def _recount(self, nodes: ClusterSnapshot, now: float) -> None:
        self._counted_at = now
        self._fresh_s = COUNT_S_PER_NODE * (len(nodes.prefills) + len(nodes.decodes))
        served = usable_fingerprint(nodes, preferred=self._preferred) or ""
        self._fingerprint, self._preferred = served, served or self._preferred
        prefills, decodes = in_use(nodes.prefills, served), in_use(nodes.decodes, served)
        # Let in, and not yet, or just not, on a node.
        num_between = self._num_inside - sum(node.in_flight_requests for node in nodes.decodes)
        self._num_free = self._places.count(prefills, decodes, now) - max(0, num_between)
