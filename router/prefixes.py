"""What a router knows of the nodes' prefix caches, and how much of a prompt that is. Pure.

```
 node ── CacheReport ──▶ CachedPrefixes.take      one set of names for each life of a node
 prompt ──▶ PromptBlocks ──▶ cached_tokens(of a node): the blocks at its beginning that are in the set
```

What is known is a hint: up to half a second old, in blocks of `BLOCK_TOKENS`, a little less than there is.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from wire.messages import CacheReport
from wire.prefix_blocks import BLOCK_TOKENS, MAX_BLOCKS, block_names, unpack_names


@dataclass(eq=False)
class CachedPrefixes:
    """The blocks that one life of a node has cached, as far as it told.

    Shown to operators as it is, without the names.

    Attributes:
        position: Up to where its changes are known.
        num_blocks: How many are cached.
    """

    position: int = 0
    num_blocks: int = 0

    def __post_init__(self) -> None:
        self._names: set[int] = set()

    @property
    def names(self) -> AbstractSet[int]:
        """The names of the blocks."""
        return self._names

    def take(self, report: CacheReport) -> None:
        """Follow what the node tells; what passes the limit of blocks is not held."""
        if report.is_whole:
            self._names.clear()
        self._names.difference_update(unpack_names(report.removed))
        added = unpack_names(report.added)
        self._names.update(added[: MAX_BLOCKS - len(self._names)])
        self.position, self.num_blocks = report.position, len(self._names)


NOTHING_CACHED = CachedPrefixes()
"""Of a node that was never reached."""


class PromptBlocks:
    """One prompt, by the blocks that it may share with others. They are named when first asked for."""

    block_tokens = BLOCK_TOKENS

    def __init__(self, token_ids: Sequence[int], salt: str = "") -> None:
        self._token_ids, self._salt = token_ids, salt
        self._names: list[int] | None = None

    @property
    def names(self) -> Sequence[int]:
        """The names of its whole blocks, in order."""
        if self._names is None:
            # The last token is computed in any case: its logits choose the first of the answer.
            self._names = block_names(self._token_ids[:-1], self._salt)
        return self._names

    def cached_tokens(self, prefixes: CachedPrefixes) -> int:
        """Return how many tokens at its beginning a node has cached."""
        return num_leading(self.names, prefixes.names) * self.block_tokens


def num_leading(names: Sequence[int], known: AbstractSet[int]) -> int:
    """Return how many names at the beginning are known.

    Nodes evict a prefix from its end, so those known of a prompt are its first ones, and their number
    is found by halving.
    """
    if not names or names[0] not in known:
        return 0
    low, high = 1, len(names)
    while low < high:
        middle = (low + high + 1) // 2
        if names[middle - 1] in known:
            low = middle
        else:
            high = middle - 1
    return low
