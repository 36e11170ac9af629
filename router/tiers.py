"""What a router knows of the tiers behind the nodes' prefix caches. Pure.

```
 node ── NodeLoad.tiers ──▶ NodePrefixes.heard: which tiers, what they cost ──▶ CachedTier, of those that save
      ── CacheReport ─────▶ NodePrefixes.take ─┬─▶ its cache, a tier of its own: one life each ──▶ PrefixIndex
                                               └─▶ its view of a store ──▶ SharedStore: one life for all nodes
```

A store is what any of its nodes told of it: a block is there until all that told of it have taken that
back, or are gone. Knows at most `MAX_BLOCKS` of a tier, and of a store.
"""

from collections.abc import Iterable, Sequence

from typing_extensions import override

from tandem.router.prefixes import CachedPrefixes, CachedTier, PrefixIndex
from tandem.wire.messages import CacheReport, NodeLoad, TierLoad
from tandem.wire.prefix_blocks import MAX_BLOCKS, unpack_names

# A node has two or three. What one that lies may have a router hold.
MAX_TIERS = 8
# Of a tier that nothing was taken from yet. At 0 nobody would be sent where it could be measured, and at 1
# requests would queue for a tier that may be slower than computing: so it decides among equals.
UNKNOWN_SHARE = 0.5
# A tier that takes no more gives all the same.
_READABLE = frozenset({"up", "full"})


def share_saved(tier: TierLoad) -> float:
    """Return which part of computing a token is saved by taking it from a tier; 0 where it is no use now."""
    if tier.state not in _READABLE:
        return 0.0
    return max(0.0, 1.0 - tier.token_cost) if tier.token_cost >= 0 else UNKNOWN_SHARE


class SharedStore:
    """What is in a store, as far as its nodes told.

    Attributes:
        prefixes: All of it; every node that has the store has this.
    """

    def __init__(self, index: PrefixIndex) -> None:
        self.prefixes = index.new_life()
        # A bit for each view that was told of the block.
        self._tellers: dict[int, int] = {}
        self._views = 0

    @override
    def __repr__(self) -> str:
        return f"<SharedStore {len(self._tellers)} blocks by {self._views.bit_count()} nodes>"

    def join(self) -> int:
        """Return the bit of one more view."""
        bit = ~self._views & (self._views + 1)
        self._views |= bit
        return bit

    def take(self, bit: int, report: CacheReport) -> None:
        """Follow what the node of a view tells."""
        tellers, added = self._tellers, unpack_names(report.added)
        gone: Iterable[int] = unpack_names(report.removed)
        if report.is_whole:
            kept = {*added}
            gone = [name for name, told in tellers.items() if told & bit and name not in kept]
        self._untell(bit, gone)
        for name in added:
            if name in tellers:
                tellers[name] |= bit
            elif len(tellers) < MAX_BLOCKS:
                tellers[name] = bit
        self.prefixes.hold(name for name in added if name in tellers)

    def leave(self, bit: int) -> bool:
        """Forget what one view alone told; True when nobody has the store any more."""
        self._untell(bit, [name for name, told in self._tellers.items() if told & bit])
        self._views &= ~bit
        if not self._views:
            self.prefixes.forget()
        return not self._views

    def _untell(self, bit: int, names: Iterable[int]) -> None:
        tellers, gone = self._tellers, list[int]()
        for name in names:
            told = tellers.get(name, 0)
            if told == bit:
                del tellers[name]
                gone.append(name)
            elif told:
                tellers[name] = told & ~bit
        self.prefixes.drop(gone)


class StoreView:
    """What one node tells of a store."""

    def __init__(self, known: "KnownPrefixes", identity: str) -> None:
        self.identity, self.position = identity, 0
        self._known = known
        if identity not in known.stores:
            known.stores[identity] = SharedStore(known.index)
        self._store = known.stores[identity]
        self._bit = self._store.join()

    @property
    def prefixes(self) -> CachedPrefixes:
        """All of the store."""
        return self._store.prefixes

    def take(self, report: CacheReport) -> None:
        """Follow what the node tells."""
        self._store.take(self._bit, report)
        self.position = report.position

    def forget(self) -> None:
        """The node has it no more."""
        if self._store.leave(self._bit):
            del self._known.stores[self.identity]


class KnownPrefixes:
    """What is known of all nodes.

    Attributes:
        stores: By what all nodes call them.
    """

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.stores: dict[str, SharedStore] = {}

    @override
    def __repr__(self) -> str:
        return f"<KnownPrefixes {self.index!r} {len(self.stores)} stores>"

    def new_life(self) -> "NodePrefixes":
        """Return what one life of a node has: nothing yet. Its owner calls `forget` in the end."""
        return NodePrefixes(self)


class NodePrefixes:
    """What one life of a node has in its prefix cache and behind it, as far as it told.

    Attributes:
        cached: In the cache itself.
        tiers: Those that save anything now, cheapest first.
    """

    def __init__(self, known: KnownPrefixes) -> None:
        self.cached = known.index.new_life()
        self.tiers: tuple[CachedTier, ...] = ()
        self._known = known
        self._behind: dict[str, CachedPrefixes | StoreView] = {}
        self._is_over = False

    @property
    def position(self) -> int:
        """Up to where the cache is known."""
        return self.cached.position

    @property
    def tier_positions(self) -> dict[str, int]:
        """Up to where each tier is known."""
        return {name: behind.position for name, behind in self._behind.items()}

    @property
    def behind(self) -> dict[str, CachedPrefixes]:
        """What each tier has; that of a store is of all its nodes."""
        return {name: _all_of(behind) for name, behind in self._behind.items()}

    def heard(self, load: NodeLoad) -> None:
        """The node told its load: follow the tiers that it has now, and forget others."""
        if (not load.tiers and not self._behind) or self._is_over:
            return
        told = {tier.name: tier for tier in load.tiers[:MAX_TIERS]}
        for name, behind in list(self._behind.items()):
            if name not in told or told[name].store != _store_of(behind):
                self._behind.pop(name).forget()
        for name, tier in told.items():
            if name not in self._behind:
                self._behind[name] = self._follow(tier)
        self.tiers = self._saving(list(told.values()))

    def take(self, report: CacheReport) -> None:
        """Follow what the node tells; of a tier that it does not have, nothing is kept."""
        if not report.tier:
            self.cached.take(report)
        elif behind := self._behind.get(report.tier):
            behind.take(report)

    def forget(self) -> None:
        """The life is over. Safe to call twice."""
        self._is_over, self.tiers = True, ()
        self.cached.forget()
        while self._behind:
            self._behind.popitem()[1].forget()

    def _follow(self, tier: TierLoad) -> CachedPrefixes | StoreView:
        if tier.store:
            return StoreView(self._known, tier.store)
        return self._known.index.new_life()

    def _saving(self, told: Sequence[TierLoad]) -> tuple[CachedTier, ...]:
        tiers = [CachedTier(t.name, _all_of(self._behind[t.name]), share_saved(t)) for t in told]
        # Of equally cheap ones the node asks the first of them first.
        return tuple(sorted((t for t in tiers if t.share > 0), key=lambda tier: -tier.share))


def _all_of(behind: CachedPrefixes | StoreView) -> CachedPrefixes:
    return behind.prefixes if isinstance(behind, StoreView) else behind


def _store_of(behind: CachedPrefixes | StoreView) -> str:
    return behind.identity if isinstance(behind, StoreView) else ""
