"""What a page of KV is called outside the pool it was computed in: by all that its bytes follow from.

```
 root  = H(version, model, dtype of KV, page size, shard, salt)
 page  = H(key of the page before or root, the page's tokens)
 shard = H(key of rank 0's page, shard)                           the same tokens, the heads of another rank
```

Whoever has the key has the tokens, and everything before them, of one tenant and one model: unlike the names of
blocks, which are hints, equal keys are taken for equal bytes. So they are cryptographic digests.
"""

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tandem.wire.prefix_blocks import BLOCK_TOKENS, next_name, root_name

KEY_BYTES = 32
# Of the bytes of a page: [layer][k, v][head][token][element]. A change of that order is a new version.
LAYOUT_VERSION = 1


class PageKey(NamedTuple):
    """One full page of a prefix.

    Attributes:
        digest: Names the content.
        blocks: Names of the blocks that end in this page, as routers know them.
    """

    digest: bytes
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PageSpace:
    """What all pages of one pool have in common.

    Attributes:
        fingerprint: Of the model; see `ModelShape`.
        kv_dtype: Name of the type of K and V.
        shard: Which of the heads a page has: the rank and how many there are, such as `0/2`.
    """

    fingerprint: str
    kv_dtype: str
    page_size: int
    shard: str = "0/1"

    @property
    def num_shards(self) -> int:
        """Ranks whose pools have a part each of the same pages."""
        return int(self.shard.partition("/")[2])

    @property
    def name(self) -> str:
        """A short word for it: nodes with another share no page, though they share a store."""
        return self.root().hex()[:16]

    def root(self, salt: str = "") -> bytes:
        """Return what stands before the first page of a prefix under this salt."""
        parts = (self.fingerprint, self.kv_dtype, str(self.page_size), self.shard, salt)
        digest = _digest(LAYOUT_VERSION.to_bytes(4, "little"))
        for part in parts:  # each with its length: no two lists of parts are one string
            data = part.encode()
            digest.update(len(data).to_bytes(8, "little") + data)
        return digest.digest()


class PageChain:
    """The keys of one prefix, page by page.

    Args:
        before: The key before the first page that is asked for.
        block: Name of the last block that ends before it.
    """

    def __init__(self, before: bytes, block: int) -> None:
        self._before, self._block = before, block

    @classmethod
    def start(cls, space: PageSpace, salt: str = "") -> "PageChain":
        """Return the chain of a prefix from its first page on."""
        return cls(space.root(salt), root_name(salt))

    def next(self, token_ids: Sequence[int], first: int, page_size: int) -> PageKey:
        """Return the key of the page that begins at token `first`, which the last one ended at.

        Args:
            token_ids: Of the whole prefix; at least `first + page_size`.
        """
        tokens = token_ids[first : first + page_size]
        packed = struct.pack(f"<{page_size}q", *tokens)
        self._before = _digest(self._before + packed).digest()
        blocks = []
        for end in range(
            (first // BLOCK_TOKENS + 1) * BLOCK_TOKENS, first + page_size + 1, BLOCK_TOKENS
        ):
            self._block = next_name(self._block, token_ids[end - BLOCK_TOKENS : end])
            blocks.append(self._block)
        return PageKey(self._before, tuple(blocks))


def page_keys(space: PageSpace, token_ids: Sequence[int], salt: str = "") -> Iterator[PageKey]:
    """Yield the keys of a prefix's full pages, in order."""
    chain = PageChain.start(space, salt)
    for first in range(0, len(token_ids) - space.page_size + 1, space.page_size):
        yield chain.next(token_ids, first, space.page_size)


def shard_key(digest: bytes, shard: str) -> bytes:
    """Return what another rank's part of a page is called.

    Rank 0 hashes the tokens once for all; nodes of equally many ranks come to the same.

    Args:
        digest: Of rank 0's part; it covers how many ranks there are.
        shard: Of the other; see `PageSpace`.
    """
    return _digest(digest + shard.encode(), b"tandem-shard").digest()


def _digest(data: bytes, person: bytes = b"tandem-page") -> "hashlib.blake2b":
    return hashlib.blake2b(data, digest_size=KEY_BYTES, person=person)
