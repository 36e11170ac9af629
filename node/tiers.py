"""The tiers behind the pool of a node: a stack of them on each rank, used from rank 0 as if it were one.

```
 Tiering ── fetch, place, abandon, save ──▶ TierGroup ─┬─▶ TierStack                    rank 0's own
         ◀── Fetched, Placed, Saved ────────           └─▶ RankProcess ──▶ RankTiers    each other rank's, by calls
```

A page is of use with the heads of every rank only. So a node has found what each of its ranks has, and placed
what each has placed; pages are given back when no rank reads or writes them any more.
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

# Of the time that a request waits: what looking may take. The rest is for the copy into the pool.
LOOKING_SHARE = 0.75
# How long a save that rank 0 began waits at a rank without memory for it, with its pages held. A tier that
# keeps up frees some in a fraction of that.
SAVE_WAIT_S = 1.0


def open_tiers(
    config: NodeConfig,
    shape: ModelShape,
    region: MemoryRegion | None,
    report: Callable[[TierEvent], None],
) -> TierStack | None:
    """Return what stands behind one rank's pool, which the caller closes before the region.

    None without tiers. Raise `ConfigInvalid` where one cannot be opened.
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
    """The tiers of a rank beside rank 0, whose calls name pages by rank 0's digests.

    Args:
        stack: Over this rank's pool; reports to rank 0.
        shard: Of this rank, as `PageSpace` has it.
    """

    def __init__(self, stack: TierStack, shard: str) -> None:
        self._stack, self._shard = stack, shard
        self.place, self.abandon, self.close = stack.place, stack.abandon, stack.close

    def fetch(self, number: int, digests: Sequence[bytes]) -> None:
        """Look through the tiers."""
        self._stack.fetch(number, self._keys(digests))

    def save(self, number: int, digests: Sequence[bytes], page_ids: Sequence[int]) -> None:
        """Put pages into the tiers as soon as there is memory. `Saved` follows, also when there is none."""
        # Rank 0 has saved its part already, and holds the pages for us: without ours they will be a miss.
        self._stack.save(number, self._keys(digests), page_ids, SAVE_WAIT_S)

    def _keys(self, digests: Sequence[bytes]) -> list[PageKey]:
        # Without blocks: routers follow rank 0's journals.
        return [PageKey(shard_key(digest, self._shard), ()) for digest in digests]


# ── at rank 0 ────────────────────────────────────────────────────────────────────────────────────


def open_group(
    config: NodeConfig,
    shape: ModelShape,
    region: MemoryRegion | None,
    waker: Waker,
    others: Sequence[RankProcess],
) -> "TierGroup | None":
    """Return the tiers of all ranks; None where there are no tiers. Raises as `open_tiers`.

    Args:
        waker: Is rung when rank 0's tiers report something.
        others: From rank 1 on.
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
        own: Rank 0's, which has the journals that routers follow.
        events: What it has reported.
        others: From rank 1 on.
    """

    def __init__(
        self, own: TierStack, events: deque[TierEvent], others: Sequence[RankProcess]
    ) -> None:
        self._own, self._events, self._others = own, events, others
        # What each rank answered, by rank, of fetches, placings and saves that are not answered by all.
        self._answers: dict[int, dict[int, TierEvent]] = {}

    @property
    def max_save_pages(self) -> int:
        """The most pages of one save: equal on all ranks, since their pages are equally long."""
        return self._own.max_save_pages

    def fetch(self, number: int, keys: Sequence[PageKey]) -> None:
        """Look through the tiers. `Fetched` has what every rank found."""
        self._begin("fetch", number, _digests(keys))
        self._own.fetch(number, keys)

    def place(self, number: int, page_ids: Sequence[int]) -> None:
        """Copy fetched pages into the pool. What a rank found beyond these pages it gives up."""
        self._begin("place", number, list(page_ids))
        self._own.place(number, page_ids)

    def abandon(self, number: int) -> None:
        """Forget a fetch."""
        self._begin("abandon", number)
        del self._answers[number]
        self._own.abandon(number)

    def save(self, number: int, keys: Sequence[PageKey], page_ids: Sequence[int]) -> bool:
        """Begin a save if rank 0 can. Other ranks wait a moment for memory, or go without."""
        is_begun = self._own.save(number, keys, page_ids)
        if is_begun:
            self._begin("save", number, _digests(keys), list(page_ids))
        return is_begun

    def events(self) -> Iterator[TierEvent]:
        """Yield what holds on all ranks since the last look."""
        heard = [(0, self._events.popleft()) for _ in range(len(self._events))]
        for number, rank in enumerate(self._others, 1):
            heard += [(number, event) for event in rank.take_events("tiers")]
        agreed = [self._agree(rank, event) for rank, event in heard]
        return iter([event for event in agreed if event is not None])

    def loads(self) -> list[TierLoad]:
        """Return rank 0's loads, with the bytes of all ranks: each keeps an equal part of each page."""
        return [load_of_node(load, 1 + len(self._others)) for load in self._own.loads()]

    def costs(self) -> Mapping[str, TierCost]:
        """Return rank 0's."""
        return self._own.costs()

    def journals(self) -> Mapping[str, PrefixJournal]:
        """Return rank 0's: what another rank lacks of it costs a prompt its hit."""
        return self._own.journals()

    def close(self) -> None:
        """Close rank 0's. The other ranks close their own when they end."""
        self._own.close()

    def _begin(self, method: str, number: int, *arguments: object) -> None:
        self._answers[number] = {}
        for rank in self._others:
            rank.call("tiers", method, number, *arguments)

    def _agree(self, rank: int, event: TierEvent) -> TierEvent | None:
        """Return what holds for the node.

        None: other ranks have to answer first, or it is a late answer of what is over.
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


def load_of_node(load: TierLoad, num_ranks: int) -> TierLoad:
    """Return the load of a tier over several ranks by rank 0's.

    Of a store without `limit_bytes` each rank sees the whole.
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
