"""What a router knows of the nodes' prefix caches, and how much of a prompt that is. Pure.

```
 node ── CacheReport ──▶ CachedPrefixes.take ──▶ PrefixIndex: name of a block ─▶ which nodes have it
 prompt ──▶ PromptBlocks ──▶ cached_in: the blocks at its beginning, looked up once for all nodes
                         └─▶ beyond: what a node's tiers have behind those

 node ── NodeLoad.tiers ──▶ NodePrefixes.heard: which tiers, what they cost ──▶ CachedTier, of those that save
      ── CacheReport ─────▶ NodePrefixes.take ─┬─▶ its cache, a tier of its own: one life each ──▶ PrefixIndex
                                               └─▶ its view of a store ──▶ SharedStore: one life for all nodes
```

What is known is a hint: up to half a second old, in blocks of `BLOCK_TOKENS`, a little less than there is.
One index for all nodes costs a look at each block of a prompt, where a set for each node would cost one
at some blocks of each node: with hundreds of nodes, a tenth of the time.
"""

from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from typing_extensions import override

from tandem.wire.messages import CacheReport, NodeLoad, TierLoad
from tandem.wire.prefixes import BLOCK_TOKENS, MAX_BLOCKS, block_names, unpack_names


class PrefixIndex:
    """Which lives of nodes have which blocks."""

    def __init__(self) -> None:
        # A bit for each life that has the block.
        self._owners: dict[int, int] = {}
        self._lives: list[CachedPrefixes | None] = []

    @override
    def __repr__(self) -> str:
        num_lives = sum(life is not None for life in self._lives)
        return f"<PrefixIndex {len(self._owners)} blocks of {num_lives} nodes>"

    def __len__(self) -> int:
        return len(self._owners)

    def new_life(self) -> "CachedPrefixes":
        """Return what one life of a node has cached: nothing yet. Its owner calls `forget` in the end."""
        life = CachedPrefixes()
        if None in self._lives:
            number = self._lives.index(None)
            self._lives[number] = life
        else:
            number = len(self._lives)
            self._lives.append(life)
        life.enter(self, 1 << number)
        return life

    def leading(self, names: Sequence[int]) -> "dict[CachedPrefixes, int]":
        """Return how many names at the beginning each life has; lives that have none are left out."""
        found: dict[CachedPrefixes, int] = {}
        alive = self._owners.get(names[0], 0) if names else 0
        for count, name in enumerate(names[1:], 1):
            if not alive:
                break
            still = alive & self._owners.get(name, 0)
            if still != alive:
                found.update(dict.fromkeys(self._of(alive ^ still), count))
            alive = still
        found.update(dict.fromkeys(self._of(alive), len(names)))
        return found

    def add(self, names: Iterable[int], bit: int) -> None:
        """Note that the life of this bit has these blocks."""
        owners = self._owners
        for name in names:
            others = owners.get(name)
            # Most blocks have one owner, and share its number.
            owners[name] = bit if others is None else others | bit

    def remove(self, names: Iterable[int], bit: int) -> None:
        """Note that the life of this bit has these blocks, which it had, no more."""
        owners = self._owners
        for name in names:
            left = owners[name] & ~bit
            if left:
                owners[name] = left
            else:
                del owners[name]

    def leave(self, bit: int) -> None:
        """Give back the bit of a life that has nothing any more."""
        self._lives[bit.bit_length() - 1] = None

    def _of(self, bits: int) -> "list[CachedPrefixes]":
        # The digits in one go: for hundreds of lives a tenth of the time of taking bit after bit.
        digits = zip(self._lives, reversed(f"{bits:b}"), strict=False)
        return [life for life, digit in digits if digit == "1" and life is not None]


@dataclass(eq=False)
class CachedPrefixes:
    """The blocks that one life of a node has cached, as far as it told.

    Shown to operators as it is, without the names. Made by `PrefixIndex.new_life`.

    Attributes:
        position: Up to where its changes are known.
        num_blocks: How many are cached.
        index: Where it is one of others.
    """

    position: int = 0
    num_blocks: int = 0

    def __post_init__(self) -> None:
        self._names: set[int] = set()
        self.index, self._bit = _NO_INDEX, 0

    def enter(self, index: PrefixIndex, bit: int) -> None:
        """Be one of an index. Called by it."""
        self.index, self._bit = index, bit

    @property
    def names(self) -> AbstractSet[int]:
        """The names of the blocks."""
        return self._names

    def take(self, report: CacheReport) -> None:
        """Follow what the node tells; what passes the limit of blocks is not held."""
        if not self._bit:  # on its way as the life ended
            return
        self.drop(self._names if report.is_whole else unpack_names(report.removed))
        self.hold(unpack_names(report.added))
        self.position = report.position

    def drop(self, names: Iterable[int]) -> None:
        """Have these no more; those it had not are passed over."""
        gone = self._names.intersection(names)
        self.index.remove(gone, self._bit)
        self._names -= gone
        self.num_blocks = len(self._names)

    def hold(self, names: Iterable[int]) -> None:
        """Have these too; what passes the limit of blocks is not held."""
        room = MAX_BLOCKS - len(self._names)
        new = [name for name in {*names} if name not in self._names][:room]
        self.index.add(new, self._bit)
        self._names.update(new)
        self.num_blocks = len(self._names)

    def forget(self) -> None:
        """The life is over. Safe to call twice."""
        if self._bit:
            self.index.remove(self._names, self._bit)
            self._names.clear()
            self.index.leave(self._bit)
            self.index, self._bit, self.num_blocks = _NO_INDEX, 0, 0


_NO_INDEX = PrefixIndex()
NOTHING_CACHED = CachedPrefixes()
"""Of a node that was never reached."""


@dataclass(frozen=True, slots=True)
class CachedTier:
    """One tier behind a node's prefix cache.

    Attributes:
        prefixes: What is in it, in the index of the node's own.
        share: Of computing a token, what taking it from there saves: more than 0, at most 1.
    """

    name: str
    prefixes: CachedPrefixes
    share: float


class PromptBlocks:
    """One prompt, by the blocks that it may share with others, for one choice of where it goes.

    Its blocks are named and looked up when first asked for.
    """

    block_tokens = BLOCK_TOKENS

    def __init__(self, token_ids: Sequence[int], salt: str = "") -> None:
        self._token_ids, self._salt = token_ids, salt
        self._looked_in: set[PrefixIndex] = set()
        self._found: dict[CachedPrefixes, int] = {}

    def names(self) -> Sequence[int]:
        """Return the names of its whole blocks, in order."""
        # The last token is computed in any case: its logits choose the first of the answer.
        return block_names(self._token_ids[:-1], self._salt)

    def cached_in(self, lives: Sequence[CachedPrefixes]) -> list[int]:
        """Return how many tokens at its beginning each of these has."""
        for index in {life.index for life in lives}.difference(self._looked_in):
            if len(index):
                self._found |= index.leading(self.names())
            self._looked_in.add(index)
        get, size = self._found.get, self.block_tokens
        return [get(life, 0) * size for life in lives]

    def beyond(
        self, num_tokens: int, tiers: Iterable[CachedTier]
    ) -> Iterator[tuple[CachedTier, int]]:
        """Yield what each tier has behind what comes before it: so many tokens more.

        Only behind `cached_in` of their node is it known.

        Args:
            num_tokens: At the beginning of the prompt, which their node has itself, as `cached_in` says.
            tiers: Cheapest first.
        """
        for tier in tiers:
            reach = self._found.get(tier.prefixes, 0) * self.block_tokens
            if reach > num_tokens:
                yield tier, reach - num_tokens
                num_tokens = reach


# ── tiers behind the caches, and stores that several nodes share ────────────────────────────────
#
# A store holds what any of its nodes reported: a block is there until all that reported it have taken that back, or are
# gone. At most `MAX_BLOCKS` are known of a tier, and of a store.

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
