"""A node's tiers as one store, which is searched and filled without blocking the caller.

```
 engine's loop ── fetch, cancel ──▶ the stack's asyncio loop ──▶ threads of each tier (`guard`)
               ── place, save ────▶ one copying thread per direction ───┘
               ◀── events, from these threads

 fetch ─▶ searching ── no tier left, all found, or timeout ─▶ found ──place──▶ placing ─▶ done
              └─ cancel ─▶ done                                 └─ cancel ─▶ done
 save  ─▶ copy from the pool, piece by piece ─▶ Saved; each piece is put into each tier
```

A fetch is one task. Piece by piece, it reserves memory for missing pages and gets them from a tier. The tier returns
what it has by the deadline. Fetches wait in a queue if no memory is free.
"""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tandem.kvtier.guard import GuardedTier, Mean, TierCost, Workers
from tandem.kvtier.memory import Loan, MemoryBudget, PageMemory
from tandem.kvtier.tier import PoolPages, Tier, TierFailed
from tandem.telemetry.log import get_logger
from tandem.wire.messages import TierLoad
from tandem.wire.prefixes import PageKey, PrefixJournal

log = get_logger("kvtier.stack")

# Time that `close` waits for calls in progress, and again for tiers to close.
CLOSE_S = 1.0
# Maximum size of a put, and of a get into the stack's own memory.
MAX_PUT_BYTES = 16 << 20
# Interval of polling for memory that other calls release.
_MEMORY_POLL_S = 0.002


@dataclass(frozen=True, slots=True)
class Fetched:
    """The leading `num_pages` are in host memory until `place` or `cancel`; `by_tier`: pages by source."""

    number: int
    num_pages: int
    by_tier: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Placed:
    """The copy started by `place` is done. If not `is_complete`, it failed: the pages must not be read."""

    number: int
    is_complete: bool


@dataclass(frozen=True, slots=True)
class Saved:
    """`save` no longer reads the pool's pages, whether or not a tier stored them."""

    number: int


TierEvent = Fetched | Placed | Saved


@dataclass(slots=True, eq=False)
class _StackFetch:
    """One fetch. The stack's loop owns the loans until `place`, then the copying thread does."""

    number: int
    keys: Sequence[PageKey]
    deadline_s: float
    is_found: bool = False
    is_placing: bool = False
    loans: list[tuple[GuardedTier, Loan]] = field(default_factory=list)

    @property
    def num_pages(self) -> int:
        """Number of pages in host memory."""
        return sum(len(loan.pages) for _, loan in self.loans)

    def by_tier(self, num_pages: int) -> Mapping[GuardedTier, int]:
        """Return how many of the leading pages each tier supplied."""
        counts = Counter[GuardedTier]()
        for tier, loan in self.loans:
            count = min(num_pages - counts.total(), len(loan.pages))
            if count:
                counts[tier] += count
        return counts

    def release(self) -> None:
        """Release the loans; puts that still use the memory hold their own."""
        loans, self.loans = self.loans, []
        for _, loan in loans:
            loan.release()


class TierStack:
    """The tiers behind one pool, fastest first.

    Only the engine loop's thread may call it. Only `close` blocks.

    Args:
        tiers: Tiers, fastest first; the stack closes them.
        pages: The pool's pages.
        report: Called with each event on a thread of the stack; must not block.
        timeout_s: Time limit of a fetch, which then ends with the pages found so far.
        max_staged_bytes: Host memory for pages in transit, half for each direction.
            Loans of a tier's own memory (`host`) do not count.
        page_size: Tokens per page, to report loads in tokens.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        pages: PoolPages,
        report: Callable[[TierEvent], None],
        *,
        timeout_s: float,
        max_staged_bytes: int,
        page_size: int,
    ) -> None:
        self._pages, self._report, self._page_size = pages, report, page_size
        self._timeout_s = timeout_s
        limit_pages = max(1, max_staged_bytes // 2 // pages.page_bytes)
        self._fetch_budget, self._save_budget = MemoryBudget(limit_pages), MemoryBudget(limit_pages)
        self._num_together = max(1, MAX_PUT_BYTES // pages.page_bytes)
        self._memory = PageMemory(pages.host_memory, pages.page_bytes)
        self._fetches: dict[int, _StackFetch] = {}
        self._place_page_s = Mean()
        self._is_closed = False
        self._guards = [
            GuardedTier(
                tier,
                pages.page_bytes,
                timeout_s=timeout_s,
                # If all tiers but one hang, there is still memory for the puts of that one.
                max_put_pages=limit_pages // (len(tiers) + 1),
                spawn=self._spawn,
            )
            for tier in tiers
        ]
        self._reader, self._writer = Workers("kv-tiers-read", 1), Workers("kv-tiers-write", 1)
        started = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._run(started)), name="kv-tiers", daemon=True
        )
        self._thread.start()
        started.wait()

    @property
    def max_save_pages(self) -> int:
        """Maximum number of pages in one `save`."""
        return self._save_budget.limit_pages

    def fetch(self, number: int, keys: Sequence[PageKey]) -> None:
        """Search the tiers for a run of pages that begins with the first one the pool lacks.

        One `Fetched` follows within `timeout_s`.
        """
        assert number not in self._fetches, f"fetch {number} is in progress"
        fetch = _StackFetch(number, keys, time.monotonic() + self._timeout_s)
        self._fetches[number] = fetch
        if not self._is_closed:
            self._post(lambda: self._spawn(self._search(fetch)))

    def place(self, number: int, page_ids: Sequence[int]) -> None:
        """Copy the leading fetched pages into these pages of the pool. The caller holds them until `Placed`."""
        fetch = self._fetches[number]
        assert fetch.is_found, f"fetch {number} is still searching"
        assert not fetch.is_placing, f"fetch {number} is being placed"
        assert len(page_ids) <= fetch.num_pages, f"fetch {number} has {fetch.num_pages} pages"
        fetch.is_placing = True
        self._writer.submit(lambda: self._place(fetch, page_ids))

    def cancel(self, number: int) -> None:
        """Cancel a fetch before `place`. Its `Fetched` may still be reported."""
        fetch = self._fetches.pop(number)
        assert not fetch.is_placing, f"fetch {number} is being placed"
        if not self._is_closed:
            self._post(fetch.release)

    def save(
        self, number: int, keys: Sequence[PageKey], page_ids: Sequence[int], wait_s: float = 0.0
    ) -> bool:
        """Copy pages from the pool once, and put them into every tier that accepts pages now.

        The caller holds the pool's pages until `Saved`. The puts continue from host memory and skip a tier that fails
        or lags behind.

        Args:
            number: The caller's id of this save; fetches are numbered separately.
            keys: Keys of the pages, parents first; at most `max_save_pages`.
            page_ids: Their places in the pool.
            wait_s: Seconds to wait for host memory before the save is dropped.

        Returns:
            False if nothing was started: too many saves are in progress, or no tier accepts pages now.
        """
        assert len(keys) == len(page_ids) <= self._save_budget.limit_pages
        # A save with `wait_s` reserves its memory on the copying thread, which runs saves in order: the memory that it
        # waits for cannot go to a later save with `wait_s`.
        tiers, until_s = [] if wait_s else self._begin_save(len(keys)), time.monotonic() + wait_s
        if not tiers and not wait_s:
            return False
        self._reader.submit(lambda: self._save(number, keys, page_ids, tiers, until_s))
        return True

    def loads(self) -> list[TierLoad]:
        """Return each tier's gauges and counters; the caller fills in `token_cost` from `costs`."""
        return [self._load(guard) for guard in self._guards]

    def costs(self) -> Mapping[str, TierCost]:
        """Return each tier's recent costs, as measured on its answers."""
        return {guard.name: guard.cost(self._place_page_s.value) for guard in self._guards}

    def journals(self) -> Mapping[str, PrefixJournal]:
        """Return the journal of blocks in each tier, by tier name. Any thread may read a journal."""
        return {guard.name: guard.tier.journal for guard in self._guards}

    def close(self) -> None:
        """Stop, and close the tiers. After this returns, no pool memory is accessed and no event is reported.

        It waits until copies in progress end. It waits at most `CLOSE_S` for calls of tiers, and again for closing them.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._reader.stop()
        self._writer.stop()
        for guard in self._guards:
            guard.stop()
        self._reader.join()
        self._writer.join()
        until_s = time.monotonic() + CLOSE_S
        for guard in self._guards:
            guard.join(until_s)
        self._post(self._stopped.set)
        self._thread.join()
        closers = [
            threading.Thread(target=_close, args=(guard.tier,), daemon=True)
            for guard in self._guards
        ]
        for closer in closers:
            closer.start()
        until_s = time.monotonic() + CLOSE_S
        for closer in closers:
            closer.join(max(0.0, until_s - time.monotonic()))

    # ── on the stack's loop ──────────────────────────────────────────────────────────────────────

    async def _run(self, started: threading.Event) -> None:
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        self._memory_line, self._tasks = asyncio.Lock(), set[asyncio.Task[None]]()
        started.set()
        await self._stopped.wait()
        for fetch in self._fetches.values():
            fetch.release()

    def _post(self, function: Callable[[], object]) -> None:
        self._loop.call_soon_threadsafe(function)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finish_task)

    def _finish_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("kv_tier.task_failed", exc_info=error)

    async def _search(self, fetch: _StackFetch) -> None:
        for index, tier in enumerate(self._guards):
            is_over = fetch.num_pages == len(fetch.keys) or time.monotonic() >= fetch.deadline_s
            if is_over or self._is_cancelled(fetch):
                break
            if tier.can_read:
                # The guard has recorded the failure; pages that arrived before it are kept.
                with suppress(TierFailed, TimeoutError):
                    await self._search_tier(index, fetch)
        if self._is_cancelled(fetch):
            fetch.release()
            return
        num_pages = fetch.num_pages
        by_tier = {tier.name: count for tier, count in fetch.by_tier(num_pages).items()}
        fetch.is_found = True
        self._emit(Fetched(fetch.number, num_pages, by_tier))

    async def _search_tier(self, index: int, fetch: _StackFetch) -> None:
        """Get the missing pages that one tier has, and put them into the faster tiers.

        A hanging tier blocks the memory of one piece only; the fetch continues with the next tier.

        Raises:
            TierFailed, TimeoutError: No further pages will arrive.
        """
        keys = fetch.keys[fetch.num_pages :]
        is_lent = self._guards[index].lends_own_memory
        num_together = len(keys) if is_lent else self._num_together
        for first in range(0, len(keys), num_together):
            piece = keys[first : first + num_together]
            if await self._get_piece(index, piece, fetch) < len(piece):
                return

    async def _get_piece(self, index: int, keys: Sequence[PageKey], fetch: _StackFetch) -> int:
        """Get pages with one call of a tier; return how many it lent."""
        tier = self._guards[index]
        free: Callable[[int], object] = lambda _: None  # noqa: E731
        if not tier.lends_own_memory:
            # The prefix may be longer than the memory budget.
            keys = keys[: self._fetch_budget.limit_pages - self._num_staged(fetch)]
            if not keys:
                return 0
            await self._reserve(len(keys), fetch)
            free = self._fetch_budget.release
        loan = await tier.get(keys, fetch.deadline_s, free)
        if not loan.pages:
            loan.release()
            return 0
        fetch.loans.append((tier, loan))
        for faster in self._guards[:index]:
            faster.queue_put(keys[: len(loan.pages)], loan)
        return len(loan.pages)

    def _num_staged(self, fetch: _StackFetch) -> int:
        return sum(len(loan.pages) for tier, loan in fetch.loans if not tier.lends_own_memory)

    async def _reserve(self, num_pages: int, fetch: _StackFetch) -> None:
        """Reserve memory in queue order; raise `TimeoutError` on timeout or if the fetch was cancelled."""
        async with asyncio.timeout_at(fetch.deadline_s), self._memory_line:
            while not self._fetch_budget.take(num_pages):
                await asyncio.sleep(_MEMORY_POLL_S)
                if self._is_cancelled(fetch):
                    raise TimeoutError

    def _is_cancelled(self, fetch: _StackFetch) -> bool:
        return self._fetches.get(fetch.number) is not fetch

    # ── on the threads that copy ─────────────────────────────────────────────────────────────────

    def _place(self, fetch: _StackFetch, page_ids: Sequence[int]) -> None:
        pages = [page for _, loan in fetch.loans for page in loan.pages][: len(page_ids)]
        begin_s = time.monotonic()
        is_complete = _try_copy(lambda: self._pages.write(page_ids, pages))
        if is_complete and page_ids:
            self._place_page_s.add((time.monotonic() - begin_s) / len(page_ids))
            for tier, count in fetch.by_tier(len(page_ids)).items():
                tier.counts.hit_pages += count
        try:
            fetch.release()
        finally:  # a tier's code may raise when its loan ends, and the role waits for this event
            self._emit(Placed(fetch.number, is_complete))

    def _begin_save(self, num_pages: int) -> list[GuardedTier]:
        """Reserve memory and return the tiers that accept pages; none if no memory is left."""
        writable = [tier for tier in self._guards if tier.can_write]
        return writable if writable and self._save_budget.take(num_pages) else []

    def _save(
        self,
        number: int,
        keys: Sequence[PageKey],
        page_ids: Sequence[int],
        tiers: Sequence[GuardedTier],
        until_s: float,
    ) -> None:
        num_together = self._num_together
        try:
            while not tiers and not self._is_closed:
                tiers = self._begin_save(len(keys))
                if tiers or time.monotonic() >= until_s:
                    break
                time.sleep(_MEMORY_POLL_S)
            # Children first: pages touched last are evicted last, so that parents outlive their children.
            for first in reversed(range(0, len(keys) if tiers else 0, num_together)):
                end = first + num_together
                self._save_piece(keys[first:end], page_ids[first:end], tiers)
        finally:
            self._emit(Saved(number))

    def _save_piece(
        self, keys: Sequence[PageKey], page_ids: Sequence[int], tiers: Sequence[GuardedTier]
    ) -> None:
        pieces: list[memoryview] = []

        def read() -> None:
            pieces.extend(self._memory.take() for _ in keys)
            self._pages.read(page_ids, pieces)

        def end() -> None:
            self._memory.release(pieces)
            self._save_budget.release(len(keys))

        loan = Loan(pieces, end)
        if _try_copy(read):
            for tier in tiers:
                tier.queue_put(keys, loan)
        loan.release()

    def _emit(self, event: TierEvent) -> None:
        if isinstance(event, Placed):
            del self._fetches[event.number]
        if not self._is_closed:
            self._report(event)

    def _load(self, guard: GuardedTier) -> TierLoad:
        """Return the tier's own gauges together with the guard's counters."""
        own, counts, page_bytes = guard.tier.load(), guard.counts, self._pages.page_bytes
        return msgspec.structs.replace(
            own,
            name=guard.name,
            state=guard.state or own.state,
            hit_tokens=counts.hit_pages * self._page_size,
            missed_tokens=counts.missed_pages * self._page_size,
            late_tokens=counts.late_pages * self._page_size,
            put_bytes=counts.put_pages * page_bytes,
            got_bytes=counts.got_pages * page_bytes,
            num_failures=counts.num_failures,
        )


def _try_copy(copy: Callable[[], None]) -> bool:
    """Copy to or from the pool, without a deadline; return whether it succeeded."""
    try:
        copy()
    except Exception as error:  # noqa: BLE001  # device libraries raise various errors
        log.warning("kv_tier.copy_failed", reason=repr(error))
        return False
    return True


def _close(tier: Tier) -> None:
    try:
        tier.close()
    except BaseException:
        log.exception("kv_tier.close_failed", tier=tier.name)
