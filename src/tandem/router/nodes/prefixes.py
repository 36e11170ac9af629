"""The router's index of the prefixes cached at nodes and in their tiers. No I/O.

```
 node ── CacheReport ──▶ NodePrefixes.take ─┬─▶ its cache and its private tiers ──▶ the index of all nodes
      ── NodeLoad.tiers ──▶ .set_tiers      └─▶ a store shared by nodes ──────────▶ the index of that store
 prompt ──▶ PromptBlocks ──▶ found_in: cached blocks at its start, one lookup for all nodes
                         └─▶ beyond: blocks in a node's tiers after these
```

The index is a hint: it is up to a second old, counts whole blocks of `BLOCK_TOKENS`, and may miss some. One index for all
nodes needs one lookup per block of a prompt. A set for each node needs lookups per node, which takes ten times as long
with hundreds of nodes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from weakref import WeakValueDictionary

from tandem.wire.messages import CacheReport, NodeLoad, TierLoad
from tandem.wire.prefixes import BLOCK_TOKENS, MAX_BLOCKS, block_names, unpack_names


class PrefixIndex:
    """Maps blocks to the caches that have them. Each cache belongs to one life of a node, from start to exit."""

    def __init__(self) -> None:
        # For each block a bit mask of the caches that have it.
        self._owners: dict[int, int] = {}
        self._lives: list[CachedPrefixes | None] = []

    def __len__(self) -> int:
        return len(self._owners)

    def new_life(self) -> "CachedPrefixes":
        """Return a new, empty cache. Its owner must call `forget`."""
        if None not in self._lives:
            self._lives.append(None)
        number = self._lives.index(None)
        life = self._lives[number] = CachedPrefixes()
        life.attach(self, 1 << number)
        return life

    def leading(self, names: Sequence[int]) -> "dict[CachedPrefixes, int]":
        """Return the number of leading names that each cache has, without caches that have none."""
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

    def reach(self, names: Sequence[int]) -> int:
        """Return the number of leading names that the caches have together."""
        return sum(1 for _ in takewhile(self._owners.__contains__, names))

    def add(self, names: Iterable[int], bit: int) -> None:
        """Add blocks to the cache of this bit."""
        owners = self._owners
        for name in names:
            others = owners.get(name)
            # Most blocks have one owner: storing `bit` itself lets their entries share one integer.
            owners[name] = bit if others is None else others | bit

    def remove(self, names: Iterable[int], bit: int) -> None:
        """Remove blocks from the cache of this bit, which must have them."""
        owners = self._owners
        for name in names:
            remaining = owners[name] & ~bit
            if remaining:
                owners[name] = remaining
            else:
                del owners[name]

    def release(self, bit: int) -> None:
        """Release the bit of a cache without blocks."""
        self._lives[bit.bit_length() - 1] = None

    def _of(self, bits: int) -> "list[CachedPrefixes]":
        # Formatting all digits at once takes a tenth of the time of testing hundreds of bits.
        digits = zip(self._lives, reversed(f"{bits:b}"), strict=False)
        return [life for life, digit in digits if digit == "1" and life is not None]


@dataclass(eq=False)
class CachedPrefixes:
    """The blocks that one life of a node reported, in its cache or in one tier. Made by `PrefixIndex.new_life`.

    `/server_info` shows its fields.

    Attributes:
        position: Position of the last report in the node's sequence of changes.
        num_blocks: Number of known blocks.
        index: The index that contains it; None after `forget`.
    """

    position: int = 0
    num_blocks: int = 0

    def __post_init__(self) -> None:
        self.index: PrefixIndex | None = None
        self._names, self._bit = set[int](), 0

    def attach(self, index: PrefixIndex, bit: int) -> None:
        """Store the index that contains this cache, and its bit there. Called by the index."""
        self.index, self._bit = index, bit

    @property
    def names(self) -> AbstractSet[int]:
        """The names of the blocks."""
        return self._names

    def take(self, report: CacheReport) -> None:
        """Apply a report; blocks beyond `MAX_BLOCKS` are dropped."""
        if self.index is None:  # a late report, after `forget`
            return
        removed = self._names.intersection(
            self._names if report.is_whole else unpack_names(report.removed)
        )
        self.index.remove(removed, self._bit)
        self._names -= removed
        room = MAX_BLOCKS - len(self._names)
        new = [name for name in {*unpack_names(report.added)} if name not in self._names][:room]
        self.index.add(new, self._bit)
        self._names.update(new)
        self.position, self.num_blocks = report.position, len(self._names)

    def forget(self) -> None:
        """Remove all blocks and leave the index. Safe to call twice."""
        if self.index is not None:
            self.index.remove(self._names, self._bit)
            self._names.clear()
            self.index.release(self._bit)
            self.index, self.num_blocks = None, 0


NOTHING_CACHED = CachedPrefixes()
"""The empty cache of a node that was never reached."""


@dataclass(frozen=True, slots=True)
class CachedTier:
    """One tier behind a node's prefix cache.

    Attributes:
        prefixes: Blocks that the node reported for it.
        share: Share of a token's compute time that reading it from the tier saves: above 0, at most 1.
        is_shared: Whether it is a shared store: the node can read blocks that any node reported.
    """

    name: str
    prefixes: CachedPrefixes
    share: float
    is_shared: bool = False


class PromptBlocks:
    """The blocks of one prompt and their owners, for one choice of nodes. Names and lookups are computed on demand."""

    def __init__(self, token_ids: Sequence[int], salt: str = "") -> None:
        self._token_ids, self._salt = token_ids, salt
        self._searched: set[PrefixIndex] = set()
        self._found: dict[CachedPrefixes, int] = {}
        self._reach_of: dict[PrefixIndex, int] = {}

    @cached_property
    def names(self) -> Sequence[int]:
        """The names of its complete blocks, in order."""
        # The last token is always computed, because its logits give the first token of the answer.
        return block_names(self._token_ids[:-1], self._salt)

    def found_in(self, indexes: Iterable[PrefixIndex]) -> "Mapping[CachedPrefixes, int]":
        """Return the number of leading tokens in each cache, without caches that have none.

        Args:
            indexes: Indexes to search. Results of indexes searched earlier are included.
        """
        for index in indexes:
            if index not in self._searched and len(index):
                for life, num_blocks in index.leading(self.names).items():
                    self._found[life] = num_blocks * BLOCK_TOKENS
            self._searched.add(index)
        return self._found

    def cached_in(self, life: CachedPrefixes) -> int:
        """Return the number of leading tokens in a cache."""
        return self.found_in((life.index,) if life.index else ()).get(life, 0)

    def _reach(self, tier: CachedTier) -> int:
        """Return the number of leading tokens that a node can read from a tier, private or shared."""
        index = tier.prefixes.index
        if not tier.is_shared or index is None:
            return self._found.get(tier.prefixes, 0)
        if index not in self._reach_of:
            self._reach_of[index] = index.reach(self.names) * BLOCK_TOKENS if len(index) else 0
        return self._reach_of[index]

    def beyond(
        self, num_tokens: int, tiers: Iterable[CachedTier]
    ) -> Iterator[tuple[CachedTier, int]]:
        """Yield each tier that extends the cached prefix, with the number of tokens it adds. Call `cached_in` first.

        Args:
            num_tokens: Leading tokens in the node's own cache, as returned by `cached_in`.
            tiers: The node's tiers, cheapest first.
        """
        for tier in tiers:
            reach = self._reach(tier)
            if reach > num_tokens:
                yield tier, reach - num_tokens
                num_tokens = reach


# A node has two or three tiers. The limit bounds the memory that a faulty node can take in a router.
MAX_TIERS = 8
# Assumed share of a tier from which nothing was read yet. At 0, no request would go there and measure it; at 1,
# requests would queue for a tier that may be slower than computing. A value in between only breaks ties.
UNKNOWN_SHARE = 0.5
# A full tier accepts no more blocks but can still be read.
_READABLE = frozenset({"up", "full"})


def share_saved(tier: TierLoad) -> float:
    """Return the share of a token's compute time that reading it from a tier saves; 0 if the tier is unusable now."""
    if tier.state not in _READABLE:
        return 0.0
    return max(0.0, 1.0 - tier.token_cost) if tier.token_cost >= 0 else UNKNOWN_SHARE


class KnownPrefixes:
    """Cached prefixes of all nodes and their tiers.

    Attributes:
        index: Index of the nodes' caches and private tiers.
        stores: Index of each shared store, by the name that all its nodes report.
    """

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.stores = WeakValueDictionary[str, PrefixIndex]()

    def new_life(self) -> "NodePrefixes":
        """Return the empty caches of a new life of a node. Its owner must call `forget`."""
        return NodePrefixes(self)

    def index_of(self, store: str) -> PrefixIndex:
        """Return the index of a store; for an empty name, the index of private tiers."""
        return self.stores.setdefault(store, PrefixIndex()) if store else self.index


class NodePrefixes:
    """Blocks that one life of a node reported, in its prefix cache and in the tiers behind it.

    Attributes:
        cached: Blocks in the prefix cache.
        tiers: Tiers that are worth reading from now, cheapest first.
    """

    def __init__(self, known: KnownPrefixes) -> None:
        self.cached = known.index.new_life()
        self.tiers: tuple[CachedTier, ...] = ()
        self._known = known
        # By the tier's name and its store, which is empty for a private tier.
        self._in_tiers: dict[tuple[str, str], CachedPrefixes] = {}

    @property
    def position(self) -> int:
        """Position of the cache's last report."""
        return self.cached.position

    @property
    def tier_positions(self) -> dict[str, int]:
        """Position of each tier's last report."""
        return {name: prefixes.position for (name, _), prefixes in self._in_tiers.items()}

    @property
    def num_blocks(self) -> dict[tuple[str, str], int]:
        """Known blocks of each tier, by its name and store; for a shared store, those of all nodes."""
        return {
            (name, store): len(held.index) if store and held.index else held.num_blocks
            for (name, store), held in self._in_tiers.items()
        }

    def set_tiers(self, load: NodeLoad) -> None:
        """Update the tiers from a load report, and forget tiers that it does not contain."""
        if (not load.tiers and not self._in_tiers) or self.cached.index is None:
            return
        reported = {tier.name: tier for tier in load.tiers[:MAX_TIERS]}
        tiers = {(tier.name, tier.store): tier for tier in reported.values()}
        for key in [key for key in self._in_tiers if key not in tiers]:
            self._in_tiers.pop(key).forget()
        for name, store in tiers:
            if (name, store) not in self._in_tiers:
                self._in_tiers[name, store] = self._known.index_of(store).new_life()
        cached = [
            CachedTier(tier.name, self._in_tiers[key], share_saved(tier), bool(tier.store))
            for key, tier in tiers.items()
        ]
        # Equally cheap tiers keep the node's order, in which it reads them.
        self.tiers = tuple(sorted((t for t in cached if t.share > 0), key=lambda tier: -tier.share))

    def take(self, report: CacheReport) -> None:
        """Apply a report; a report for an unknown tier is dropped."""
        if not report.tier:
            self.cached.take(report)
        for (name, _), prefixes in self._in_tiers.items():
            if name == report.tier:
                prefixes.take(report)

    def forget(self) -> None:
        """Remove all blocks of this life. Safe to call twice."""
        self.tiers = ()
        self.cached.forget()
        while self._in_tiers:
            self._in_tiers.popitem()[1].forget()
