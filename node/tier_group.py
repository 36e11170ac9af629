"""The tiers of all ranks of a node as one: asked together, and answering when all have.

```
 Tiering ── fetch, place, abandon, save ──▶ TierGroup ─┬─▶ TierStack          rank 0's own
         ◀── Fetched, Placed, Saved ── TierAgreement ◀─┴─▶ OtherTiers ...     one for each other rank
```

How other ranks are told and heard is `rank_tiers.py`'s. Here is also what a tier of a node is said to hold and do.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import msgspec

from tandem.kvtier.cost import TierCost
from tandem.kvtier.events import TierEvent
from tandem.node.tier_agreement import TierAgreement
from tandem.wire.messages import TierLoad
from tandem.wire.page_keys import PageKey
from tandem.wire.prefix_journal import PrefixJournal

# From what one wishes for to what one looks at first.
_STATES = ("up", "full", "backing_off")
_SUMMED = ("put_bytes", "got_bytes", "num_evicted", "num_corrupted", "num_failures")
# What one rank lacks, or has too late, all do without. What was hit is the same on all.
_MOST = ("missed_tokens", "late_tokens")
_SIZES = ("num_pages", "num_bytes", "limit_bytes")


class Tiers(Protocol):
    """What stands behind the pool of a node; all as `TierStack` has it, of one rank or several."""

    @property
    def max_save_pages(self) -> int:
        """See `TierStack.max_save_pages`."""
        ...

    def fetch(self, number: int, keys: Sequence[PageKey]) -> None:
        """See `TierStack.fetch`."""
        ...

    def place(self, number: int, page_ids: Sequence[int]) -> None:
        """See `TierStack.place`."""
        ...

    def abandon(self, number: int) -> None:
        """See `TierStack.abandon`."""
        ...

    def save(self, number: int, keys: Sequence[PageKey], page_ids: Sequence[int]) -> bool:
        """See `TierStack.save`."""
        ...

    def events(self) -> Iterator[TierEvent]:
        """See `TierStack.events`."""
        ...

    def loads(self) -> list[TierLoad]:
        """See `TierStack.loads`."""
        ...

    def costs(self) -> Mapping[str, TierCost]:
        """See `TierStack.costs`."""
        ...

    def journals(self) -> Mapping[str, PrefixJournal]:
        """See `TierStack.journals`."""
        ...

    def close(self) -> None:
        """See `TierStack.close`."""
        ...


class OtherTiers(Protocol):
    """The tiers of another rank: told what rank 0's are, in the same order.

    Attributes:
        loads, costs: As the rank told them last; empty before.
    """

    loads: Sequence[TierLoad]
    costs: Mapping[str, TierCost]

    def fetch(self, number: int, keys: Sequence[PageKey]) -> None:
        """See `TierStack.fetch`; the keys are rank 0's."""
        ...

    def place(self, number: int, page_ids: Sequence[int]) -> None:
        """See `TierStack.place`."""
        ...

    def abandon(self, number: int) -> None:
        """See `TierStack.abandon`; answers under way may come all the same."""
        ...

    def save(self, number: int, keys: Sequence[PageKey], page_ids: Sequence[int]) -> None:
        """See `TierStack.save`; `Saved` follows also where nothing could be saved."""
        ...

    def events(self) -> Iterator[TierEvent]:
        """Yield what happened since the last look."""
        ...


class TierGroup:
    """The stacks of all ranks; see `Tiers`.

    Args:
        own: Rank 0's, which has the journals that routers follow.
        others: From rank 1 on.
    """

    def __init__(self, own: Tiers, others: Sequence[OtherTiers]) -> None:
        self._own, self._others = own, others
        self._agreement = TierAgreement(1 + len(others))

    @property
    def max_save_pages(self) -> int:
        """See `TierStack.max_save_pages`: equal on all ranks, since their pages are equally long."""
        return self._own.max_save_pages

    def fetch(self, number: int, keys: Sequence[PageKey]) -> None:
        """See `TierStack.fetch`. `Fetched` has what every rank found."""
        self._agreement.fetch(number)
        for rank in self._others:
            rank.fetch(number, keys)
        self._own.fetch(number, keys)

    def place(self, number: int, page_ids: Sequence[int]) -> None:
        """See `TierStack.place`. What a rank found beyond these pages it gives up."""
        self._agreement.place(number, len(page_ids))
        for rank in self._others:
            rank.place(number, page_ids)
        self._own.place(number, page_ids)

    def abandon(self, number: int) -> None:
        """See `TierStack.abandon`."""
        self._agreement.abandon(number)
        for rank in self._others:
            rank.abandon(number)
        self._own.abandon(number)

    def save(self, number: int, keys: Sequence[PageKey], page_ids: Sequence[int]) -> bool:
        """See `TierStack.save`. Rank 0 says whether it is begun; others wait a moment, or go without."""
        if not self._own.save(number, keys, page_ids):
            return False
        self._agreement.save(number)
        for rank in self._others:
            rank.save(number, keys, page_ids)
        return True

    def events(self) -> Iterator[TierEvent]:
        """Yield what is so on all ranks since the last look."""
        told = [(0, event) for event in self._own.events()]
        for number, rank in enumerate(self._others, 1):
            told += [(number, event) for event in rank.events()]
        agreed = [self._agreement.heard(number, event) for number, event in told]
        return iter([event for event in agreed if event is not None])

    def loads(self) -> list[TierLoad]:
        """Return what each tier holds and did on all ranks; others' are up to a second old."""
        by_name = [{load.name: load for load in rank.loads} for rank in self._others]
        return [
            load_of_node(own, [loads[own.name] for loads in by_name if own.name in loads])
            for own in self._own.loads()
        ]

    def costs(self) -> Mapping[str, TierCost]:
        """Return what each tier takes on the rank where it takes most, which all wait for."""
        return {
            name: _dearest(own, [rank.costs[name] for rank in self._others if name in rank.costs])
            for name, own in self._own.costs().items()
        }

    def journals(self) -> Mapping[str, PrefixJournal]:
        """Return rank 0's: what another rank lacks of it costs a prompt its hit."""
        return self._own.journals()

    def close(self) -> None:
        """Close rank 0's. The other ranks close their own when they end."""
        self._own.close()


def load_of_node(own: TierLoad, others: Iterable[TierLoad]) -> TierLoad:
    """Return what is to be said of a tier of several ranks.

    Each keeps its own part of each page: what they hold is the sum, but of a store with a limit of its own each
    sees the whole.

    Args:
        own: Rank 0's.
    """
    loads = [own, *others]
    size: Callable[[Iterable[int]], int] = sum if own.limit_bytes else max
    return msgspec.structs.replace(
        own,
        state=max((load.state for load in loads), key=_STATES.index),
        **{field: size(getattr(load, field) for load in loads) for field in _SIZES},
        **{field: sum(getattr(load, field) for load in loads) for field in _SUMMED},
        **{field: max(getattr(load, field) for load in loads) for field in _MOST},
    )


def _dearest(own: TierCost, others: Sequence[TierCost]) -> TierCost:
    """Return the cost of waiting for all; it is known when rank 0's is."""
    costs = [own, *others]
    return TierCost(
        max(cost.latency_s for cost in costs), max(cost.page_s for cost in costs), own.num_pages
    )
