"""What prefixes of tokens are called: pages by their content, blocks between nodes and routers.

```
 root  = H(version, model, dtype of KV, page size, shard, salt)
 page  = H(key of the page before or root, the page's tokens)
 shard = H(key of rank 0's page, shard)                           the same tokens, the heads of another rank
```

A page's key follows from all that its bytes follow from: every token up to its end, one tenant, one model. Equal keys
are taken for equal bytes, so they are cryptographic digests.

A block is `BLOCK_TOKENS` tokens, whatever a node's page size, so that a router names a prompt once for all nodes. Its
64-bit name follows from all tokens up to its end and from the cache salt. Names are hints: two prefixes with one name
would send a request to a node that has less than was thought, never give it the KV of another.

A `PrefixJournal` has the blocks of one cache and the last changes. A router asks with the position it has; nothing
of it is kept here, so any number may follow, and one that missed something needs no care.
"""

import hashlib
import struct
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import xxhash
from typing_extensions import override

# A name saved here is a name more to tell, hold and look up; a token not seen as cached is one that a
# policy believes it has to compute: 128 are 5 ms of a 70B model on eight H100.
BLOCK_TOKENS = 128
NAME_BYTES = 8
# As many as one node tells of: 8 million tokens, several times what the largest pools hold.
MAX_BLOCKS = 1 << 16


def scope_name(salt: str, adapter: str = "") -> str:
    """Return the name of what shares cached prefixes: one tenant's requests to one adapter."""
    return f"{adapter}\0{salt}" if adapter else salt


def root_name(scope: str = "") -> int:
    """Return what stands before the first block."""
    return xxhash.xxh3_64_intdigest(scope.encode()) if scope else 0


def next_name(before: int, token_ids: Sequence[int]) -> int:
    """Return the name of the block with these tokens behind the one named `before`."""
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(token_ids)}q", *token_ids), before)


def block_names(token_ids: Sequence[int], salt: str = "") -> list[int]:
    """Return the names of a prompt's whole blocks, in order."""
    name, names = root_name(salt), []
    for end in range(BLOCK_TOKENS, len(token_ids) + 1, BLOCK_TOKENS):
        name = next_name(name, token_ids[end - BLOCK_TOKENS : end])
        names.append(name)
    return names


def pack_names(names: Sequence[int]) -> bytes:
    """Return names as a message carries them."""
    return struct.pack(f"<{len(names)}Q", *names)


def unpack_names(data: bytes) -> tuple[int, ...]:
    """Return the names in `data`; a rest that is no whole name is passed over."""
    count = len(data) // NAME_BYTES
    return struct.unpack_from(f"<{count}Q", data)


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


# Behind more, all there is is the shorter answer for most pools. At 100,000 prompt tokens a second this is
# 10 s of changes; a router asks every 0.5 s.
MAX_CHANGES = 1 << 14


@dataclass(frozen=True, slots=True)
class PrefixChanges:
    """What a router that was at one position has to do to be at `position`.

    Attributes:
        is_whole: Forget what was known before; `added` is all there is.
    """

    position: int
    is_whole: bool
    added: list[int]
    removed: list[int]


class PrefixJournal:
    """The blocks of one prefix cache or tier. Any thread may call it.

    Args:
        max_blocks: More are not told of: bounds what every router holds of this node.
        max_changes: How many of the last changes are kept.

    Attributes:
        position: Number of changes so far.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS, max_changes: int = MAX_CHANGES) -> None:
        self.position = 0
        self._max_blocks = max_blocks
        # Pages with this block: an orphan and the page that took its place have the same one.
        self._num_pages: dict[int, int] = {}
        # Name of the block, and whether it came.
        self._changes: deque[tuple[int, bool]] = deque(maxlen=max_changes)
        # Tiers write on threads of their own while the node's loop reads.
        self._lock = threading.Lock()

    @override
    def __repr__(self) -> str:
        return f"<PrefixJournal {len(self._num_pages)} blocks at {self.position}>"

    def add(self, name: int) -> None:
        """Note that a page with the end of this block is cached."""
        with self._lock:
            count = self._num_pages.get(name, 0)
            if not count and len(self._num_pages) >= self._max_blocks:
                return
            self._num_pages[name] = count + 1
            if not count:
                self._note(name, has_come=True)

    def remove(self, name: int) -> None:
        """Note that such a page is not cached any more; one that was never told of is no error."""
        with self._lock:
            count = self._num_pages.get(name)
            if count is None:
                return
            if count > 1:
                self._num_pages[name] = count - 1
                return
            del self._num_pages[name]
            self._note(name, has_come=False)

    def since(self, position: int) -> PrefixChanges | None:
        """Return what changed since `position`; None when nothing did.

        The answer has at most as many blocks as there are or as changes are kept, whichever is more.
        """
        with self._lock:
            if position == self.position:
                return None
            num_new = self.position - position
            if not 0 < num_new <= len(self._changes) or num_new > len(self._num_pages):
                return PrefixChanges(self.position, True, list(self._num_pages), [])
            # Of several changes to one block the last counts.
            last = dict(islice(self._changes, len(self._changes) - num_new, None))
            added = [name for name, has_come in last.items() if has_come]
            removed = [name for name, has_come in last.items() if not has_come]
            return PrefixChanges(self.position, False, added, removed)

    def _note(self, name: int, *, has_come: bool) -> None:
        self.position += 1
        self._changes.append((name, has_come))
