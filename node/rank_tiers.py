"""Tiers of a rank beside rank 0: its stack at the rank, and the same stack as rank 0 sees it.

```
 rank 0: TierGroup ─▶ RemoteTiers ──FetchPages──▶ pipe ──▶ rank: loop ─▶ RankTiers.do ─▶ TierStack ─▶ host, disk, redis
                   ◀─ events  ◀──FetchedHere──────────────────────── RankTiers.events ◀─┘
```

A rank's loop hands over what it is told in the order it was told: a page is saved after the forward that wrote it,
and a forward that reads a placed page is told after all ranks said that it is there. On a GPU a forward is only begun
when the next message is read; but what is saved was collected by rank 0, and the last layer's sum over all ranks,
without which rank 0 has no result, stands behind all writes of KV in each rank's stream.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from tandem.kvtier.cost import TierCost
from tandem.kvtier.events import Fetched, Placed, Saved, TierEvent
from tandem.node.rank_messages import (
    AbandonFetch,
    FetchedHere,
    FetchPages,
    FromTiers,
    PlacedHere,
    PlacePages,
    SavedHere,
    SavePages,
    TiersHere,
    ToTiers,
)
from tandem.node.ranks import RankProcess
from tandem.node.tier_group import Tiers
from tandem.telemetry.log import get_logger
from tandem.wire.channel import Waker, wait
from tandem.wire.errors import PeerLost
from tandem.wire.messages import TierLoad
from tandem.wire.page_keys import PageKey, shard_key

log = get_logger(__name__)

# A save that rank 0 has begun waits so long at a rank that has no memory for it now: puts of a tier that keeps up
# free some in a fraction of that. Its pages are held meanwhile.
SAVE_WAIT_S = 1.0
# Between two tries.
_SAVE_AGAIN_S = 0.05
# Sizes and bytes are for operators, who look no oftener.
_TELL_S = 1.0


class RankTiers:
    """The tiers behind the pool of a rank, told by rank 0. Belongs to one thread.

    Args:
        stack: Over this rank's pool; closed here.
        shard: Of this rank, as `PageSpace` has it.
        clock: Seconds that only grow.
    """

    def __init__(
        self, stack: Tiers, shard: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stack, self._shard, self._clock = stack, shard, clock
        # Not begun yet, each with when it is given up.
        self._saves: deque[tuple[SavePages, float]] = deque()
        self._told: TiersHere | None = None
        self._tell_after_s = 0.0

    def do(self, message: ToTiers) -> None:
        """Do what rank 0's stack does."""
        match message:
            case FetchPages():
                self._stack.fetch(message.number, self._keys(message.digests))
            case PlacePages():
                self._stack.place(message.number, message.page_ids)
            case AbandonFetch():
                self._stack.abandon(message.number)
            case SavePages():
                self._saves.append((message, self._clock() + SAVE_WAIT_S))

    def events(self) -> Iterator[FromTiers]:
        """Yield what happened and was not told yet; saves that had to wait are begun."""
        yield from self._begin_saves()
        yield from map(_pack, self._stack.events())
        yield from self._loads()

    def wait_s(self, at_most_s: float) -> float:
        """Return how long one may wait before asking for `events` again, unless the stack's waker rings."""
        return min(at_most_s, _SAVE_AGAIN_S) if self._saves else at_most_s

    def close(self) -> None:
        """See `TierStack.close`."""
        self._stack.close()

    def _begin_saves(self) -> Iterator[SavedHere]:
        while self._saves:
            save, until_s = self._saves[0]
            if not self._stack.save(save.number, self._keys(save.digests), save.page_ids):
                if self._clock() < until_s:
                    return
                # They will be a miss. Rank 0 has saved its part already, and holds the pages for us.
                yield SavedHere(number=save.number)
            self._saves.popleft()

    def _loads(self) -> Iterator[TiersHere]:
        now_s = self._clock()
        if now_s < self._tell_after_s:
            return
        self._tell_after_s = now_s + _TELL_S
        tiers = TiersHere(loads=self._stack.loads(), costs=dict(self._stack.costs()))
        if tiers != self._told:
            self._told = tiers
            yield tiers

    def _keys(self, digests: Sequence[bytes]) -> list[PageKey]:
        # Without blocks: routers follow rank 0's journals.
        return [PageKey(shard_key(digest, self._shard), ()) for digest in digests]


class RankTiersThread:
    """Runs the tiers of a rank beside its loop.

    Rank 0 asks its own stack at the end of a step; what another rank said only at the end of that step would
    come just behind, and where a step is longer than a request waits, too late each time.

    Args:
        tiers: Closed here.
        waker: The stack's; closed here.
        send: Tells rank 0.
    """

    def __init__(self, tiers: RankTiers, waker: Waker, send: Callable[[FromTiers], None]) -> None:
        self._tiers, self._waker, self._send = tiers, waker, send
        self._told: deque[ToTiers] = deque()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="kv-tiers", daemon=True)
        self._thread.start()

    def do(self, message: ToTiers) -> None:
        """Have something done, after what was told before; does not wait."""
        self._told.append(message)
        self._waker.wake()

    def close(self) -> None:
        """Close the tiers: no pool memory is touched after this returns."""
        self._is_over = True
        self._waker.wake()
        self._thread.join()
        self._tiers.close()
        self._waker.close()

    def _run(self) -> None:
        try:
            while not self._is_over:
                wait([], self._tiers.wait_s(_TELL_S), self._waker)
                while self._told:
                    self._tiers.do(self._told.popleft())
                for event in self._tiers.events():
                    self._send(event)
        except PeerLost:
            return  # rank 0 is gone; the loop ends
        except BaseException:
            # As with an error in the loop: pages that rank 0 holds for this rank would be held for good.
            log.exception("rank.tiers_failed", effect="the rank ends")
            os._exit(1)


class RemoteTiers:
    """A rank's tiers, as rank 0 sees them; see `OtherTiers`."""

    def __init__(self, rank: RankProcess) -> None:
        self._rank = rank
        self.loads: Sequence[TierLoad] = ()
        self.costs: Mapping[str, TierCost] = {}

    def fetch(self, number: int, keys: Sequence[PageKey]) -> None:
        """See `OtherTiers.fetch`."""
        self._rank.send(FetchPages(number=number, digests=_digests(keys)))

    def place(self, number: int, page_ids: Sequence[int]) -> None:
        """See `OtherTiers.place`."""
        self._rank.send(PlacePages(number=number, page_ids=list(page_ids)))

    def abandon(self, number: int) -> None:
        """See `OtherTiers.abandon`."""
        self._rank.send(AbandonFetch(number=number))

    def save(self, number: int, keys: Sequence[PageKey], page_ids: Sequence[int]) -> None:
        """See `OtherTiers.save`."""
        save = SavePages(number=number, digests=_digests(keys), page_ids=list(page_ids))
        self._rank.send(save)

    def events(self) -> Iterator[TierEvent]:
        """See `OtherTiers.events`."""
        for message in self._rank.take_tier_events():
            match message:
                case FetchedHere():
                    yield Fetched(message.number, message.num_pages, message.by_tier)
                case PlacedHere():
                    yield Placed(message.number, message.is_whole)
                case SavedHere():
                    yield Saved(message.number)
                case TiersHere():
                    self.loads, self.costs = message.loads, message.costs


def _digests(keys: Sequence[PageKey]) -> list[bytes]:
    return [key.digest for key in keys]


def _pack(event: TierEvent) -> FromTiers:
    match event:
        case Fetched():
            return FetchedHere(
                number=event.number, num_pages=event.num_pages, by_tier=dict(event.by_tier)
            )
        case Placed():
            return PlacedHere(number=event.number, is_whole=event.is_whole)
        case Saved():
            return SavedHere(number=event.number)
