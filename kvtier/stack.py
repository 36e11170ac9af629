"""What a node talks to: it looks through the tiers and fills them, and no call waits.

```
 engine's loop ── fetch, place, abandon, save ──▶ the stack's thread ──▶ threads of each tier (`guard`)
               ◀── events, when the waker rang ── an asyncio loop    ──▶ threads that copy from and to the pool

 fetch ─▶ LOOKING ── no tier is left, all is there, time is up ─▶ FOUND ──place──▶ PLACING ─▶ over
             └─ abandon ─▶ over                                     └─ abandon ─▶ over
 save  ─▶ read off the pool, piece by piece ─▶ Saved; each piece is put into each tier
```

A fetch is one task. It asks each tier how much it has, sets memory aside for all of that, then gets it in pieces:
pieces that came before the deadline count. Fetches for which there is no memory wait in line.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Any

import msgspec
from tandem.wire.prefixes import PageKey, PrefixJournal

from tandem.kvtier.cost import Mean, TierCost
from tandem.kvtier.events import Fetched, Placed, Saved, TierEvent
from tandem.kvtier.guard import MAX_CALL_BYTES, Call, GuardedTier, Threads
from tandem.kvtier.memory import MemoryBudget, MemoryLoan, PageMemory, PageRun
from tandem.kvtier.tier import PoolPages, Tier, TierFailed
from tandem.telemetry.log import get_logger
from tandem.wire.channel import Waker
from tandem.wire.messages import TierLoad

log = get_logger("kvtier.stack")

# How long `close` waits for calls under way, and again for tiers to close.
CLOSE_S = 1.0


class _State(Enum):
    LOOKING = auto()
    FOUND = auto()
    PLACING = auto()
    OVER = auto()


@dataclass(slots=True, eq=False)
class _Fetch:
    """One fetch. Its state is changed by the stack's thread, apart from `place` and `abandon`."""

    number: int
    keys: Sequence[PageKey]
    deadline_s: float
    state: _State = _State.LOOKING
    runs: list[tuple[GuardedTier, PageRun]] = field(default_factory=list)

    @property
    def num_pages(self) -> int:
        """Pages that are in host memory."""
        return sum(len(run.pages) for _, run in self.runs)

    def by_tier(self, num_pages: int) -> dict[GuardedTier, int]:
        """Return where the first pages came from."""
        came: dict[GuardedTier, int] = {}
        for tier, run in self.runs:
            if count := min(num_pages, len(run.pages)):
                came[tier] = came.get(tier, 0) + count
            num_pages -= count
        return came

    def release(self) -> None:
        """Give the memory back, as far as no put uses it."""
        runs, self.runs = self.runs, []
        for _, run in runs:
            run.release()


class TierStack:
    """The tiers behind one pool, fastest first.

    All methods belong to one thread, the engine's loop, and none but `close` waits.

    Args:
        tiers: Fastest first; the stack closes them.
        pages: The pool's pages.
        waker: Is rung when `events` has something; None: the caller looks by itself.
        timeout_s: A fetch ends after this time with the pages that are there.
        max_staged_bytes: Host memory for pages on their way; half of it for each direction.
            What a tier lends of its own memory (`host`) does not count.
        page_size: Tokens of a page; loads are in tokens.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        pages: PoolPages,
        waker: Waker | None,
        *,
        timeout_s: float,
        max_staged_bytes: int,
        page_size: int,
    ) -> None:
        self._pages, self._waker, self._page_size = pages, waker, page_size
        self._timeout_s = timeout_s
        limit_pages = max(1, max_staged_bytes // 2 // pages.page_bytes)
        self._fetch_budget, self._save_budget = MemoryBudget(limit_pages), MemoryBudget(limit_pages)
        self._memory = PageMemory(pages.host_memory, pages.page_bytes)
        self._fetches: dict[int, _Fetch] = {}
        # With the fetch that an event is about, since a number may be used again after `abandon`.
        self._events: deque[tuple[TierEvent, _Fetch | None]] = deque()
        self._place_page_s = Mean()
        self._is_closed = False
        self._reader, self._writer = Threads("kv-tiers-read", 1), Threads("kv-tiers-write", 1)
        started = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._run(tiers, limit_pages, started)),
            name="kv-tiers",
            daemon=True,
        )
        self._thread.start()
        started.wait()

    @property
    def max_save_pages(self) -> int:
        """The most pages that one `save` may have."""
        return self._save_budget.limit_pages

    def fetch(self, number: int, keys: Sequence[PageKey]) -> None:
        """Look through the tiers, fastest first, each for what those before it lack.

        One `Fetched` follows within `timeout_s`, whatever a tier does, with the leading pages that are in
        host memory then. They stay there until `place` or `abandon`.

        Args:
            number: The caller's name for this fetch, not in use by another.
            keys: Of a prefix's pages, from the first one that the pool lacks on.
        """
        assert number not in self._fetches, f"fetch {number} is under way"
        fetch = _Fetch(number, keys, time.monotonic() + self._timeout_s)
        self._fetches[number] = fetch
        self._start(self._look, fetch)

    def place(self, number: int, page_ids: Sequence[int]) -> None:
        """Copy the first of the fetched pages into these pages of the pool; give the fetched memory back.

        `Placed` follows. The caller holds the pages until then, and may not abandon the fetch any more.

        Args:
            number: Of a fetch that `Fetched` came for.
            page_ids: As many as are wanted, at most as many as were fetched.
        """
        fetch = self._fetches[number]
        assert fetch.state is _State.FOUND, f"fetch {number} is {fetch.state.name}"
        assert len(page_ids) <= fetch.num_pages, f"fetch {number} has {fetch.num_pages} pages"
        fetch.state = _State.PLACING
        self._start(self._place, fetch, page_ids)

    def abandon(self, number: int) -> None:
        """Forget a fetch, before `place` only. No event follows; one not yet looked at is taken back."""
        fetch = self._fetches.pop(number)
        assert fetch.state is not _State.PLACING, f"fetch {number} is being placed"
        fetch.state = _State.OVER
        if not self._is_closed:
            self._post(fetch.release)

    def save(self, number: int, keys: Sequence[PageKey], page_ids: Sequence[int]) -> bool:
        """Copy pages off the pool, once, and put them into every tier that takes some.

        `Saved` follows when the pool's pages are no longer read: the caller holds them until then. The puts
        go on from host memory; a tier that cannot keep up with the others, or fails, goes without.

        Args:
            number: The caller's name for this save; fetches have names of their own.
            keys: Of the pages, parents first; at most `max_save_pages`.
            page_ids: Where they are in the pool.

        Returns:
            False: too much is under way, or no tier takes pages now. Nothing was begun; ask later.
        """
        assert len(keys) == len(page_ids) <= self._save_budget.limit_pages
        takers = [tier for tier in self._guards if tier.has_room and tier.can_write]
        if not takers or not self._save_budget.take(len(keys)):
            return False
        self._start(self._save, number, keys, page_ids, takers)
        return True

    def events(self) -> Iterator[TierEvent]:
        """Yield what happened since the last look."""
        while self._events and not self._is_closed:
            event, fetch = self._events.popleft()
            if fetch is not None and self._fetches.get(fetch.number) is not fetch:
                continue  # abandoned
            if isinstance(event, Placed):
                del self._fetches[event.number]
            yield event

    def loads(self) -> list[TierLoad]:
        """Return what each tier holds and did; `token_cost` is for the caller to fill in (`costs`)."""
        return [self._load(guard) for guard in self._guards]

    def costs(self) -> Mapping[str, TierCost]:
        """Return what each tier's answers took lately, by name.

        A tier that is never asked is never measured again: ask a slow one now and then.
        """
        place_page_s = self._place_page_s.value or 0.0
        return {guard.name: guard.meter.cost(place_page_s) for guard in self._guards}

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

    def _start(self, work: Callable[..., Coroutine[Any, Any, None]], *args: object) -> None:
        if not self._is_closed:
            self._post(lambda: self._spawn(work(*args)))

    # ── on the stack's thread ────────────────────────────────────────────────────────────────────

    async def _run(self, tiers: Sequence[Tier], limit_pages: int, started: threading.Event) -> None:
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        self._memory_line, self._memory_freed = asyncio.Lock(), asyncio.Event()
        self._tasks = set[asyncio.Task[None]]()
        self._guards = [
            GuardedTier(
                tier,
                self._pages.page_bytes,
                timeout_s=self._timeout_s,
                max_put_pages=limit_pages // 2,
                spawn=self._spawn,
            )
            for tier in tiers
        ]
        started.set()
        await self._stopped.wait()
        for fetch in self._fetches.values():
            fetch.release()

    def _post(self, function: Callable[..., object], *args: object) -> None:
        self._loop.call_soon_threadsafe(function, *args)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("kv_tier.task_failed", exc_info=error)

    def _tell(self, event: TierEvent, fetch: _Fetch | None = None) -> None:
        self._events.append((event, fetch))
        if self._waker is not None and not self._is_closed:
            self._waker.wake()

    async def _look(self, fetch: _Fetch) -> None:
        for rank, tier in enumerate(self._guards):
            is_late = time.monotonic() >= fetch.deadline_s
            if fetch.state is _State.OVER or fetch.num_pages == len(fetch.keys) or is_late:
                break
            if tier.can_read:
                try:
                    await self._look_in(rank, fetch)
                # Noted by the tier; what it has brought counts.
                except (TierFailed, TimeoutError):
                    continue
        if fetch.state is _State.OVER:
            fetch.release()
            return
        num_pages = fetch.num_pages
        by_tier = {tier.name: count for tier, count in fetch.by_tier(num_pages).items()}
        fetch.state = _State.FOUND
        self._tell(Fetched(fetch.number, num_pages, by_tier), fetch)

    async def _look_in(self, rank: int, fetch: _Fetch) -> None:
        """Get what one tier has of the missing pages.

        Raises:
            TierFailed, TimeoutError: No more of it comes.
        """
        tier, keys = self._guards[rank], fetch.keys[fetch.num_pages :]
        if tier.lends_own_memory:
            await self._get(rank, fetch, keys, lambda _: None)
            return
        num_there = await tier.has(keys, fetch.deadline_s)
        tier.counts.missed_pages += len(keys) - num_there
        # A prefix may be longer than there is memory for.
        keys = keys[: min(num_there, self._fetch_budget.limit_pages - self._num_staged(fetch))]
        num_got = num_asked = num_reserved = 0
        try:
            await self._reserve(len(keys), fetch.deadline_s)
            num_reserved = len(keys)
            while num_got == num_asked < len(keys) and fetch.state is not _State.OVER:
                piece = keys[num_got : num_got + tier.call_pages()]
                num_asked += len(piece)
                num_got += await self._get(rank, fetch, piece, self._free_memory)
            tier.counts.missed_pages += len(keys) - num_asked
        except (TierFailed, TimeoutError):
            if time.monotonic() >= fetch.deadline_s:
                tier.counts.late_pages += len(keys) - num_got
            raise
        finally:
            self._free_memory(num_reserved - min(num_asked, num_reserved))

    async def _get(
        self, rank: int, fetch: _Fetch, keys: Sequence[PageKey], end: Callable[[int], None]
    ) -> int:
        """Get pages of one tier, and have the faster ones keep them, which lacked them."""
        tier = self._guards[rank]
        run = await tier.get(keys, fetch.deadline_s, end)
        tier.counts.missed_pages += len(keys) - len(run.pages)
        if not run.pages:
            run.release()
            return 0
        fetch.runs.append((tier, run))
        for faster in self._guards[:rank]:
            faster.queue_put(run)
        return len(run.pages)

    def _num_staged(self, fetch: _Fetch) -> int:
        return sum(len(run.pages) for tier, run in fetch.runs if not tier.lends_own_memory)

    async def _reserve(self, num_pages: int, deadline_s: float) -> None:
        """Set memory aside, in line.

        Raises:
            TimeoutError: There was none in time.
        """
        async with asyncio.timeout_at(deadline_s), self._memory_line:
            while not self._fetch_budget.take(num_pages):
                self._memory_freed.clear()
                await self._memory_freed.wait()

    def _free_memory(self, num_pages: int) -> None:
        """Give memory of fetches back. Any thread, since late answers come on those of tiers."""
        self._fetch_budget.give_back(num_pages)
        if num_pages and not self._loop.is_closed():
            self._post(self._memory_freed.set)

    async def _place(self, fetch: _Fetch, page_ids: Sequence[int]) -> None:
        pages = [page for _, run in fetch.runs for page in run.pages][: len(page_ids)]
        begin_s = time.monotonic()
        is_whole = await self._copied(self._writer, lambda: self._pages.write(page_ids, pages))
        if is_whole and page_ids:
            self._place_page_s.add((time.monotonic() - begin_s) / len(page_ids))
        if is_whole:
            for tier, count in fetch.by_tier(len(page_ids)).items():
                tier.counts.hit_pages += count
        fetch.release()
        self._tell(Placed(fetch.number, is_whole), fetch)

    async def _save(
        self,
        number: int,
        keys: Sequence[PageKey],
        page_ids: Sequence[int],
        takers: Sequence[GuardedTier],
    ) -> None:
        call_pages = max(1, MAX_CALL_BYTES // self._pages.page_bytes)
        # Children first: what is touched last is evicted last, and parents must outlive their children.
        for first in reversed(range(0, len(keys), call_pages)):
            end = first + call_pages
            await self._save_piece(keys[first:end], page_ids[first:end], takers)
        self._tell(Saved(number))

    async def _save_piece(
        self, keys: Sequence[PageKey], page_ids: Sequence[int], takers: Sequence[GuardedTier]
    ) -> None:
        pieces: list[memoryview] = []

        def read() -> None:
            pieces.extend(self._memory.take() for _ in keys)
            self._pages.read(page_ids, pieces)

        is_read = await self._copied(self._reader, read)
        loan = MemoryLoan(self._memory, pieces, pieces)
        run = PageRun(keys, pieces, loan, partial(self._save_budget.give_back, len(keys)))
        for tier in takers if is_read else ():
            tier.queue_put(run)
        run.release()

    async def _copied(self, threads: Threads, copy: Callable[[], None]) -> bool:
        """Return whether a copy from or to the pool was made; it has no deadline, and is never given up."""
        call = Call(copy, lambda _: None)
        threads.submit(call)
        try:
            await call.result
        except TierFailed as error:
            log.warning("kv_tier.copy_failed", reason=error.message)
            return False
        return True

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


def _close(tier: Tier) -> None:
    try:
        tier.close()
    except BaseException:
        log.exception("kv_tier.close_failed", tier=tier.name)
