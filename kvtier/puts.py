"""What becomes of each save, and of pages on their way into tiers. Pure: it returns calls, and makes none.

```
 save ─▶ READING off the pool, piece by piece ──all pieces read──▶ Saved
                    └─ each piece ─▶ a put into each tier ─▶ the last gives its memory back
```
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass

from tandem.kvtier.calls import HostRun, MemoryBudget, Outbox, Put, Read
from tandem.kvtier.events import Saved
from tandem.kvtier.link import MAX_CALL_BYTES, TierLink
from tandem.kvtier.tier import Loan
from tandem.wire.page_keys import PageKey


@dataclass(slots=True)
class _Save:
    takers: list[TierLink]
    num_reads: int


class Puts:
    """All saves of a stack.

    Args:
        links: Fastest first.
        budget: Of memory for what comes off the pool.
    """

    def __init__(
        self, links: Sequence[TierLink], budget: MemoryBudget, outbox: Outbox, page_bytes: int
    ) -> None:
        self._links, self._budget, self._outbox = links, budget, outbox
        self._call_pages = max(1, MAX_CALL_BYTES // page_bytes)
        self._saves: dict[int, _Save] = {}

    @property
    def numbers(self) -> Set[int]:
        """Of those whose pages are still read."""
        return self._saves.keys()

    def save(
        self, number: int, keys: Sequence[PageKey], page_ids: Sequence[int], now_s: float
    ) -> bool:
        """Begin one, if there is memory for it and a tier that takes it."""
        assert number not in self._saves, f"save {number} is under way"
        assert len(keys) == len(page_ids) <= self._budget.limit_pages
        # Asked last, since asking may begin a probe.
        takers = [link for link in self._links if self._has_room(link) and link.can_write(now_s)]
        if not takers or not self._budget.take(len(keys)):
            return False
        if not keys:
            self._outbox.events.append(Saved(number))
            return True
        pieces = range(0, len(keys), self._call_pages)
        self._saves[number] = _Save(takers, len(pieces))
        # Children first: what is touched last is evicted last, and parents must outlive their children.
        for first in reversed(pieces):
            end = first + self._call_pages
            self._outbox.calls.append(
                Read(owner=number, page_ids=page_ids[first:end], keys=keys[first:end])
            )
        return True

    def read_answered(self, call: Read, loan: Loan, pages: Sequence[memoryview]) -> None:
        """Put a piece, now that it is in host memory, into the tiers."""
        run = HostRun(loan, call.keys, pages, self._budget, len(call.keys))
        run.hold()
        for link in self._takers(call):
            self._put(run, link)
        run.release(self._outbox)
        self._read(call)

    def read_failed(self, call: Read) -> None:
        """Go on without this piece."""
        self._budget.give_back(len(call.keys))
        self._read(call)

    def promote(self, run: HostRun, rank: int) -> None:
        """Put what the tier of this rank brought into those before it, which lacked it."""
        for link in self._links[:rank]:
            if self._has_room(link):
                self._put(run, link)

    def answered(self, call: Put, num_new: int) -> None:
        """Count what a tier took."""
        self._links[call.rank].counts.put_pages += num_new

    def close(self) -> None:
        """Forget all puts that were not begun, and all saves."""
        self._saves.clear()
        for link in self._links:
            link.drop_puts()

    def _takers(self, call: Read) -> Sequence[TierLink]:
        save = None if call.owner is None else self._saves.get(call.owner)
        return [] if save is None else save.takers

    def _has_room(self, link: TierLink) -> bool:
        """Whether a tier keeps up: one that does not leaves memory to the others."""
        return 2 * link.num_put_pages <= self._budget.limit_pages

    def _put(self, run: HostRun, link: TierLink) -> None:
        if link.takes_puts:
            link.queue_put(Put(owner=None, rank=link.rank, keys=run.keys, run=run))

    def _read(self, call: Read) -> None:
        if call.owner is None or (save := self._saves.get(call.owner)) is None:
            return
        save.num_reads -= 1
        if not save.num_reads:
            del self._saves[call.owner]
            self._outbox.events.append(Saved(call.owner))
