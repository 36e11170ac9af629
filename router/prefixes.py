"""What a router knows of the nodes' prefix caches and of the tiers behind them, and how much of a prompt that is. Pure.

```
 node ── CacheReport ──▶ NodePrefixes.take ─┬─▶ its cache, a tier of its own ──▶ the index of all nodes
      ── NodeLoad.tiers ──▶ .heard          └─▶ a store that nodes share ──────▶ the index of that store
 prompt ──▶ PromptBlocks ──▶ found_in: the blocks at its beginning, looked up once for all nodes
                         └─▶ beyond: what a node's tiers have behind those
```

What is known is a hint: up to a second old, in blocks of `BLOCK_TOKENS`, a little less than there is.
One index for all nodes costs a look at each block of a prompt, where a set for each node would cost one
at some blocks of each node: with hundreds of nodes, ten times as long.
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
    """Which lives of nodes have which blocks."""

    def __init__(self) -> None:
        # A bit for each life that has the block.
        self._owners: dict[int, int] = {}
        self._lives: list[CachedPrefixes | None] = []

    def __len__(self) -> int:
        return len(self._owners)

    def new_life(self) -> "CachedPrefixes":
        """Return what one life of a node has cached: nothing yet. Its owner calls `forget` in the end."""
        if None not in self._lives:
            self._lives.append(None)
        number = self._lives.index(None)
        life = self._lives[number] = CachedPrefixes()
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

    def reach(self, names: Sequence[int]) -> int:
        """Return how many names at the beginning any lives have, together."""
        return sum(1 for _ in takewhile(self._owners.__contains__, names))

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
    """The blocks that one life of a node reported: in its cache, or in one tier. Made by `PrefixIndex.new_life`.

    Operators see its fields in `/server_info`.

    Attributes:
        position: Up to where its changes are known.
        num_blocks: How many blocks are known.
        index: Where it is one of others; none once it was forgotten.
    """

    position: int = 0
    num_blocks: int = 0

    def __post_init__(self) -> None:
        self.index: PrefixIndex | None = None
        self._names, self._bit = set[int](), 0

    def enter(self, index: PrefixIndex, bit: int) -> None:
        """Be one of an index, which calls this."""
        self.index, self._bit = index, bit

    @property
    def names(self) -> AbstractSet[int]:
        """The names of the blocks."""
        return self._names

    def take(self, report: CacheReport) -> None:
        """Follow a report; blocks beyond `MAX_BLOCKS` are not held."""
        if self.index is None:  # on its way as the life ended
            return
        gone = self._names.intersection(
            self._names if report.is_whole else unpack_names(report.removed)
        )
        self.index.remove(gone, self._bit)
        self._names -= gone
        room = MAX_BLOCKS - len(self._names)
        new = [name for name in {*unpack_names(report.added)} if name not in self._names][:room]
        self.index.add(new, self._bit)
        self._names.update(new)
        self.position, self.num_blocks = report.position, len(self._names)

    def forget(self) -> None:
        """The life is over. Safe to call twice."""
        if self.index is not None:
            self.index.remove(self._names, self._bit)
            self._names.clear()
            self.index.leave(self._bit)
            self.index, self.num_blocks = None, 0


NOTHING_CACHED = CachedPrefixes()
"""Of a node that was never reached."""


@dataclass(frozen=True, slots=True)
class CachedTier:
    """One tier behind a node's prefix cache.

    Attributes:
        prefixes: What the node reported of it.
        share: Of computing a token, what taking it from there saves: more than 0, at most 1.
        is_shared: It is a store: the node can read what any node reported of it.
    """

    name: str
    prefixes: CachedPrefixes
    share: float
    is_shared: bool = False


class PromptBlocks:
    """One prompt, by the blocks that it may share with others, for one choice of where it goes.

    Its blocks are named and looked up when first asked for.
    """

    def __init__(self, token_ids: Sequence[int], salt: str = "") -> None:
        self._token_ids, self._salt = token_ids, salt
        self._looked_in: set[PrefixIndex] = set()
        self._found: dict[CachedPrefixes, int] = {}
        self._reached: dict[PrefixIndex, int] = {}

    @cached_property
    def names(self) -> Sequence[int]:
        """The names of its whole blocks, in order."""
        # The last token is computed in any case: its logits choose the first of the answer.
        return block_names(self._token_ids[:-1], self._salt)

    def found_in(self, indexes: Iterable[PrefixIndex]) -> "Mapping[CachedPrefixes, int]":
        """Return how many tokens at its beginning lives have, without those that have none.

        Args:
            indexes: Where to look. What was found in others before is returned, too.
        """
        for index in indexes:
            if index not in self._looked_in and len(index):
                for life, num_blocks in index.leading(self.names).items():
                    self._found[life] = num_blocks * BLOCK_TOKENS
            self._looked_in.add(index)
        return self._found

    def cached_in(self, life: CachedPrefixes) -> int:
        """Return how many tokens at its beginning a life has."""
        return self.found_in((life.index,) if life.index else ()).get(life, 0)

    def _reach(self, tier: CachedTier) -> int:
        """Return how many tokens at its beginning can be read from a tier, of its own or shared."""
        index = tier.prefixes.index
        if not tier.is_shared or index is None:
            return self._found.get(tier.prefixes, 0)
        if index not in self._reached:
            self._reached[index] = index.reach(self.names) * BLOCK_TOKENS if len(index) else 0
        return self._reached[index]

    def beyond(
        self, num_tokens: int, tiers: Iterable[CachedTier]
    ) -> Iterator[tuple[CachedTier, int]]:
        """Yield what each tier has behind what comes before it: so many tokens more. Call `cached_in` first.

        Args:
            num_tokens: At the beginning of the prompt, which their node has itself, as `cached_in` says.
            tiers: Cheapest first.
        """
        for tier in tiers:
            reach = self._reach(tier)
            if reach > num_tokens:
                yield tier, reach - num_tokens
                num_tokens = reach


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


class KnownPrefixes:
    """What is known of all nodes.

    Attributes:
        index: Of their caches, and of the tiers that each has for itself.
        stores: One index for each store, by what all nodes call it.
    """

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.stores = WeakValueDictionary[str, PrefixIndex]()

    def new_life(self) -> "NodePrefixes":
        """Return what one life of a node has: nothing yet. Its owner calls `forget` in the end."""
        return NodePrefixes(self)

    def index_of(self, store: str) -> PrefixIndex:
        """Return the index of a store; of an empty name, that of the nodes' own tiers."""
        return self.stores.setdefault(store, PrefixIndex()) if store else self.index


class NodePrefixes:
    """What one life of a node reported of its prefix cache and of the tiers behind it.

    Attributes:
        cached: In the cache itself.
        tiers: Those that save anything now, cheapest first.
    """

    def __init__(self, known: KnownPrefixes) -> None:
        self.cached = known.index.new_life()
        self.tiers: tuple[CachedTier, ...] = ()
        self._known = known
        # By the tier's name and its store, which is empty for a tier of the node's own.
        self._behind: dict[tuple[str, str], CachedPrefixes] = {}

    @property
    def position(self) -> int:
        """Up to where the cache is known."""
        return self.cached.position

    @property
    def tier_positions(self) -> dict[str, int]:
        """Up to where each tier is known."""
        return {name: behind.position for (name, _), behind in self._behind.items()}

    @property
    def num_blocks(self) -> dict[tuple[str, str], int]:
        """How many blocks are known of each tier, by its name and store; of a store, those of all nodes."""
        return {
            (name, store): len(behind.index) if store and behind.index else behind.num_blocks
            for (name, store), behind in self._behind.items()
        }

    def heard(self, load: NodeLoad) -> None:
        """Follow the tiers that the node has now, and forget others."""
        if (not load.tiers and not self._behind) or self.cached.index is None:
            return
        told = {tier.name: tier for tier in load.tiers[:MAX_TIERS]}
        tiers = {(tier.name, tier.store): tier for tier in told.values()}
        for key in [key for key in self._behind if key not in tiers]:
            self._behind.pop(key).forget()
        for name, store in tiers:
            if (name, store) not in self._behind:
                self._behind[name, store] = self._known.index_of(store).new_life()
        cached = [
            CachedTier(tier.name, self._behind[key], share_saved(tier), bool(tier.store))
            for key, tier in tiers.items()
        ]
        # Of equally cheap ones the node asks the first of them first.
        self.tiers = tuple(sorted((t for t in cached if t.share > 0), key=lambda tier: -tier.share))

    def take(self, report: CacheReport) -> None:
        """Follow a report; one of a tier that the node does not have is dropped."""
        if not report.tier:
            self.cached.take(report)
        for (name, _), behind in self._behind.items():
            if name == report.tier:
                behind.take(report)

    def forget(self) -> None:
        """The life is over. Safe to call twice."""
        self.tiers = ()
        self.cached.forget()
        while self._behind:
            self._behind.popitem()[1].forget()
