"""What a node talks to: it looks through the tiers and fills them, and no call waits.

```
 engine's loop ── fetch, abandon ──▶ the stack's asyncio loop ──▶ threads of each tier (`guard`)
               ── place, save ─────▶ a thread that copies each way ──┘
               ◀── events, by these threads

 fetch ─▶ looking ── no tier is left, all is there, time is up ─▶ found ──place──▶ placing ─▶ over
             └─ abandon ─▶ over                                     └─ abandon ─▶ over
 save  ─▶ read off the pool, piece by piece ─▶ Saved; each piece is put into each tier
```

A fetch is one task. It sets memory aside for a piece of what is missing, and asks a tier for it, piece after piece: the
tier returns by the deadline what it has. Fetches for which there is no memory wait in line.
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

# How long `close` waits for calls under way, and again for tiers to close.
CLOSE_S = 1.0
# The most that one put carries, and one get into memory of the stack.
MAX_PUT_BYTES = 16 << 20
# Between two looks for memory that other fetches have given back.
_MEMORY_AGAIN_S = 0.002


@dataclass(frozen=True, slots=True)
class Fetched:
    """So many leading pages are in host memory, until `place` or `abandon`; `by_tier`: how many from which tier."""

    number: int
    num_pages: int
    by_tier: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Placed:
    """The pages given to `place` have their bytes; or, where `is_whole` is False, must not be read."""

    number: int
    is_whole: bool


@dataclass(frozen=True, slots=True)
class Saved:
    """The pages given to `save` are read no more, whatever became of them."""

    number: int


TierEvent = Fetched | Placed | Saved


@dataclass(slots=True, eq=False)
class _Fetch:
    """One fetch; its loans are changed by the stack's loop, and from `place` on by the copying thread."""

    number: int
    keys: Sequence[PageKey]
    deadline_s: float
    is_found: bool = False
    is_placing: bool = False
    loans: list[tuple[GuardedTier, Loan]] = field(default_factory=list)

    @property
    def num_pages(self) -> int:
        """Pages that are in host memory."""
        return sum(len(loan.pages) for _, loan in self.loans)

    def by_tier(self, num_pages: int) -> Mapping[GuardedTier, int]:
        """Return where the first pages came from."""
        came = Counter[GuardedTier]()
        for tier, loan in self.loans:
            count = min(num_pages - came.total(), len(loan.pages))
            if count:
                came[tier] += count
        return came

    def release(self) -> None:
        """Give the memory back, as far as no put uses it."""
        loans, self.loans = self.loans, []
        for _, loan in loans:
            loan.release()


class TierStack:
    """The tiers behind one pool, fastest first.

    All methods belong to one thread, the engine's loop, and none but `close` waits.

    Args:
        tiers: Fastest first; the stack closes them.
        pages: The pool's pages.
        report: Given each event, by a thread of the stack's; it must not wait.
        timeout_s: A fetch ends after this time with the pages that are there.
        max_staged_bytes: Host memory for pages on their way; half of it for each direction.
            What a tier lends of its own memory (`host`) does not count.
        page_size: Tokens of a page; loads are in tokens.
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
        self._fetches: dict[int, _Fetch] = {}
        self._place_page_s = Mean()
        self._is_closed = False
        self._guards = [
            GuardedTier(
                tier,
                pages.page_bytes,
                timeout_s=timeout_s,
                # However many hang, a share is left.
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
        """The most pages that one `save` may have."""
        return self._save_budget.limit_pages

    def fetch(self, number: int, keys: Sequence[PageKey]) -> None:
        """Look through the tiers for pages, from the first that the pool lacks on.

        One `Fetched` follows within `timeout_s`.
        """
        assert number not in self._fetches, f"fetch {number} is under way"
        fetch = _Fetch(number, keys, time.monotonic() + self._timeout_s)
        self._fetches[number] = fetch
        if not self._is_closed:
            self._post(lambda: self._spawn(self._look(fetch)))

    def place(self, number: int, page_ids: Sequence[int]) -> None:
        """Copy the first fetched pages into these pages of the pool, which the caller holds until `Placed`."""
        fetch = self._fetches[number]
        assert fetch.is_found, f"fetch {number} is not over yet"
        assert not fetch.is_placing, f"fetch {number} is being placed"
        assert len(page_ids) <= fetch.num_pages, f"fetch {number} has {fetch.num_pages} pages"
        fetch.is_placing = True
        self._writer.submit(lambda: self._place(fetch, page_ids))

    def abandon(self, number: int) -> None:
        """Forget a fetch, before `place` only. Its `Fetched` may still be reported."""
        fetch = self._fetches.pop(number)
        assert not fetch.is_placing, f"fetch {number} is being placed"
        if not self._is_closed:
            self._post(fetch.release)

    def save(
        self, number: int, keys: Sequence[PageKey], page_ids: Sequence[int], wait_s: float = 0.0
    ) -> bool:
        """Copy pages off the pool, once, and put them into every tier that takes some.

        `Saved` follows when the pool's pages are no longer read: the caller holds them until then. The puts
        go on from host memory; a tier that cannot keep up with the others, or fails, goes without.

        Args:
            number: The caller's name for this save; fetches have names of their own.
            keys: Of the pages, parents first; at most `max_save_pages`.
            page_ids: Where they are in the pool.
            wait_s: How long the pages wait for memory. Then all tiers go without.

        Returns:
            False: nothing was begun, as too much is under way, or no tier takes pages now.
        """
        assert len(keys) == len(page_ids) <= self._save_budget.limit_pages
        # One that may wait has its turn on the thread that copies: no later one takes its memory.
        takers, until_s = [] if wait_s else self._begin_save(len(keys)), time.monotonic() + wait_s
        if not takers and not wait_s:
            return False
        self._reader.submit(lambda: self._save(number, keys, page_ids, takers, until_s))
        return True

    def loads(self) -> list[TierLoad]:
        """Return what each tier holds and did; `token_cost` is for the caller to fill in (`costs`)."""
        return [self._load(guard) for guard in self._guards]

    def costs(self) -> Mapping[str, TierCost]:
        """Return what each tier's answers took lately. A tier that is never asked is never measured again."""
        return {guard.name: guard.cost(self._place_page_s.value) for guard in self._guards}

    def journals(self) -> Mapping[str, PrefixJournal]:
        """Return which blocks are in each tier, by name. Any thread may ask them."""
        return {guard.name: guard.tier.journal for guard in self._guards}

    def close(self) -> None:
        """Stop, and close the tiers: no pool memory is touched and no event comes after this returns.

        Waits for copies under way, and for `CLOSE_S` for tiers; one that hangs is left behind.
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
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("kv_tier.task_failed", exc_info=error)

    async def _look(self, fetch: _Fetch) -> None:
        for rank, tier in enumerate(self._guards):
            is_over = fetch.num_pages == len(fetch.keys) or time.monotonic() >= fetch.deadline_s
            if is_over or not self._is_wanted(fetch):
                break
            if tier.can_read:
                # The tier has noted it; what came before counts.
                with suppress(TierFailed, TimeoutError):
                    await self._look_in(rank, fetch)
        if not self._is_wanted(fetch):
            fetch.release()
            return
        num_pages = fetch.num_pages
        by_tier = {tier.name: count for tier, count in fetch.by_tier(num_pages).items()}
        fetch.is_found = True
        self._tell(Fetched(fetch.number, num_pages, by_tier))

    async def _look_in(self, rank: int, fetch: _Fetch) -> None:
        """Get what one tier has of the missing pages, and have the faster tiers keep it.

        A tier that hangs keeps the memory of one piece, and the other tiers go on with the rest.

        Raises:
            TierFailed, TimeoutError: No more comes.
        """
        keys = fetch.keys[fetch.num_pages :]
        is_lent = self._guards[rank].lends_own_memory
        num_together = len(keys) if is_lent else self._num_together
        for first in range(0, len(keys), num_together):
            piece = keys[first : first + num_together]
            if await self._get_piece(rank, piece, fetch) < len(piece):
                return

    async def _get_piece(self, rank: int, keys: Sequence[PageKey], fetch: _Fetch) -> int:
        """Get pages with one call to a tier; return how many came."""
        tier = self._guards[rank]
        give_back: Callable[[int], object] = lambda _: None  # noqa: E731
        if not tier.lends_own_memory:
            # A prefix may be longer than there is memory for.
            keys = keys[: self._fetch_budget.limit_pages - self._num_staged(fetch)]
            if not keys:
                return 0
            await self._reserve(len(keys), fetch)
            give_back = self._fetch_budget.give_back
        loan = await tier.get(keys, fetch.deadline_s, give_back)
        if not loan.pages:
            loan.release()
            return 0
        fetch.loans.append((tier, loan))
        for faster in self._guards[:rank]:
            faster.queue_put(keys[: len(loan.pages)], loan)
        return len(loan.pages)

    def _num_staged(self, fetch: _Fetch) -> int:
        return sum(len(loan.pages) for tier, loan in fetch.loans if not tier.lends_own_memory)

    async def _reserve(self, num_pages: int, fetch: _Fetch) -> None:
        """Set memory aside, in line; raise `TimeoutError` when there was none in time, or the fetch was abandoned."""
        async with asyncio.timeout_at(fetch.deadline_s), self._memory_line:
            while not self._fetch_budget.take(num_pages):
                await asyncio.sleep(_MEMORY_AGAIN_S)
                if not self._is_wanted(fetch):
                    raise TimeoutError

    def _is_wanted(self, fetch: _Fetch) -> bool:
        return self._fetches.get(fetch.number) is fetch

    # ── on the threads that copy ─────────────────────────────────────────────────────────────────

    def _place(self, fetch: _Fetch, page_ids: Sequence[int]) -> None:
        pages = [page for _, loan in fetch.loans for page in loan.pages][: len(page_ids)]
        begin_s = time.monotonic()
        is_whole = _is_copied(lambda: self._pages.write(page_ids, pages))
        if is_whole and page_ids:
            self._place_page_s.add((time.monotonic() - begin_s) / len(page_ids))
            for tier, count in fetch.by_tier(len(page_ids)).items():
                tier.counts.hit_pages += count
        try:
            fetch.release()
        finally:  # the end of a loan is a tier's code; the role waits for this event
            self._tell(Placed(fetch.number, is_whole))

    def _begin_save(self, num_pages: int) -> list[GuardedTier]:
        """Set memory aside, and return the tiers that take pages; none where there is no memory."""
        takers = [tier for tier in self._guards if tier.can_write]
        return takers if takers and self._save_budget.take(num_pages) else []

    def _save(
        self,
        number: int,
        keys: Sequence[PageKey],
        page_ids: Sequence[int],
        takers: Sequence[GuardedTier],
        until_s: float,
    ) -> None:
        num_together = self._num_together
        try:
            while not takers and not self._is_closed:
                takers = self._begin_save(len(keys))
                if takers or time.monotonic() >= until_s:
                    break
                time.sleep(_MEMORY_AGAIN_S)
            # Children first: what is touched last is evicted last, and parents must outlive their children.
            for first in reversed(range(0, len(keys) if takers else 0, num_together)):
                end = first + num_together
                self._save_piece(keys[first:end], page_ids[first:end], takers)
        finally:
            self._tell(Saved(number))

    def _save_piece(
        self, keys: Sequence[PageKey], page_ids: Sequence[int], takers: Sequence[GuardedTier]
    ) -> None:
        pieces: list[memoryview] = []

        def read() -> None:
            pieces.extend(self._memory.take() for _ in keys)
            self._pages.read(page_ids, pieces)

        def end() -> None:
            self._memory.give_back(pieces)
            self._save_budget.give_back(len(keys))

        loan = Loan(pieces, end)
        if _is_copied(read):
            for tier in takers:
                tier.queue_put(keys, loan)
        loan.release()

    def _tell(self, event: TierEvent) -> None:
        if isinstance(event, Placed):
            del self._fetches[event.number]
        if not self._is_closed:
            self._report(event)

    def _load(self, guard: GuardedTier) -> TierLoad:
        """Return what a tier reports with what was seen of it here."""
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


def _is_copied(copy: Callable[[], None]) -> bool:
    """Make a copy from or to the pool; it has no deadline, and is never given up."""
    try:
        copy()
    except Exception as error:  # noqa: BLE001  # whatever the device raises
        log.warning("kv_tier.copy_failed", reason=repr(error))
        return False
    return True


def _close(tier: Tier) -> None:
    try:
        tier.close()
    except BaseException:
        log.exception("kv_tier.close_failed", tier=tier.name)
