"""The tiers of a node: each rank has a stack, and rank 0 uses all stacks as one.

```
 Tiering ── fetch, place, cancel, save ──▶ TierGroup ─┬─▶ TierStack                    rank 0
         ◀── Fetched, Placed, Saved ────────           └─▶ RankProcess ──▶ RankTiers    each other rank, by calls
```

A page is usable only with the heads of every rank, so a node has found or placed a page only once all its ranks have.
Pages are released when no rank reads or writes them any more.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from tandem.engine.shape import ModelShape
from tandem.kvtier.guard import TierCost
from tandem.kvtier.spec import make_tier, parse_tiers
from tandem.kvtier.stack import Fetched, Placed, Saved, TierEvent, TierStack
from tandem.kvtier.tier import PoolPages
from tandem.kvtransfer.region import MemoryRegion
from tandem.node.config import NodeConfig, TierConfig
from tandem.node.ranks.pool import Piece, pool_pages
from tandem.node.ranks.ranks import RankProcess
from tandem.telemetry.log import get_logger
from tandem.wire.channel import Waker
from tandem.wire.messages import TierLoad
from tandem.wire.prefixes import PageKey, PageSpace, PrefixJournal, shard_key

log = get_logger(__name__)

# Share of a request's waiting time for the search of the tiers. The rest is for the copy into the pool.
SEARCH_SHARE = 0.75
# Maximum time that a rank waits for staging memory before it skips a save that rank 0 has started. The pages stay held
# meanwhile. A tier that keeps up frees memory in a fraction of that time.
SAVE_WAIT_S = 1.0


def open_tiers(
    config: NodeConfig,
    shape: ModelShape,
    region: MemoryRegion | None,
    report: Callable[[TierEvent], None],
) -> TierStack | None:
    """Open the tiers of one rank; None if there are none. The caller must close the stack before the region.

    Raise `ConfigInvalid` if a tier cannot be opened.
    """
    engine = config.engine
    if not config.tiers.specs:
        return None
    assert region is not None, "a node with tiers has allocated its pool's memory itself"
    page_bytes = shape.kv_bytes_per_token * engine.page_size
    pages = pool_pages(region, [Piece(0, page_bytes, page_bytes)])
    space = shape.page_space(engine.page_size, engine.tp_rank, engine.tp_size)
    return open_stack(config.tiers, pages, space, report)


def open_stack(
    config: TierConfig, pages: PoolPages, space: PageSpace, report: Callable[[TierEvent], None]
) -> TierStack:
    """Open the tiers of one rank's pool. Raise `ConfigInvalid` if one cannot be opened."""
    opened = []
    for spec in parse_tiers(config.specs):
        opened.append(make_tier(spec, pages, space))
        log.info("kv_tier.opened", tier=spec.name, spec=spec.text)
    return TierStack(
        opened,
        pages,
        report,
        timeout_s=SEARCH_SHARE * config.timeout_s,
        max_staged_bytes=config.staging_bytes // space.num_shards,
        page_size=space.page_size,
    )


# ── at ranks other than 0 ────────────────────────────────────────────────────────────────────────


class RankTiers:
    """The tiers of a rank other than 0. Rank 0 calls it with its own digests.

    Args:
        stack: Tiers of this rank's pool, which report to rank 0.
        shard: `PageSpace.shard` of this rank.
    """

    def __init__(self, stack: TierStack, shard: str) -> None:
        self._stack, self._shard = stack, shard
        self.place, self.cancel, self.close = stack.place, stack.cancel, stack.close

    def fetch(self, number: int, digests: Sequence[bytes]) -> None:
        """Search the tiers for pages."""
        self._stack.fetch(number, self._keys(digests))

    def save(self, number: int, digests: Sequence[bytes], page_ids: Sequence[int]) -> None:
        """Put pages into the tiers, waiting for host memory if necessary. `Saved` follows even if none becomes free."""
        # Rank 0 is saving its shard and holds the pages for this rank. If this rank's shard is missing, fetches miss.
        self._stack.save(number, self._keys(digests), page_ids, SAVE_WAIT_S)

    def _keys(self, digests: Sequence[bytes]) -> list[PageKey]:
        # No block names, because routers read only rank 0's journals.
        return [PageKey(shard_key(digest, self._shard), ()) for digest in digests]


# ── at rank 0 ────────────────────────────────────────────────────────────────────────────────────


def open_group(
    config: NodeConfig,
    shape: ModelShape,
    region: MemoryRegion | None,
    waker: Waker,
    others: Sequence[RankProcess],
) -> "TierGroup | None":
    """Open the tiers of all ranks; None if there are none. Raises the errors of `open_tiers`.

    Args:
        waker: Set when rank 0's tiers report an event.
        others: Ranks from 1, in order.
    """
    events = deque[TierEvent]()

    def report(event: TierEvent) -> None:
        events.append(event)
        waker.wake()

    own = open_tiers(config, shape, region, report)
    return None if own is None else TierGroup(own, events, others)


class TierGroup:
    """The stacks of all ranks, used as one.

    Args:
        own: Rank 0's stack, whose journals routers read.
        events: Events that `own` reports.
        others: Ranks from 1, in order.
    """

    def __init__(
        self, own: TierStack, events: deque[TierEvent], others: Sequence[RankProcess]
    ) -> None:
        self._own, self._events, self._others = own, events, others
        # Answers by number and rank, for fetches, placements and saves that not all ranks have answered.
        self._answers: dict[int, dict[int, TierEvent]] = {}

    @property
    def max_save_pages(self) -> int:
        """Maximum number of pages per save. Equal on all ranks, because their pages have the same size."""
        return self._own.max_save_pages

    def fetch(self, number: int, keys: Sequence[PageKey]) -> None:
        """Search the tiers. `Fetched` reports the pages that every rank found."""
        self._begin("fetch", number, _digests(keys))
        self._own.fetch(number, keys)

    def place(self, number: int, page_ids: Sequence[int]) -> None:
        """Copy fetched pages into the pool. A rank that found more pages drops the rest."""
        self._begin("place", number, list(page_ids))
        self._own.place(number, page_ids)

    def cancel(self, number: int) -> None:
        """Cancel a fetch."""
        self._begin("cancel", number)
        del self._answers[number]
        self._own.cancel(number)

    def save(self, number: int, keys: Sequence[PageKey], page_ids: Sequence[int]) -> bool:
        """Start a save if rank 0 can; return whether it did. Other ranks wait up to `SAVE_WAIT_S`, then skip it."""
        is_begun = self._own.save(number, keys, page_ids)
        if is_begun:
            self._begin("save", number, _digests(keys), list(page_ids))
        return is_begun

    def events(self) -> Iterator[TierEvent]:
        """Return the events that all ranks have reported since the last call, merged."""
        received = [(0, self._events.popleft()) for _ in range(len(self._events))]
        for number, rank in enumerate(self._others, 1):
            received += [(number, event) for event in rank.take_events("tiers")]
        merged = [self._merge(rank, event) for rank, event in received]
        return iter([event for event in merged if event is not None])

    def loads(self) -> list[TierLoad]:
        """Return rank 0's loads, scaled to all ranks: each rank stores an equal shard of each page."""
        return [load_of_node(load, 1 + len(self._others)) for load in self._own.loads()]

    def costs(self) -> Mapping[str, TierCost]:
        """Return the costs of rank 0's tiers."""
        return self._own.costs()

    def journals(self) -> Mapping[str, PrefixJournal]:
        """Return rank 0's journals. A page in them that a different rank lacks is a miss."""
        return self._own.journals()

    def close(self) -> None:
        """Close rank 0's stack. The other ranks close their stacks when they end."""
        self._own.close()

    def _begin(self, method: str, number: int, *arguments: object) -> None:
        self._answers[number] = {}
        for rank in self._others:
            rank.call("tiers", method, number, *arguments)

    def _merge(self, rank: int, event: TierEvent) -> TierEvent | None:
        """Record the event of a rank; return the node's event if it is now known.

        None: other ranks have not answered yet, or the operation has already ended.
        """
        answers = self._answers.get(event.number)
        if answers is None:
            return None
        answers[rank] = event
        # A miss on one rank makes the fetch a miss immediately. A failed copy must wait for all answers: other ranks may
        # still be writing, and the pages must stay held until they finish.
        is_miss = isinstance(event, Fetched) and not event.num_pages
        if len(answers) <= len(self._others) and not is_miss:
            return None
        del self._answers[event.number]
        by_rank = [answers[number] for number in sorted(answers)]
        match event:
            case Fetched():
                # Use `by_tier` of the rank that found the fewest pages; of the first, if there are several.
                found = [each for each in by_rank if isinstance(each, Fetched)]
                return min(found, key=lambda each: each.num_pages)
            case Placed():
                is_complete = all(each.is_complete for each in by_rank if isinstance(each, Placed))
                return Placed(event.number, is_complete)
            case Saved():
                return event


def load_of_node(load: TierLoad, num_ranks: int) -> TierLoad:
    """Scale a tier's load from rank 0 to all ranks.

    If the tier is a shared store or sets its own limit, each rank already reports the total.
    """
    num_parts = 1 if load.store or not load.limit_bytes else num_ranks
    return msgspec.structs.replace(
        load,
        num_pages=load.num_pages * num_parts,
        num_bytes=load.num_bytes * num_parts,
        limit_bytes=load.limit_bytes * num_parts,
        put_bytes=load.put_bytes * num_ranks,
        got_bytes=load.got_bytes * num_ranks,
    )


def _digests(keys: Sequence[PageKey]) -> list[bytes]:
    return [key.digest for key in keys]
