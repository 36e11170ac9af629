"""What a node talks to: it looks through the tiers and fills them, and no call waits.

```
 engine's loop ── fetch, place, abandon, save ──▶ ┐                  ┌─▶ workers of each tier: has, get, put
                                                  ├ core, one lock ──┤
               ◀── events, when the waker rang ── ┘                  └─▶ copier: pages from and to the pool
```

What is decided, `core.py` decides; here are the threads. The lock is held for decisions alone: no byte is
copied, no tier called, nothing logged under it.
"""

import operator
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from tandem.kvtier.calls import Call, Get, Has, Put, Read, TierCall, Write
from tandem.kvtier.core import Answer, Lent, StackCore
from tandem.kvtier.cost import TierCost
from tandem.kvtier.events import TierEvent
from tandem.kvtier.memory import PageBuffers
from tandem.kvtier.tier import LendsOwnMemory, Loan, PoolPages, Tier, TierFailed
from tandem.kvtier.workers import Alarm, Workers
from tandem.telemetry.log import get_logger
from tandem.wire.channel import Waker
from tandem.wire.messages import TierLoad
from tandem.wire.page_keys import PageKey
from tandem.wire.prefix_journal import PrefixJournal

log = get_logger("kvtier.stack")

# So long a node that ends waits for tiers that hang.
CLOSE_S = 1.0


class TierStack:
    """The tiers behind one pool, fastest first.

    All methods belong to one thread, the engine's loop, and none but `close` waits.

    Args:
        tiers: Fastest first; the stack closes them.
        pages: Of the pool.
        waker: Is rung when `events` has something; None: the caller looks by itself.
        timeout_s: Until a fetch ends, with what is there then.
        max_staged_bytes: How much host memory pages may take on their way; half of it for either direction.
            What a tier lends of its own memory (`host`) takes none of it.
        page_size: Tokens of a page; loads are told in tokens.
        clock: Seconds that only grow.
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tiers, self._pages, self._waker = tiers, pages, waker
        self._page_size, self._clock = page_size, clock
        self._core = StackCore(
            [(t.name, isinstance(t, LendsOwnMemory) and t.lends_own_memory) for t in tiers],
            pages.page_bytes,
            timeout_s=timeout_s,
            max_staged_bytes=max_staged_bytes,
        )
        self._lock = threading.Lock()
        self._buffers = PageBuffers(pages)
        # A store that hangs in one call may answer another.
        self._workers = [Workers(f"kv-tier-{tier.name}", self._do, 1) for tier in tiers]
        self._copier = Workers("kv-tiers-copier", self._do, 0)
        self._alarm = Alarm(self._expire, clock)

    @property
    def max_save_pages(self) -> int:
        """The most pages that one `save` may have."""
        return self._core.save_budget.limit_pages

    def fetch(self, number: int, keys: Sequence[PageKey]) -> None:
        """Look through the tiers, fastest first, each for what those before it lack.

        One `Fetched` follows within `timeout_s`, whatever a tier does, with the leading pages that are in
        host memory then. They stay there until `place` or `abandon`.

        Args:
            number: The caller's name for this fetch, not in use by another.
            keys: Of a prefix's pages, from the first one that the pool lacks on.
        """
        with self._turn() as core:
            core.fetches.fetch(number, keys, self._clock())

    def place(self, number: int, page_ids: Sequence[int]) -> None:
        """Copy the first of the fetched pages into these pages of the pool; give the fetched memory back.

        `Placed` follows. The caller holds the pages until then, and may not abandon the fetch any more.

        Args:
            number: Of a fetch that `Fetched` came for.
            page_ids: As many as are wanted, at most as many as were fetched.
        """
        with self._turn() as core:
            core.fetches.place(number, page_ids)

    def abandon(self, number: int) -> None:
        """Forget a fetch, before `place` only. No event follows; one not yet looked at is taken back."""
        with self._turn() as core:
            core.fetches.abandon(number)

    def save(self, number: int, keys: Sequence[PageKey], page_ids: Sequence[int]) -> bool:
        """Copy pages off the pool, once, and put them into every tier that takes some.

        `Saved` follows when the pool's pages are no longer read: the caller holds them until then. The puts
        go on from host memory; a tier that cannot keep up with the others, or fails, goes without.

        Args:
            number: The caller's name for this save; fetches have names of their own.
            keys: Of the pages, parents first; at most `max_save_pages`.
            page_ids: Where they are in the pool.

        Returns:
            False: too much is under way, or no tier can be asked now. Nothing was begun; ask later.
        """
        with self._turn() as core:
            return core.puts.save(number, keys, page_ids, self._clock())

    def events(self) -> Iterator[TierEvent]:
        """Yield what happened since the last look."""
        with self._turn() as core:
            self._expire_due(core)
            events = list(core.outbox.events)
            core.outbox.events.clear()
        return iter(events)

    def loads(self) -> list[TierLoad]:
        """Return what each tier holds and did; `token_cost` is for the caller to fill in (`costs`)."""
        loads = [tier.load() for tier in self._tiers]
        with self._lock:
            pairs = zip(self._core.links, loads, strict=True)
            return [self._core.load(link, load, self._page_size) for link, load in pairs]

    def costs(self) -> Mapping[str, TierCost]:
        """Return what each tier's answers took lately, by name.

        A tier that is never asked is never measured again: ask a dear one now and then.
        """
        with self._lock:
            return {link.name: self._core.cost(link) for link in self._core.links}

    def journals(self) -> Mapping[str, PrefixJournal]:
        """Return which blocks are in each tier, by name. They may be asked on any thread."""
        return {tier.name: tier.journal for tier in self._tiers}

    def close(self) -> None:
        """Stop, and close the tiers: no pool memory is touched and no event comes after this returns.

        Waits for copies under way, and a moment for tiers; one that hangs is left behind.
        """
        with self._turn() as core:
            core.close()
        self._alarm.stop()
        self._copier.stop()
        for workers in self._workers:
            workers.stop()
        self._copier.join()
        until_s = time.monotonic() + CLOSE_S
        for workers in self._workers:
            workers.join(until_s)
        closers = [threading.Thread(target=_close, args=(t,), daemon=True) for t in self._tiers]
        for closer in closers:
            closer.start()
        until_s = time.monotonic() + CLOSE_S
        for closer in closers:
            closer.join(max(0.0, until_s - time.monotonic()))

    @contextmanager
    def _turn(self) -> Iterator[StackCore]:
        """Hold the lock for a decision; then do what came of it."""
        with self._lock:
            core = self._core
            yield core
            out = core.outbox
            calls, out.calls = out.calls, []
            loans, out.loans = out.loans, []
            notes, out.notes = out.notes, []
            has_events = bool(out.events)
            self._alarm.set(core.next_due_s())
        for call in calls:
            self._submit(call)
        for loan in loans:
            _give_back(loan)
        for event, tier, reason in notes:
            (log.info if event == "kv_tier.up" else log.warning)(event, tier=tier, reason=reason)
        if has_events and self._waker is not None:
            self._waker.wake()

    def _expire(self) -> None:
        with self._turn() as core:
            self._expire_due(core)

    def _expire_due(self, core: StackCore) -> None:
        now_s, due_s = self._clock(), core.next_due_s()
        if due_s is not None and now_s >= due_s:
            core.expire(now_s)

    def _submit(self, call: Call) -> None:
        workers = self._workers[call.rank] if isinstance(call, TierCall) else self._copier
        workers.submit(call, is_urgent=not isinstance(call, Put | Read))

    def _do(self, call: Call) -> None:
        with self._turn() as core:
            if not core.begin(call, self._clock()):
                return
        try:
            answer = self._make(call)
        # Also what is no Exception: clients written in Rust panic with a BaseException, and a thread
        # that ended here would leave its tier without one.
        except BaseException as error:  # noqa: BLE001
            reason = error.message if isinstance(error, TierFailed) else repr(error)
            with self._turn() as core:
                core.failed(call, reason, self._clock())
            return
        with self._turn() as core:
            core.answered(call, answer, self._clock())

    def _make(self, call: Call) -> Answer:
        match call:
            case Has():
                return _count(self._tiers[call.rank].has(call.keys), call)
            case Get():
                loan = self._tiers[call.rank].get(call.keys)
                return _checked(loan, len(call.keys), self._pages.page_bytes)
            case Put():
                return _count(self._tiers[call.rank].put(call.keys, call.run.pages), call)
            case Write():
                self._pages.write(call.page_ids, call.pages)
                return None
            case Read():
                room = self._buffers.take(len(call.page_ids))
                try:
                    self._pages.read(call.page_ids, room.pages)
                except BaseException:
                    room.close()
                    raise
                return Lent(room, room.pages)
            case _:
                raise AssertionError(f"nobody knows {call}")


def _count(number: int, call: TierCall) -> int:
    """Return a tier's number, as far as it can be."""
    return min(max(0, operator.index(number)), len(call.keys))


def _checked(loan: Loan, num_asked: int, page_bytes: int) -> Lent:
    """Return what a tier lends, no more than was asked for.

    Raises:
        TierFailed: A page of it has another length.
    """
    try:
        pages = list(loan.pages)[:num_asked]
        lengths = {page.nbytes for page in pages} - {page_bytes}
    except BaseException:
        _give_back(loan)
        raise
    if lengths:
        _give_back(loan)
        raise TierFailed(f"it gave a page of {lengths.pop()} bytes instead of {page_bytes}")
    return Lent(loan, pages)


def _give_back(loan: Loan) -> None:
    try:
        loan.close()
    except BaseException:
        log.exception("kv_tier.loan_failed")


def _close(tier: Tier) -> None:
    try:
        tier.close()
    except BaseException:
        log.exception("kv_tier.close_failed", tier=tier.name)
