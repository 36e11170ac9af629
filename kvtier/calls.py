"""What the stack's workers are asked to do, and where their answers' memory goes. Values; no threads.

```
 QUEUED ──begin──▶ BEGUN ──answered, failed──▶ OVER
    └─ dropped: nobody waits for it ─────────────▲
```
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from tandem.kvtier.events import TierEvent
from tandem.kvtier.tier import Loan
from tandem.wire.page_keys import PageKey


class CallState(Enum):
    """A worker answers each call that it began, once."""

    QUEUED = auto()
    BEGUN = auto()
    OVER = auto()


class MemoryBudget:
    """How many pages of host memory may be under way in one direction.

    Attributes:
        num_used: Set aside or in use now.
    """

    def __init__(self, limit_pages: int) -> None:
        self.limit_pages = limit_pages
        self.num_used = 0

    def take(self, num_pages: int) -> bool:
        """Set memory aside, if there is some."""
        if self.num_used + num_pages > self.limit_pages:
            return False
        self.num_used += num_pages
        return True

    def give_back(self, num_pages: int) -> None:
        """Return memory."""
        self.num_used -= num_pages
        assert self.num_used >= 0


@dataclass(slots=True)
class Outbox:
    """What is to be done when the stack's lock is no longer held.

    Attributes:
        calls: For workers.
        loans: To be closed.
        events: For the engine's loop.
        notes: For the log: an event, the tier's name, what it said.
    """

    calls: list["Call"] = field(default_factory=list)
    loans: list[Loan] = field(default_factory=list)
    events: deque[TierEvent] = field(default_factory=deque)
    notes: list[tuple[str, str, str]] = field(default_factory=list)


class HostRun:
    """Leading pages in host memory that a fetch and several puts may use; given back by the last of them.

    Args:
        num_reserved: Pages of the budget that it takes; 0 where a tier lends memory of its own.
    """

    def __init__(
        self,
        loan: Loan,
        keys: Sequence[PageKey],
        pages: Sequence[memoryview],
        budget: MemoryBudget,
        num_reserved: int,
    ) -> None:
        self.keys, self.pages = keys, pages
        self._loan, self._budget, self._num_reserved = loan, budget, num_reserved
        self._num_users = 0

    def hold(self) -> None:
        """Begin to use it."""
        self._num_users += 1

    def release(self, outbox: Outbox) -> None:
        """Use it no more."""
        self._num_users -= 1
        assert self._num_users >= 0
        if not self._num_users:
            self._budget.give_back(self._num_reserved)
            outbox.loans.append(self._loan)


@dataclass(slots=True, eq=False, kw_only=True)
class Call:
    """What all of them have. `owner` is the fetch or save that waits; None: nobody does."""

    owner: int | None
    state: CallState = CallState.QUEUED
    begun_s: float = 0.0


@dataclass(slots=True, eq=False, kw_only=True)
class TierCall(Call):
    """A call of the tier of this rank; `is_overdue`: it counts as failed, whatever it answers."""

    rank: int
    keys: Sequence[PageKey]
    is_overdue: bool = False


@dataclass(slots=True, eq=False, kw_only=True)
class Has(TierCall):
    """How many are there?"""


@dataclass(slots=True, eq=False, kw_only=True)
class Get(TierCall):
    """Lend them. `num_reserved` pages of memory are set aside for them."""

    num_reserved: int


@dataclass(slots=True, eq=False, kw_only=True)
class Put(TierCall):
    """Keep them."""

    run: HostRun


@dataclass(slots=True, eq=False, kw_only=True)
class Write(Call):
    """Copy into the pool."""

    page_ids: Sequence[int]
    pages: Sequence[memoryview]


@dataclass(slots=True, eq=False, kw_only=True)
class Read(Call):
    """Copy off the pool, into as many pages that are set aside."""

    page_ids: Sequence[int]
    keys: Sequence[PageKey]
