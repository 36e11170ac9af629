"""The tiers of a node: each rank has a stack, and rank 0 uses them all as one.

```
 Tiering ── fetch, place, abandon, save ──▶ TierGroup ─┬─▶ TierStack                    rank 0
         ◀── Fetched, Placed, Saved ────────           └─▶ RankProcess ──▶ RankTiers    each other rank, by calls
```

A page is usable only with the heads of every rank. So a node has found, or placed, the pages that all of its ranks
have found, or placed. Pages are released when no rank reads or writes them any more.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from tandem.engine.shape import ModelShape
from tandem.kvtier.guard import TierCost
from tandem.kvtier.spec import make_tier, parse_tiers
from tandem.kvtier.stack import Fetched, Placed, Saved, TierEvent, TierStack
from tandem.kvtransfer.region import MemoryRegion
from tandem.node.config import NodeConfig
from tandem.node.pool import pool_pages
from tandem.node.ranks import RankProcess
from tandem.telemetry.log import get_logger
from tandem.wire.channel import Waker
from tandem.wire.messages import TierLoad
from tandem.wire.prefixes import PageKey, PrefixJournal, shard_key

log = get_logger(__name__)

# Share of a request's waiting time for searching the tiers. The rest is for the copy into the pool.
LOOKING_SHARE = 0.75
# How long another rank waits for memory to join a save that rank 0 began; the pages stay held. A tier that
# keeps up frees memory in a fraction of that.
SAVE_WAIT_S = 1.0


def open_tiers(
    config: NodeConfig,
    shape: ModelShape,
    region: MemoryRegion | None,
    report: Callable[[TierEvent], None],
) -> TierStack | None:
    """Return the stack of tiers of one rank, or None without tiers. The caller closes it before the region.

    Raise `ConfigInvalid` if a tier cannot be opened.
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
        report,
        timeout_s=LOOKING_SHARE * tiers.timeout_s,
        max_staged_bytes=tiers.staging_bytes // engine.tp_size,
        page_size=engine.page_size,
    )


# ── at another rank ──────────────────────────────────────────────────────────────────────────────


class RankTiers:
    """The tiers of a rank other than 0. Calls from rank 0 name pages by rank 0's digests.

    Args:
        stack: The tiers of this rank's pool; it reports to rank 0.
        shard: This rank's `PageSpace.shard`.
    """

    def __init__(self, stack: TierStack, shard: str) -> None:
        self._stack, self._shard = stack, shard
        self.place, self.abandon, self.close = stack.place, stack.abandon, stack.close

    def fetch(self, number: int, digests: Sequence[bytes]) -> None:
        """Search the tiers for pages."""
        self._stack.fetch(number, self._keys(digests))

    def save(self, number: int, digests: Sequence[bytes], page_ids: Sequence[int]) -> None:
        """Put pages into the tiers, waiting for host memory if necessary. `Saved` follows even if none is free."""
        # Rank 0 has begun to save its shard and holds the pages for this rank. Without this shard they are a miss.
        self._stack.save(number, self._keys(digests), page_ids, SAVE_WAIT_S)

    def _keys(self, digests: Sequence[bytes]) -> list[PageKey]:
        # No block names: routers follow only rank 0's journals.
        return [PageKey(shard_key(digest, self._shard), ()) for digest in digests]


# ── at rank 0 ────────────────────────────────────────────────────────────────────────────────────


def open_group(
    config: NodeConfig,
    shape: ModelShape,
    region: MemoryRegion | None,
    waker: Waker,
    others: Sequence[RankProcess],
) -> "TierGroup | None":
    """Return the tiers of all ranks, or None without tiers. Raise as `open_tiers` does.

    Args:
        waker: Rung when rank 0's tiers report an event.
        others: Ranks 1 and up, in order.
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
        own: Rank 0's stack, with the journals that routers follow.
        events: The events that `own` has reported.
        others: Ranks 1 and up, in order.
    """

    def __init__(
        self, own: TierStack, events: deque[TierEvent], others: Sequence[RankProcess]
    ) -> None:
        self._own, self._events, self._others = own, events, others
        # Answers by number and rank, for fetches, placements and saves that some ranks have yet to answer.
        self._answers: dict[int, dict[int, TierEvent]] = {}

    @property
    def max_save_pages(self) -> int:
        """Maximum number of pages per save; equal on all ranks, because their pages have equal sizes."""
        return self._own.max_save_pages

    def fetch(self, number: int, keys: Sequence[PageKey]) -> None:
        """Search the tiers. `Fetched` reports the pages that every rank found."""
        self._begin("fetch", number, _digests(keys))
        self._own.fetch(number, keys)

    def place(self, number: int, page_ids: Sequence[int]) -> None:
        """Copy fetched pages into the pool. A rank that found more pages drops the rest."""
        self._begin("place", number, list(page_ids))
        self._own.place(number, page_ids)

    def abandon(self, number: int) -> None:
        """Cancel a fetch."""
        self._begin("abandon", number)
        del self._answers[number]
        self._own.abandon(number)

    def save(self, number: int, keys: Sequence[PageKey], page_ids: Sequence[int]) -> bool:
        """Begin a save if rank 0 can; return whether it did. Other ranks wait up to `SAVE_WAIT_S` or skip the save."""
        is_begun = self._own.save(number, keys, page_ids)
        if is_begun:
            self._begin("save", number, _digests(keys), list(page_ids))
        return is_begun

    def events(self) -> Iterator[TierEvent]:
        """Return the events that all ranks have agreed on since the last call."""
        heard = [(0, self._events.popleft()) for _ in range(len(self._events))]
        for number, rank in enumerate(self._others, 1):
            heard += [(number, event) for event in rank.take_events("tiers")]
        agreed = [self._agree(rank, event) for rank, event in heard]
        return iter([event for event in agreed if event is not None])

    def loads(self) -> list[TierLoad]:
        """Return rank 0's loads, scaled to all ranks: each rank stores an equal shard of each page."""
        return [load_of_node(load, 1 + len(self._others)) for load in self._own.loads()]

    def costs(self) -> Mapping[str, TierCost]:
        """Return the costs of rank 0's tiers."""
        return self._own.costs()

    def journals(self) -> Mapping[str, PrefixJournal]:
        """Return rank 0's journals. A page in them that another rank lacks is a miss."""
        return self._own.journals()

    def close(self) -> None:
        """Close rank 0's stack. The other ranks close their stacks when they end."""
        self._own.close()

    def _begin(self, method: str, number: int, *arguments: object) -> None:
        self._answers[number] = {}
        for rank in self._others:
            rank.call("tiers", method, number, *arguments)

    def _agree(self, rank: int, event: TierEvent) -> TierEvent | None:
        """Return the event that now holds for the whole node.

        None: other ranks have yet to answer, or the answer is late and its operation is over.
        """
        answers = self._answers.get(event.number)
        if answers is None:
            return None
        answers[rank] = event
        # One rank's miss makes the whole fetch a miss at once. A failed copy must wait for all answers: other ranks
        # may still be writing, and the pages must stay held until they finish.
        is_nothing = isinstance(event, Fetched) and not event.num_pages
        if len(answers) <= len(self._others) and not is_nothing:
            return None
        del self._answers[event.number]
        by_rank = [answers[number] for number in sorted(answers)]
        match event:
            case Fetched():
                # `by_tier` comes from the first of the ranks that found the fewest pages.
                found = [each for each in by_rank if isinstance(each, Fetched)]
                return min(found, key=lambda each: each.num_pages)
            case Placed():
                is_whole = all(each.is_whole for each in by_rank if isinstance(each, Placed))
                return Placed(event.number, is_whole)
            case Saved():
                return event


def load_of_node(load: TierLoad, num_ranks: int) -> TierLoad:
    """Return a tier's load for all ranks, computed from rank 0's load.

    Without `limit_bytes` the tier is a store whose full size each rank sees.
    """
    num_parts = num_ranks if load.limit_bytes else 1
    return msgspec.structs.replace(
        load,
        num_pages=load.num_pages * num_parts,
        num_bytes=load.num_bytes * num_parts,
        limit_bytes=load.limit_bytes * num_ranks,
        put_bytes=load.put_bytes * num_ranks,
        got_bytes=load.got_bytes * num_ranks,
    )


def _digests(keys: Sequence[PageKey]) -> list[bytes]:
    return [key.digest for key in keys]
