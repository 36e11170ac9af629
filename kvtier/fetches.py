"""What becomes of each fetch, whatever order answers come in. Pure: it returns calls, and makes none.

```
           ┌─ more, next tier ─┐
           ▼                   │
 fetch ─▶ LOOKING ─────────────┴─ no tier is left, all is there, time is up ─▶ FETCHED ──place──▶ PLACING ──▶ over
           └─ abandon ─▶ over                                                     └─ abandon ─▶ over
```

Of each tier it is asked first how much is there (`Has`), then for that in pieces (`Get`), so that what came
before the time is up counts. Memory for all of it is set aside before the first piece: fetches that each
had half of theirs would wait for each other. Who finds none waits in line.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from tandem.kvtier.calls import CallState, Get, Has, HostRun, MemoryBudget, Outbox, Write
from tandem.kvtier.events import Fetched, Placed
from tandem.kvtier.link import TierLink
from tandem.kvtier.puts import Puts
from tandem.kvtier.tier import Loan
from tandem.wire.page_keys import PageKey


class FetchState(Enum):
    """See the top of the file."""

    LOOKING = auto()
    FETCHED = auto()
    PLACING = auto()


@dataclass(slots=True, eq=False)
class _Fetch:
    """One fetch.

    Attributes:
        rank: Of the tier that is being asked.
        call: What is asked of it now; None: it waits for memory.
        num_promised: Pages that this tier said it has, and that were not asked for yet.
        num_reserved: Pages of memory set aside for those.
        num_staged: Pages of memory in `runs`.
    """

    number: int
    keys: Sequence[PageKey]
    deadline_s: float
    state: FetchState = FetchState.LOOKING
    rank: int = 0
    call: Has | Get | Write | None = None
    num_promised: int = 0
    num_reserved: int = 0
    num_staged: int = 0
    runs: list[tuple[TierLink, HostRun]] = field(default_factory=list)
    num_placed: int = 0

    @property
    def num_pages(self) -> int:
        """Pages that are in host memory."""
        return sum(len(run.pages) for _, run in self.runs)

    def by_tier(self, num_pages: int) -> dict[TierLink, int]:
        """Return where the first pages came from."""
        came: dict[TierLink, int] = {}
        for link, run in self.runs:
            if count := min(num_pages, len(run.pages)):
                came[link] = came.get(link, 0) + count
            num_pages -= count
        return came


class Fetches:
    """All fetches of a stack.

    Args:
        links: Fastest first.
        budget: Of memory for what stores bring.
    """

    def __init__(
        self,
        links: Sequence[TierLink],
        budget: MemoryBudget,
        puts: Puts,
        outbox: Outbox,
        timeout_s: float,
    ) -> None:
        self._links, self._budget, self._puts, self._outbox = links, budget, puts, outbox
        self._timeout_s = timeout_s
        self._all: dict[int, _Fetch] = {}
        self._waiting: deque[_Fetch] = deque()

    @property
    def numbers(self) -> Mapping[int, FetchState]:
        """Those that are not over."""
        return {number: fetch.state for number, fetch in self._all.items()}

    def fetch(self, number: int, keys: Sequence[PageKey], now_s: float) -> None:
        """Begin one."""
        assert number not in self._all, f"fetch {number} is under way"
        fetch = self._all[number] = _Fetch(number, keys, now_s + self._timeout_s)
        self._advance(fetch)

    def place(self, number: int, page_ids: Sequence[int]) -> None:
        """Have the first pages copied into the pool."""
        fetch = self._all[number]
        assert fetch.state is FetchState.FETCHED, f"fetch {number} is {fetch.state.name}"
        assert len(page_ids) <= fetch.num_pages, f"fetch {number} has {fetch.num_pages} pages"
        pages = [page for _, run in fetch.runs for page in run.pages][: len(page_ids)]
        fetch.state, fetch.num_placed = FetchState.PLACING, len(page_ids)
        fetch.call = Write(owner=number, page_ids=page_ids, pages=pages)
        self._outbox.calls.append(fetch.call)

    def placed(self, number: int, *, is_whole: bool) -> None:
        """Note that the copy is over."""
        fetch = self._all[number]
        if is_whole:
            for link, count in fetch.by_tier(fetch.num_placed).items():
                link.counts.hit_pages += count
        self._forget(fetch)
        self._outbox.events.append(Placed(number, is_whole))

    def abandon(self, number: int) -> None:
        """Forget one, and that it was fetched, if nobody was told yet."""
        fetch = self._all[number]
        assert fetch.state is not FetchState.PLACING, f"fetch {number} is being placed"
        events = self._outbox.events
        for event in [e for e in events if isinstance(e, Fetched) and e.number == number]:
            events.remove(event)
        self._forget(fetch)
        self.serve_waiting()

    def has_answered(self, call: Has, num_there: int) -> None:
        """Take what a tier says it has."""
        if (fetch := self._owner(call)) is None:
            return
        self._links[call.rank].counts.missed_pages += len(call.keys) - num_there
        fetch.num_promised = num_there
        if not num_there:
            self._next_tier(fetch)
        elif not self._reserve(fetch):
            self._waiting.append(fetch)

    def get_answered(
        self, call: Get, loan: Loan, pages: Sequence[memoryview], duration_s: float
    ) -> None:
        """Take what a tier lends; at most as many pages as were asked for."""
        link = self._links[call.rank]
        link.meter.got(len(pages), duration_s)
        link.counts.got_pages += len(pages)
        fetch = self._owner(call)
        if fetch is None or not pages:
            self._outbox.loans.append(loan)
            self._budget.give_back(call.num_reserved)
        else:
            self._keep(fetch, link, call, loan, pages)
        if fetch is None:
            return
        if len(pages) == len(call.keys):
            self._get_more(fetch)
            return
        link.counts.missed_pages += len(call.keys) - len(pages) + fetch.num_promised
        self._next_tier(fetch)

    def failed(self, call: Has | Get) -> None:
        """Go on without this tier."""
        if isinstance(call, Get):
            self._budget.give_back(call.num_reserved)
        if (fetch := self._owner(call)) is not None:
            self._next_tier(fetch)

    def expire(self, now_s: float) -> None:
        """End those whose time is up, with what is there."""
        for fetch in [f for f in self._all.values() if f.state is FetchState.LOOKING]:
            if now_s < fetch.deadline_s:
                continue
            if fetch.rank < len(self._links):
                self._note_late(fetch, self._links[fetch.rank], now_s)
            self._finish(fetch)

    def next_due_s(self) -> list[float]:
        """Return when `expire` has something to do."""
        return [f.deadline_s for f in self._all.values() if f.state is FetchState.LOOKING]

    def serve_waiting(self) -> None:
        """Let those go on for whom there is memory now, in line."""
        while self._waiting:
            fetch = self._waiting[0]
            is_waiting = fetch.state is FetchState.LOOKING and self._all.get(fetch.number) is fetch
            if is_waiting and not self._reserve(fetch):
                return
            self._waiting.popleft()

    def close(self) -> None:
        """Forget all but those being copied into the pool, whose memory is read until then."""
        for fetch in list(self._all.values()):
            is_copied = isinstance(fetch.call, Write) and fetch.call.state is CallState.BEGUN
            if not is_copied:
                self._forget(fetch)

    def _owner(self, call: Has | Get) -> _Fetch | None:
        """Return the fetch that waits for this answer, and let it wait no more."""
        fetch = None if call.owner is None else self._all.get(call.owner)
        if fetch is None or fetch.call is not call:
            return None
        fetch.call = None
        return fetch

    def _advance(self, fetch: _Fetch) -> None:
        """Ask the next tier that can be asked for what is missing."""
        have = fetch.num_pages
        while have < len(fetch.keys) and fetch.rank < len(self._links):
            link = self._links[fetch.rank]
            if link.can_read:
                keys = fetch.keys[have:]
                if link.lends_own_memory:
                    fetch.call = Get(owner=fetch.number, rank=link.rank, keys=keys, num_reserved=0)
                else:
                    fetch.call = Has(owner=fetch.number, rank=link.rank, keys=keys)
                self._outbox.calls.append(fetch.call)
                return
            fetch.rank += 1
        self._finish(fetch)

    def _next_tier(self, fetch: _Fetch) -> None:
        self._budget.give_back(fetch.num_reserved)
        fetch.num_reserved = fetch.num_promised = 0
        fetch.rank += 1
        self._advance(fetch)

    def _reserve(self, fetch: _Fetch) -> bool:
        """Set memory aside for what is promised, or as much of it as there can ever be, and get it."""
        wanted = min(fetch.num_promised, self._budget.limit_pages - fetch.num_staged)
        if wanted and not self._budget.take(wanted):
            return False
        fetch.num_promised = fetch.num_reserved = wanted
        self._get_more(fetch)
        return True

    def _get_more(self, fetch: _Fetch) -> None:
        if not fetch.num_promised:
            self._next_tier(fetch)
            return
        link = self._links[fetch.rank]
        count = min(fetch.num_promised, link.call_pages())
        have = fetch.num_pages
        keys = fetch.keys[have : have + count]
        fetch.call = Get(owner=fetch.number, rank=link.rank, keys=keys, num_reserved=count)
        fetch.num_promised -= count
        fetch.num_reserved -= count
        self._outbox.calls.append(fetch.call)

    def _keep(
        self, fetch: _Fetch, link: TierLink, call: Get, loan: Loan, pages: Sequence[memoryview]
    ) -> None:
        num_used = min(call.num_reserved, len(pages))
        self._budget.give_back(call.num_reserved - num_used)
        run = HostRun(loan, call.keys[: len(pages)], pages, self._budget, num_used)
        run.hold()
        fetch.runs.append((link, run))
        fetch.num_staged += num_used
        self._puts.promote(run, link.rank)

    def _note_late(self, fetch: _Fetch, link: TierLink, now_s: float) -> None:
        link.counts.late_pages += fetch.num_promised
        if isinstance(fetch.call, Get):
            link.counts.late_pages += len(fetch.call.keys)
        if isinstance(fetch.call, Has | Get) and link.has_hung(fetch.call, now_s):
            link.give_up(fetch.call, now_s)

    def _finish(self, fetch: _Fetch) -> None:
        self._let_go(fetch)
        fetch.state = FetchState.FETCHED
        num_pages = fetch.num_pages
        by_tier = {link.name: count for link, count in fetch.by_tier(num_pages).items()}
        self._outbox.events.append(Fetched(fetch.number, num_pages, by_tier))

    def _let_go(self, fetch: _Fetch) -> None:
        """Ask for nothing more; an answer under way finds nobody, and its memory goes back then."""
        self._budget.give_back(fetch.num_reserved)
        fetch.num_reserved = fetch.num_promised = 0
        call, fetch.call = fetch.call, None
        if call is not None and call.state is CallState.QUEUED:
            call.state = CallState.OVER
            if isinstance(call, Get):
                self._budget.give_back(call.num_reserved)

    def _forget(self, fetch: _Fetch) -> None:
        self._let_go(fetch)
        for _, run in fetch.runs:
            run.release(self._outbox)
        del self._all[fetch.number]
