"""One tier as the stack calls it: on threads of its own, each call within a deadline, behind a breaker.

```
 call ─▶ queued ─▶ begun on a thread ─▶ answered
            │            └─ deadline ─▶ given up: the late answer is discarded, its memory freed only then
            └─ deadline ─▶ dropped: the thread skips it

 breaker: UP ──failure──▶ DOWN, for twice as long as the last time ──a probe is answered──▶ UP
```

All methods but `state`, `can_write` and `has_room` belong to the stack's asyncio loop.
"""

import asyncio
import operator
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from random import random
from typing import Any, Generic, TypeVar

from tandem.wire.prefixes import PageKey
from typing_extensions import override

from tandem.kvtier.cost import CostMeter
from tandem.kvtier.memory import PageRun
from tandem.kvtier.tier import Loan, Tier, TierFailed
from tandem.telemetry.log import get_logger

log = get_logger("kvtier.stack")

T = TypeVar("T")
Spawn = Callable[[Coroutine[Any, Any, None]], None]

# A store that hangs in one call may answer another.
NUM_READERS = 2
# A tier that takes this long to keep `MAX_CALL_BYTES` is slower than computing them again.
PUT_LIMIT_S = 5.0
# The most pages that one call carries: what comes late is at most this.
MAX_CALL_BYTES = 16 << 20
# Until the tier's speed is known.
FIRST_CALL_BYTES = 2 << 20
# A call should take this fraction of the time limit, so that little is lost when the time is up.
_CALLS_PER_TIMEOUT = 16
BREAKER_FIRST_S = 0.5
# Requests go on without the tier: a long wait only delays noticing that it is back.
BREAKER_MAX_S = 30.0


class Call(Generic[T]):
    """Work for a thread, whose result is awaited on the loop.

    Args:
        work: Made on the thread.
        undo: Called once, on any thread, unless the result was delivered: with the late result, or None.

    Attributes:
        begun_s: When a thread began it; None: it waits in the queue.
        result: Set on the loop.
    """

    def __init__(self, work: Callable[[], T], undo: Callable[[T | None], None]) -> None:
        self._work, self._undo = work, undo
        self._loop = asyncio.get_running_loop()
        self.result: asyncio.Future[T] = self._loop.create_future()
        self.begun_s: float | None = None
        self.is_given_up = False

    def make(self) -> None:
        """Do the work on this thread."""
        value: T | None = None
        error: TierFailed | None = None
        if not self.is_given_up:
            self.begun_s = time.monotonic()
            try:
                value = self._work()
            except TierFailed as failure:
                error = failure
            # Also what is no Exception: clients written in Rust panic with a BaseException.
            except BaseException as failure:  # noqa: BLE001
                error = TierFailed(repr(failure))
        try:
            self._loop.call_soon_threadsafe(self._finish, value, error)
        except RuntimeError:  # the loop is closed: the stack is gone
            self._discard(value)

    def _finish(self, value: T | None, error: TierFailed | None) -> None:
        if self.is_given_up or self.result.done():
            self._discard(value)
            self.result.cancel()
        elif error is not None:
            self._discard(None)
            self.result.set_exception(error)
        else:
            self.result.set_result(value)  # type: ignore[arg-type]  # T may be None itself

    def _discard(self, value: T | None) -> None:
        try:
            self._undo(value)
        except BaseException:
            log.exception("kv_tier.loan_failed")


class Threads:
    """Daemon threads that make calls, in order: one that hangs must not keep the process alive."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._calls = queue.SimpleQueue[Call[Any] | None]()
        self._is_stopped = False
        self._threads = [
            threading.Thread(target=self._run, name=name, daemon=True) for _ in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Call[Any]) -> None:
        """Queue a call; after `stop` it is never made."""
        self._calls.put(call)

    def stop(self) -> None:
        """Begin no more calls."""
        self._is_stopped = True
        for _ in self._threads:
            self._calls.put(None)

    def join(self, until_s: float | None = None) -> None:
        """Wait for calls that were begun, at most until `time.monotonic()` is that."""
        for thread in self._threads:
            thread.join(None if until_s is None else max(0.0, until_s - time.monotonic()))

    def _run(self) -> None:
        while (call := self._calls.get()) is not None and not self._is_stopped:
            call.make()


class Breaker:
    """Stops calls after a failure, each time for twice as long.

    Args:
        jitter: Returns numbers from 0 to 1, so that the nodes of a cluster do not come back together.

    Attributes:
        until_s: When a call may be tried again; of use while it is not `is_up`.
    """

    def __init__(self, jitter: Callable[[], float] = random) -> None:
        self._jitter, self._num_failures = jitter, 0
        self.is_up, self.until_s = True, 0.0

    def failed(self, now_s: float) -> None:
        """Note a failure. Calls that were under way at the time of a failure do not count again."""
        if not self.is_up and now_s < self.until_s:
            return
        # A tier that fails soon after it came back has not recovered.
        if self.is_up and now_s - self.until_s > BREAKER_MAX_S:
            self._num_failures = 0
        self._num_failures += 1
        delay_s = min(BREAKER_MAX_S, BREAKER_FIRST_S * 2 ** (min(self._num_failures, 16) - 1))
        self.until_s = now_s + delay_s * (0.5 + 0.5 * self._jitter())
        self.is_up = False

    def allows(self, now_s: float) -> bool:
        """Return whether a call may be made, if only as a probe."""
        return self.is_up or now_s >= self.until_s


@dataclass(slots=True)
class TierCounts:
    """In pages and calls, since the start of the process."""

    hit_pages: int = 0
    missed_pages: int = 0
    late_pages: int = 0
    put_pages: int = 0
    got_pages: int = 0
    num_failures: int = 0


class GuardedTier:
    """A tier that harms no request, whatever it does.

    Args:
        timeout_s: How long a request waits for all tiers together.
        max_put_pages: How many pages may wait to be put: a slow tier leaves memory to the others.
        spawn: Runs a coroutine as a task of the stack.
    """

    def __init__(
        self,
        tier: Tier,
        page_bytes: int,
        *,
        timeout_s: float,
        max_put_pages: int,
        spawn: Spawn,
    ) -> None:
        self.tier, self.name, self.lends_own_memory = tier, tier.name, tier.lends_own_memory
        self.counts, self.meter = TierCounts(), CostMeter()
        self.num_put_pages = 0
        self._reads, self._writes = Breaker(), Breaker()
        self._page_bytes, self._timeout_s, self._spawn = page_bytes, timeout_s, spawn
        self._max_put_pages = max_put_pages
        self._given_up: set[Call[Any]] = set()
        self._put_line = asyncio.Lock()
        self._readers = Threads(f"kv-tier-{tier.name}", NUM_READERS)
        self._putter = Threads(f"kv-tier-{tier.name}-put", 1)

    @override
    def __repr__(self) -> str:
        return f"<GuardedTier {self.name} {self.state or 'up'}, {self.num_put_pages} pages to put>"

    @property
    def state(self) -> str:
        """As in `TierLoad.state`; empty: the tier's own state counts."""
        if not self._reads.is_up:
            return "backing_off"
        return "" if self._writes.is_up else "full"  # reads go on

    @property
    def can_read(self) -> bool:
        """Whether a request may ask it."""
        return self._reads.is_up

    @property
    def can_write(self) -> bool:
        """Whether pages may be put. After a failure the first put is the probe."""
        is_hanging = any(not call.result.done() for call in list(self._given_up))
        return not is_hanging and self._writes.allows(time.monotonic())

    @property
    def has_room(self) -> bool:
        """Whether the tier keeps up with what it is given."""
        return self.num_put_pages <= self._max_put_pages

    def call_pages(self) -> int:
        """Return how many pages to ask for in one call."""
        if (page_s := self.meter.page_s) is None:
            num_bytes = FIRST_CALL_BYTES
        else:
            seconds = self._timeout_s / _CALLS_PER_TIMEOUT
            num_bytes = int(min(MAX_CALL_BYTES, seconds / max(page_s, 1e-9) * self._page_bytes))
        return max(1, num_bytes // self._page_bytes)

    async def has(self, keys: Sequence[PageKey], deadline_s: float) -> int:
        """Return how many leading pages the tier claims to have.

        Raises:
            TierFailed: It failed, or hangs.
            TimeoutError: The time is up.
        """

        def work() -> tuple[int, float]:
            begin_s = time.monotonic()
            num_there = operator.index(self.tier.has(keys))
            return min(max(0, num_there), len(keys)), time.monotonic() - begin_s

        num_there, duration_s = await self._read(work, lambda _: None, keys, deadline_s)
        self.meter.looked(duration_s)
        return num_there

    async def get(
        self, keys: Sequence[PageKey], deadline_s: float, end: Callable[[int], None]
    ) -> PageRun:
        """Return the leading pages that the tier lends; there may be none.

        Args:
            end: Called with numbers of pages, `len(keys)` in all, when their memory is not in use any more.

        Raises:
            TierFailed, TimeoutError: As with `has`. The memory stays in use until the call ends.
        """

        def work() -> tuple[Loan, list[memoryview], float]:
            begin_s = time.monotonic()
            loan = self.tier.get(keys)
            return loan, _checked(loan, len(keys), self._page_bytes), time.monotonic() - begin_s

        def undo(answer: tuple[Loan, list[memoryview], float] | None) -> None:
            try:
                if answer is not None:
                    answer[0].close()
            finally:
                end(len(keys))

        loan, pages, duration_s = await self._read(work, undo, keys, deadline_s)
        self.meter.got(len(pages), duration_s)
        self.counts.got_pages += len(pages)
        end(len(keys) - len(pages))
        return PageRun(keys[: len(pages)], pages, loan, partial(end, len(pages)))

    def queue_put(self, run: PageRun) -> None:
        """Have pages put, if the tier takes some and keeps up; the run is held until then."""
        if self.can_write and self.has_room:
            run.hold()
            self.num_put_pages += len(run.keys)
            self._spawn(self._put(run))

    def stop(self) -> None:
        """Begin no more calls."""
        self._readers.stop()
        self._putter.stop()

    def join(self, until_s: float) -> None:
        """Wait for calls that were begun, until `time.monotonic()` is that."""
        self._readers.join(until_s)
        self._putter.join(until_s)

    async def _put(self, run: PageRun) -> None:
        def work() -> int:
            num_new = operator.index(self.tier.put(run.keys, run.pages))
            return min(max(0, num_new), len(run.keys))

        def undo(_: int | None) -> None:
            self.num_put_pages -= len(run.keys)
            run.release()

        async with self._put_line:
            if not self.can_write:
                undo(None)
                return
            try:
                deadline_s = time.monotonic() + PUT_LIMIT_S
                num_new = await self._call(self._putter, work, undo, deadline_s, PUT_LIMIT_S / 2)
            except (TierFailed, TimeoutError) as error:
                self._fail(self._writes, "kv_tier.put_failed", error)
                return
        self._worked(self._writes)
        self.counts.put_pages += num_new
        undo(None)

    async def _read(
        self,
        work: Callable[[], T],
        undo: Callable[[T | None], None],
        keys: Sequence[PageKey],
        deadline_s: float,
    ) -> T:
        try:
            return await self._call(self._readers, work, undo, deadline_s, self._timeout_s / 2)
        except TierFailed as error:
            was_up = self._reads.is_up
            self._fail(self._reads, "kv_tier.failed", error)
            if was_up:
                self._spawn(self._probe(keys[:1]))
            raise

    async def _probe(self, keys: Sequence[PageKey]) -> None:
        """Ask a tier that failed until it answers, so that no request has to try it."""
        while not self._reads.is_up:
            await asyncio.sleep(self._reads.until_s - time.monotonic())
            try:
                deadline_s = time.monotonic() + self._timeout_s
                await self._call(
                    self._readers, lambda: self.tier.has(keys), lambda _: None, deadline_s, 0.0
                )
                self._worked(self._reads)
            except (TierFailed, TimeoutError) as error:
                self._fail(self._reads, "", error)

    async def _call(
        self,
        threads: Threads,
        work: Callable[[], T],
        undo: Callable[[T | None], None],
        deadline_s: float,
        hung_s: float,
    ) -> T:
        """Make one call.

        Raises:
            TierFailed: It raised, or was under way, or in the queue, for `hung_s` when the time was up.
            TimeoutError: The time is up.
        """
        call, submitted_s = Call(work, undo), time.monotonic()
        threads.submit(call)
        try:
            await asyncio.wait([call.result], timeout=max(0.0, deadline_s - time.monotonic()))
        finally:
            call.is_given_up = not call.result.done()
        if not call.is_given_up:
            return call.result.result()
        self._given_up = {each for each in self._given_up if not each.result.done()} | {call}
        took_s = time.monotonic() - (submitted_s if call.begun_s is None else call.begun_s)
        if took_s < hung_s:
            raise TimeoutError
        raise TierFailed(f"no answer in {took_s:.3g} s")

    def _worked(self, breaker: Breaker) -> None:
        if not breaker.is_up:
            breaker.is_up = True
            log.info("kv_tier.up", tier=self.name)

    def _fail(self, breaker: Breaker, event: str, error: TierFailed | TimeoutError) -> None:
        self.counts.num_failures += 1
        if event and (breaker.is_up or breaker.allows(time.monotonic())):
            reason = error.message if isinstance(error, TierFailed) else "it is too busy"
            log.warning(event, tier=self.name, reason=reason)
        breaker.failed(time.monotonic())


def _checked(loan: Loan, num_asked: int, page_bytes: int) -> list[memoryview]:
    """Return what a tier lends, at most as much as was asked for.

    Raises:
        TierFailed: A page of it has another length.
    """
    try:
        pages = list(loan.pages)[:num_asked]
        wrong = [page.nbytes for page in pages if page.nbytes != page_bytes]
    except BaseException:
        loan.close()
        raise
    if wrong:
        loan.close()
        raise TierFailed(f"it gave a page of {wrong[0]} bytes instead of {page_bytes}")
    return pages
