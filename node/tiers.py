"""The tiers behind the pool of a node: one stack on each rank, and rank 0's view of all of them as one.

```
 Tiering ── fetch, place, abandon, save ──▶ TierGroup ─┬─▶ TierStack                    rank 0's own
         ◀── Fetched, Placed, Saved ────────           └─▶ RemoteTiers ──▶ RankTiers    each other rank's, by calls
```

A page is of use with the heads of every rank only. So a node has found what each of its ranks has, and placed
what each has placed; pages are given back when no rank reads or writes them any more.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from typing_extensions import override

from tandem.engine.shape import ModelShape
from tandem.kvtier.guard import TierCost
from tandem.kvtier.spec import make_tier, parse_tiers
from tandem.kvtier.stack import Fetched, Placed, Saved, TierEvent, TierStack
from tandem.kvtransfer.region import MemoryRegion
from tandem.node.config import NodeConfig
from tandem.node.pool import pool_pages
from tandem.telemetry.log import get_logger
from tandem.wire.channel import Waker
from tandem.wire.messages import TierLoad
from tandem.wire.prefixes import PageKey, PrefixJournal, shard_key

log = get_logger(__name__)

# Of the time that a request waits: what looking may take. The rest is for the copy into the pool.
LOOKING_SHARE = 0.75
# How long a save that rank 0 has begun waits at a rank that has no memory for it now, with its pages held. The
# puts of a tier that keeps up free some in a fraction of that.
SAVE_WAIT_S = 1.0
# Between two tries.
_SAVE_AGAIN_S = 0.05
# Sizes and bytes are for operators, who look no oftener.
_REPORT_S = 1.0

# From what one wishes for to what one looks at first.
_STATES = ("up", "full", "backing_off")
_SUMMED = ("put_bytes", "got_bytes", "num_evicted", "num_corrupted", "num_failures")
# What one rank lacks, or has too late, all do without. What was hit is the same on all.
_MOST = ("missed_tokens", "late_tokens")
_SIZES = ("num_pages", "num_bytes", "limit_bytes")


def open_tiers(
    config: NodeConfig, shape: ModelShape, region: MemoryRegion | None, waker: Waker
) -> TierStack | None:
    """Return what stands behind the pool of one rank; None when there are no tiers.

    The caller closes it before the region.

    Args:
        shape: Of the rank's shard.
        region: Its pool.

    Raises:
        ConfigInvalid: A tier cannot be opened; the sentence names what to do.
    """
    engine, tiers = config.engine, config.tiers
    if not tiers.specs:
        return None
    assert region is not None, "a node with tiers has made its pool's memory itself"
    pages = pool_pages(region, shape.kv_bytes_per_token * engine.page_size)
    space = shape.page_space(engine.page_size, engine.tp_rank, engine.tp_size)
    opened = []
    for spec in parse_tiers(tiers.specs):
        opened.append(make_tier(spec, pages, space))
        log.info("kv_tier.opened", tier=spec.name, spec=spec.text)
    return TierStack(
        opened,
        pages,
        waker,
        timeout_s=LOOKING_SHARE * tiers.timeout_s,
        max_staged_bytes=tiers.staging_bytes // engine.tp_size,
        page_size=engine.page_size,
    )


# ── at another rank ──────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class TierReport:
    """What a rank's tiers hold and did; see `TierStack.loads` and `costs`."""

    loads: list[TierLoad]
    costs: Mapping[str, TierCost]


class RankTiers:
    """The tiers of a rank beside rank 0, which calls them through `RemoteTiers`. Any thread may use it.

    Args:
        stack: Over this rank's pool; closed here.
        shard: Of this rank, as `PageSpace` has it.
        wake: Has another thread take `events` soon.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        stack: TierStack,
        shard: str,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stack, self._shard, self._wake, self._clock = stack, shard, wake, clock
        self._lock = threading.Lock()
        # Saves that are not begun yet, each with when it is given up.
        self._saves: deque[tuple[int, list[PageKey], list[int], float]] = deque()
        self._reported: TierReport | None = None
        self._report_after_s = 0.0

    def fetch(self, number: int, digests: Sequence[bytes]) -> None:
        """Look through the tiers; see `TierStack.fetch`."""
        with self._lock:
            self._stack.fetch(number, self._keys(digests))

    def place(self, number: int, page_ids: Sequence[int]) -> None:
        """Copy fetched pages into the pool; see `TierStack.place`."""
        with self._lock:
            self._stack.place(number, page_ids)

    def abandon(self, number: int) -> None:
        """Forget a fetch; see `TierStack.abandon`."""
        with self._lock:
            self._stack.abandon(number)

    def save(self, number: int, digests: Sequence[bytes], page_ids: list[int]) -> None:
        """Put pages into the tiers once there is memory. `Saved` follows, also when there is none."""
        with self._lock:
            until_s = self._clock() + SAVE_WAIT_S
            self._saves.append((number, self._keys(digests), page_ids, until_s))
        self._wake()

    def events(self) -> list[TierEvent | TierReport]:
        """Begin saves that had to wait, and return what happened since the last look."""
        with self._lock:
            return [*self._begin_saves(), *self._stack.events(), *self._report()]

    def wait_s(self) -> float:
        """Return how long one may wait before asking for `events` again, unless woken."""
        return _SAVE_AGAIN_S if self._saves else _REPORT_S

    def close(self) -> None:
        """Close the tiers; see `TierStack.close`."""
        self._stack.close()

    def _begin_saves(self) -> Iterator[Saved]:
        while self._saves:
            number, keys, page_ids, until_s = self._saves[0]
            if not self._stack.save(number, keys, page_ids):
                if self._clock() < until_s:
                    return
                # These pages will be a miss. Rank 0 has saved its part already, and holds the pages for us.
                yield Saved(number)
            self._saves.popleft()

    def _report(self) -> Iterator[TierReport]:
        if self._clock() < self._report_after_s:
            return
        self._report_after_s = self._clock() + _REPORT_S
        report = TierReport(self._stack.loads(), dict(self._stack.costs()))
        if report != self._reported:
            self._reported = report
            yield report

    def _keys(self, digests: Sequence[bytes]) -> list[PageKey]:
        # Without blocks: routers follow rank 0's journals.
        return [PageKey(shard_key(digest, self._shard), ()) for digest in digests]


# ── at rank 0 ────────────────────────────────────────────────────────────────────────────────────


class RemoteTiers:
    """The tiers of another rank, as rank 0 sees them.

    Args:
        call: Has a method of the rank's `RankTiers` called, after those before.
        take: Returns what the rank reported since the last call.

    Attributes:
        loads, costs: As the rank reported them last; empty before.
    """

    def __init__(self, call: Callable[..., None], take: Callable[[], Iterable[Any]]) -> None:
        self.call, self._take = call, take
        self.loads: Sequence[TierLoad] = ()
        self.costs: Mapping[str, TierCost] = {}

    def events(self) -> Iterator[TierEvent]:
        """Yield what happened since the last look."""
        for event in self._take():
            if isinstance(event, TierReport):
                self.loads, self.costs = event.loads, event.costs
            else:
                yield event


class TierGroup:
    """The stacks of all ranks as one `TierStack`.

    Args:
        own: Rank 0's, which has the journals that routers follow.
        others: From rank 1 on.
    """

    def __init__(self, own: TierStack, others: Sequence[RemoteTiers]) -> None:
        self._own, self._others = own, others
        # What each rank answered, by rank, of fetches, placings and saves that are not answered by all.
        self._answers: dict[int, dict[int, TierEvent]] = {}

    @property
    def max_save_pages(self) -> int:
        """The most pages of one save: equal on all ranks, since their pages are equally long."""
        return self._own.max_save_pages

    def fetch(self, number: int, keys: Sequence[PageKey]) -> None:
        """See `TierStack.fetch`. `Fetched` has what every rank found."""
        self._answers[number] = {}
        self._call_others("fetch", number, _digests(keys))
        self._own.fetch(number, keys)

    def place(self, number: int, page_ids: Sequence[int]) -> None:
        """See `TierStack.place`. What a rank found beyond these pages it gives up."""
        self._answers[number] = {}
        self._call_others("place", number, list(page_ids))
        self._own.place(number, page_ids)

    def abandon(self, number: int) -> None:
        """See `TierStack.abandon`."""
        self._answers.pop(number, None)
        self._call_others("abandon", number)
        self._own.abandon(number)

    def save(self, number: int, keys: Sequence[PageKey], page_ids: Sequence[int]) -> bool:
        """See `TierStack.save`. Rank 0 decides whether it begins; others wait a moment, or go without."""
        if not self._own.save(number, keys, page_ids):
            return False
        self._answers[number] = {}
        self._call_others("save", number, _digests(keys), list(page_ids))
        return True

    def events(self) -> Iterator[TierEvent]:
        """Yield what holds on all ranks since the last look."""
        heard = [(0, event) for event in self._own.events()]
        for number, rank in enumerate(self._others, 1):
            heard += [(number, event) for event in rank.events()]
        agreed = [self._agree(rank, event) for rank, event in heard]
        return iter([event for event in agreed if event is not None])

    def loads(self) -> list[TierLoad]:
        """Return what each tier holds and did on all ranks; others' are up to a second old."""
        by_name = [{load.name: load for load in rank.loads} for rank in self._others]
        return [
            load_of_node(own, [loads[own.name] for loads in by_name if own.name in loads])
            for own in self._own.loads()
        ]

    def costs(self) -> Mapping[str, TierCost]:
        """Return what each tier takes on the slowest rank, which all wait for; known when rank 0's is."""
        return {
            name: _dearest([own, *(r.costs[name] for r in self._others if name in r.costs)])
            for name, own in self._own.costs().items()
        }

    def journals(self) -> Mapping[str, PrefixJournal]:
        """Return rank 0's: what another rank lacks of it costs a prompt its hit."""
        return self._own.journals()

    def close(self) -> None:
        """Close rank 0's. The other ranks close their own when they end."""
        self._own.close()

    def _call_others(self, method: str, *arguments: object) -> None:
        for rank in self._others:
            rank.call(method, *arguments)

    def _agree(self, rank: int, event: TierEvent) -> TierEvent | None:
        """Return what holds for the node by what a rank reports; None: other ranks have to answer first.

        An answer to what is over comes late, of a fetch that was abandoned, and is passed over.
        """
        answers = self._answers.get(event.number)
        if answers is None:
            return None
        answers[rank] = event
        # What one has nothing of is of no use, whatever others find. But where a copy failed on one rank another
        # may still write, and nobody may have its pages until then.
        is_nothing = isinstance(event, Fetched) and not event.num_pages
        if len(answers) <= len(self._others) and not is_nothing:
            return None
        del self._answers[event.number]
        by_rank = [answers[number] for number in sorted(answers)]
        match event:
            case Fetched():
                # The first of the ranks that found the least names where that came from.
                found = [each for each in by_rank if isinstance(each, Fetched)]
                return min(found, key=lambda each: each.num_pages)
            case Placed():
                is_whole = all(each.is_whole for each in by_rank if isinstance(each, Placed))
                return Placed(event.number, is_whole)
            case Saved():
                return event

    @override
    def __repr__(self) -> str:
        return f"TierGroup({1 + len(self._others)} ranks, {len(self._answers)} to be agreed on)"


Tiers = TierStack | TierGroup


def load_of_node(own: TierLoad, others: Iterable[TierLoad]) -> TierLoad:
    """Return the load of a tier over several ranks.

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


def _dearest(costs: Sequence[TierCost]) -> TierCost:
    return TierCost(
        max(cost.latency_s for cost in costs),
        max(cost.page_s for cost in costs),
        costs[0].num_pages,
    )


def _digests(keys: Sequence[PageKey]) -> list[bytes]:
    return [key.digest for key in keys]
