"""What a router knows of the nodes' prefix caches, and how much of a prompt that is. Pure.

```
 node ── CacheReport ──▶ CachedPrefixes.take ──▶ PrefixIndex: name of a block ─▶ which nodes have it
 prompt ──▶ PromptBlocks ──▶ cached_in: the blocks at its beginning, looked up once for all nodes
                         └─▶ beyond: what a node's tiers have behind those (`router/tiers.py` follows them)
```

What is known is a hint: up to half a second old, in blocks of `BLOCK_TOKENS`, a little less than there is.
One index for all nodes costs a look at each block of a prompt, where a set for each node would cost one
at some blocks of each node: with hundreds of nodes, a tenth of the time.
"""

from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from typing_extensions import override

from tandem.wire.messages import CacheReport
from tandem.wire.prefix_blocks import BLOCK_TOKENS, MAX_BLOCKS, block_names, unpack_names


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
