"""Isolates one tier: its own threads, a deadline for each `get`, and a circuit breaker.

```
 get ─▶ queued ─▶ running on a thread ─▶ answered
           │            └─ deadline ─▶ cancelled: the late answer is discarded, and only then its memory freed
           └─ deadline ─▶ cancelled: the thread skips it
 put ─▶ queued, unless too many pages wait ─▶ run without a deadline

 breaker: UP ──failure──▶ DOWN, each time twice as long ──successful probe──▶ UP
```
"""

import asyncio
import operator
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from random import random
from typing import Any, TypeVar, cast

from tandem.kvtier.memory import Loan
from tandem.kvtier.tier import Tier, TierFailed
from tandem.telemetry.log import get_logger
from tandem.wire.prefixes import PageKey

log = get_logger("kvtier.stack")

T = TypeVar("T")

# Concurrent gets of one tier: a store that hangs in one call may still answer others.
NUM_READERS = 8
# When this fraction of the timeout is left before the deadline, a tier must return the pages that it has read.
_RETURN_SHARE = 1 / 16
# A put that takes longer counts as hanging: the tier gets no further pages meanwhile.
PUT_LIMIT_S = 5.0
BREAKER_FIRST_S = 0.5
# Requests continue without the tier, so a long pause only delays its return.
BREAKER_MAX_S = 30.0
# Weight of the newest sample in an exponential moving average.
_WEIGHT = 0.2


@dataclass(frozen=True, slots=True)
class TierCost:
    """Recent costs of a tier.

    Attributes:
        latency_s: Time of a miss.
        page_s: Time per page of a hit.
        num_pages: Number of measured pages; 0: no measurement yet.
    """

    latency_s: float = 0.0
    page_s: float = 0.0
    num_pages: int = 0

    def seconds(self, num_pages: int) -> float:
        """Return the expected time for that many pages."""
        return self.latency_s + self.page_s * num_pages


class Mean:
    """An exponential moving average; 0 before the first sample."""

    def __init__(self) -> None:
        self.value, self.num_samples = 0.0, 0

    def add(self, sample: float) -> None:
        """Add a sample."""
        self.value += (_WEIGHT if self.num_samples else 1.0) * (sample - self.value)
        self.num_samples += 1


class Workers:
    """A thread pool of daemon threads: a hanging call must not keep the process alive."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._queue = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]()
        self._is_stopped = False
        self._threads = [
            threading.Thread(target=self._run, name=name, daemon=True) for _ in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Queue a call; any exception becomes a `TierFailed`. `stop` cancels calls still in the queue."""
        future = Future[T]()
        self._queue.put((future, work))
        return future

    def stop(self) -> None:
        """Start no further calls."""
        self._is_stopped = True
        for _ in self._threads:
            self._queue.put(None)

    def join(self, until_s: float | None = None) -> None:
        """Wait for running calls, at most until this time of `time.monotonic()`."""
        for thread in self._threads:
            thread.join(None if until_s is None else max(0.0, until_s - time.monotonic()))

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            future, work = job
            if self._is_stopped:
                future.cancel()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except TierFailed as error:
                future.set_exception(error)
            # BaseException too: client libraries written in Rust panic with one.
            except BaseException as error:  # noqa: BLE001
                future.set_exception(TierFailed(repr(error)))


class Breaker:
    """A circuit breaker: pauses calls after a failure, each time twice as long, with jitter.

    Attributes:
        until_s: While not `is_up`, the time from which a probe is allowed.
    """

    def __init__(self) -> None:
        self._num_failures = 0
        self.is_up, self.until_s = True, 0.0

    def record_failure(self, now_s: float) -> None:
        """Record a failure. It does not count if the call was already running when the breaker opened."""
        if not self.allows(now_s):
            return
        # A tier that fails again soon after its recovery keeps its long pauses.
        if self.is_up and now_s - self.until_s > BREAKER_MAX_S:
            self._num_failures = 0
        self._num_failures += 1
        delay_s = min(BREAKER_MAX_S, BREAKER_FIRST_S * 2 ** (min(self._num_failures, 16) - 1))
        self.until_s = now_s + delay_s * (0.5 + 0.5 * random())
        self.is_up = False

    def allows(self, now_s: float) -> bool:
        """Whether a call is allowed, possibly as a probe."""
        return self.is_up or now_s >= self.until_s


@dataclass(slots=True)
class TierCounts:
    """Counters since the start of the process, in pages and calls."""

    hit_pages: int = 0
    missed_pages: int = 0
    late_pages: int = 0
    put_pages: int = 0
    got_pages: int = 0
    num_failures: int = 0


class GuardedTier:
    """A tier whose failures do not fail requests.

    Only the stack's event loop may call `get`; any thread may call the other methods.

    Args:
        timeout_s: Time limit of a fetch over all tiers.
        max_put_pages: Limit of pages queued for put, so that a slow tier leaves memory for other tiers.
        spawn: Runs a coroutine as a task of the stack.
    """

    def __init__(
        self,
        tier: Tier,
        page_bytes: int,
        *,
        timeout_s: float,
        max_put_pages: int,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self.tier, self.name, self.lends_own_memory = tier, tier.name, tier.lends_own_memory
        self.counts, self._latency, self._page = TierCounts(), Mean(), Mean()
        self._page_bytes, self._timeout_s, self._spawn = page_bytes, timeout_s, spawn
        self._max_put_pages, self._num_put_pages = max_put_pages, 0
        self._put_began_s: float | None = None
        self._lock = threading.Lock()
        self._reads, self._writes = Breaker(), Breaker()
        self._readers = Workers(f"kv-tier-{tier.name}", NUM_READERS)
        self._putter = Workers(f"kv-tier-{tier.name}-put", 1)

    @property
    def state(self) -> str:
        """A value of `TierLoad.state`; empty: use the tier's own state."""
        if not self._reads.is_up:
            return "backing_off"
        return "full" if not self._writes.is_up or self._is_put_hanging() else ""

    @property
    def can_read(self) -> bool:
        """Whether fetches may use the tier."""
        return self._reads.is_up

    @property
    def can_write(self) -> bool:
        """Whether the tier accepts pages and keeps up. After a failure, the first put is the probe."""
        has_room = self._num_put_pages <= self._max_put_pages
        return has_room and not self._is_put_hanging() and self._writes.allows(time.monotonic())

    def cost(self, place_page_s: float) -> TierCost:
        """Return the tier's costs, with `place_page_s` per page for the copy into the pool."""
        num_pages = self.counts.got_pages
        page_s = self._page.value + place_page_s if num_pages else 0.0
        return TierCost(self._latency.value, page_s, num_pages)

    async def get(
        self, keys: Sequence[PageKey], deadline_s: float, free: Callable[[int], object]
    ) -> Loan:
        """Return the leading pages that the tier lends by the deadline, possibly none.

        Args:
            free: Called with the number of pages whose memory has become free; the numbers add up to `len(keys)`.

        Raises:
            TierFailed: The tier failed or hangs.
            TimeoutError: The deadline passed.
        """
        try:
            loan = await self._get(keys, deadline_s, free)
        except (TierFailed, TimeoutError) as error:
            if time.monotonic() >= deadline_s:
                self.counts.late_pages += len(keys)
            if isinstance(error, TierFailed):
                was_up = self._reads.is_up
                self._fail(self._reads, "kv_tier.failed", error)
                if was_up:
                    self._spawn(self._probe(keys[:1]))
            raise
        self.counts.got_pages += len(loan.pages)
        if time.monotonic() < self._return_by(deadline_s):
            self.counts.missed_pages += len(keys) - len(loan.pages)
        else:
            self.counts.late_pages += len(keys) - len(loan.pages)
        return loan

    def queue_put(self, keys: Sequence[PageKey], loan: Loan) -> None:
        """Queue pages to be put, if the tier accepts pages and keeps up. The queue holds the loan."""
        if not self.can_write:
            return
        with self._lock:
            num_pages = self._num_put_pages + len(keys)
            if self._num_put_pages and num_pages > self._max_put_pages:
                return
            self._num_put_pages = num_pages
        loan.hold()
        put = self._putter.submit(lambda: self._put(keys, loan))
        put.add_done_callback(lambda _: self._end_put(len(keys), loan))

    def _end_put(self, num_pages: int, loan: Loan) -> None:
        with self._lock:
            self._num_put_pages -= num_pages
        loan.release()

    def stop(self) -> None:
        """Start no further calls."""
        self._readers.stop()
        self._putter.stop()

    def join(self, until_s: float) -> None:
        """Wait for running calls, at most until this time of `time.monotonic()`."""
        self._readers.join(until_s)
        self._putter.join(until_s)

    async def _get(
        self, keys: Sequence[PageKey], deadline_s: float, free: Callable[[int], object]
    ) -> Loan:
        def work() -> Loan:
            num_lent, begin_s = 0, time.monotonic()
            try:
                loan = self._checked(self.tier.get(keys, self._return_by(deadline_s)), len(keys))
                num_lent = len(loan.pages)
                duration_s = time.monotonic() - begin_s
                if num_lent:
                    self._page.add(duration_s / num_lent)
                else:
                    self._latency.add(duration_s)
            finally:
                free(len(keys) - num_lent)

            def end() -> None:
                try:
                    loan.release()
                finally:
                    free(num_lent)

            return Loan(loan.pages, end)

        begin_s = time.monotonic()
        call = self._readers.submit(work)
        answer = asyncio.wrap_future(call)
        try:
            await asyncio.wait([answer], timeout=max(0.0, deadline_s - begin_s))
        finally:
            if not answer.done():
                answer.cancel()
                if not call.cancel():
                    call.add_done_callback(_discard)
            if call.cancelled():
                free(len(keys))
        duration_s = time.monotonic() - begin_s
        error = TierFailed(f"no answer in {duration_s:.3g} s")
        if not answer.cancelled():
            if (failure := answer.exception()) is None:
                return answer.result()
            error = cast(TierFailed, failure)
        # Slower tiers are called late in a fetch. One that had little time left has timed out, but has not failed.
        is_called_late = duration_s < self._timeout_s / 2
        if is_called_late and begin_s + duration_s >= self._return_by(deadline_s):
            raise TimeoutError
        raise error

    def _checked(self, loan: Loan, num_requested: int) -> Loan:
        """Return the loan without surplus pages; raise `TierFailed` for a page of the wrong size."""
        pages = list(loan.pages)[:num_requested]
        wrong = [page.nbytes for page in pages if page.nbytes != self._page_bytes]
        if wrong:
            loan.release()
            raise TierFailed(
                f"it returned a page of {wrong[0]} bytes instead of {self._page_bytes}"
            )
        return Loan(pages, loan.release)

    def _put(self, keys: Sequence[PageKey], loan: Loan) -> None:
        self._put_began_s = time.monotonic()
        try:
            if self._writes.allows(self._put_began_s):
                num_new = operator.index(self.tier.put(keys, loan.pages))
                self.counts.put_pages += min(max(0, num_new), len(keys))
                self._succeed(self._writes)
        except BaseException as error:  # noqa: BLE001  # as in `Workers`
            failure = error if isinstance(error, TierFailed) else TierFailed(repr(error))
            self._fail(self._writes, "kv_tier.put_failed", failure)
        finally:
            self._put_began_s = None

    def _is_put_hanging(self) -> bool:
        began_s = self._put_began_s
        return began_s is not None and time.monotonic() - began_s > PUT_LIMIT_S

    def _return_by(self, deadline_s: float) -> float:
        return deadline_s - _RETURN_SHARE * self._timeout_s

    async def _probe(self, keys: Sequence[PageKey]) -> None:
        """Probe a failed tier until it answers, so that no request has to do it."""
        while not self._reads.is_up:
            await asyncio.sleep(self._reads.until_s - time.monotonic())
            deadline_s = time.monotonic() + self._timeout_s
            try:
                (await self._get(keys, deadline_s, lambda _: None)).release()
            except (TierFailed, TimeoutError) as error:
                self._fail(self._reads, "", error)
            else:
                self._succeed(self._reads)

    def _succeed(self, breaker: Breaker) -> None:
        if not breaker.is_up:
            breaker.is_up = True
            log.info("kv_tier.up", tier=self.name)

    def _fail(self, breaker: Breaker, event: str, error: TierFailed | TimeoutError) -> None:
        self.counts.num_failures += 1
        if event and breaker.allows(time.monotonic()):
            log.warning(event, tier=self.name, reason=str(error))
        breaker.record_failure(time.monotonic())


def _discard(late: Future[Loan]) -> None:
    if late.exception() is None:
        late.result().release()
