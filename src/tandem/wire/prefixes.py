"""Hashes of prefixes: keys of pages, and names of blocks that nodes report to routers.

```
 root  = H(version, model, KV dtype, page size, shard, salt)
 page  = H(key of the previous page, or root; the page's tokens)
 shard = H(key of rank 0's page, shard)                         the same tokens, the heads of a different rank
```

A page's key depends on everything that determines its bytes: all tokens up to its end, the tenant and the model.
Equal keys are treated as equal bytes, so keys are cryptographic digests.

A block is `BLOCK_TOKENS` tokens for every page size, so a router names a prompt's blocks once for all nodes. A
block's 64-bit name depends on all tokens up to its end and on the cache salt. A collision can misroute a request,
but never serve it another prefix's KV.

A `PrefixJournal` holds the blocks of one cache and its latest changes. A router sends the position it has reached and
gets the changes since. The journal keeps no state per router, so a router that missed an answer only asks again.
"""

import hashlib
import struct
import threading
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, TypeAlias

import xxhash
from typing_extensions import override

# Smaller blocks mean more names to send and store; larger ones hide cached tokens from the policy. Computing 128
# tokens takes a 70B model 5 ms on eight H100.
BLOCK_TOKENS = 128
NAME_BYTES = 8
TokenArray: TypeAlias = "array[int]"
# Limit of reported blocks per node: 8 million tokens, several times the largest pools.
MAX_BLOCKS = 1 << 16


def token_array(token_ids: Sequence[int]) -> TokenArray:
    """Return token ids as 64-bit integers in one buffer, whose slices are copied, compared and hashed by C code.

    An array is returned as it is. Raise `OverflowError` if an id does not fit.
    """
    return token_ids if isinstance(token_ids, array) else array("q", token_ids)


def scope_name(salt: str, adapter: str = "") -> str:
    """Return the name of a scope, one tenant's requests to one adapter; cached prefixes are shared within it."""
    return f"{adapter}\0{salt}" if adapter else salt


def root_name(scope: str = "") -> int:
    """Return the name that precedes the first block of a scope."""
    return xxhash.xxh3_64_intdigest(scope.encode()) if scope else 0


def next_name(before: int, token_ids: Sequence[int]) -> int:
    """Return the name of the block with these tokens that follows the block `before`."""
    return xxhash.xxh3_64_intdigest(token_array(token_ids), before)


def names_between(before: int, token_ids: TokenArray, start: int, end: int) -> list[int]:
    """Return the names of the blocks that end after token `start` and not after token `end`, in order.

    Args:
        before: Name of the block before the first of them.
    """
    names = []
    for first in range(start // BLOCK_TOKENS * BLOCK_TOKENS, end - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        before = next_name(before, token_ids[first : first + BLOCK_TOKENS])
        names.append(before)
    return names


def block_names(token_ids: Sequence[int], salt: str = "") -> list[int]:
    """Return the names of a prompt's complete blocks, in order."""
    return names_between(root_name(salt), token_array(token_ids), 0, len(token_ids))


def pack_names(names: Sequence[int]) -> bytes:
    """Return block names as bytes for a message."""
    return struct.pack(f"<{len(names)}Q", *names)


def unpack_names(data: bytes) -> tuple[int, ...]:
    """Return the block names in `data`; an incomplete name at the end is ignored."""
    count = len(data) // NAME_BYTES
    return struct.unpack_from(f"<{count}Q", data)


KEY_BYTES = 32
# Version of the order of a page's bytes: [layer][k, v][head][token][element].
LAYOUT_VERSION = 1


class PageKey(NamedTuple):
    """One full page of a prefix.

    Attributes:
        digest: Key of the page's content, `KEY_BYTES` long.
        blocks: Names of the blocks that end in this page.
    """

    digest: bytes
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PageSpace:
    """The properties that all pages of a pool share.

    Attributes:
        fingerprint: Fingerprint of the model; see `ModelShape`.
        kv_dtype: Name of the element type of K and V.
        page_size: Tokens per page.
        shard: Rank whose heads a page holds, and the number of ranks, such as `0/2`.
    """

    fingerprint: str
    kv_dtype: str
    page_size: int
    shard: str = "0/1"

    @property
    def num_shards(self) -> int:
        """Number of ranks, each of which holds a part of every page."""
        return int(self.shard.partition("/")[2])

    @property
    def name(self) -> str:
        """Short id. Nodes with different ids share no pages, even in a shared store."""
        return self.root().hex()[:16]

    def root(self, salt: str = "") -> bytes:
        """Return the key that precedes the first page of a prefix with this salt."""
        parts = (self.fingerprint, self.kv_dtype, str(self.page_size), self.shard, salt)
        digest = _digest(LAYOUT_VERSION.to_bytes(4, "little"))
        # Prefix each part with its length, so that different parts never concatenate to equal bytes.
        for part in parts:
            data = part.encode()
            digest.update(len(data).to_bytes(8, "little") + data)
        return digest.digest()


def next_digest(before: bytes, token_ids: TokenArray) -> bytes:
    """Return the digest of the page with these tokens that follows the page with the digest `before`."""
    digest = _digest(before)
    digest.update(token_ids)
    return digest.digest()


def page_keys(space: PageSpace, token_ids: Sequence[int], salt: str = "") -> Iterator[PageKey]:
    """Yield the keys of a prefix's full pages, in order."""
    tokens, digest, name = token_array(token_ids), space.root(salt), root_name(salt)
    for end in range(space.page_size, len(tokens) + 1, space.page_size):
        start = end - space.page_size
        digest = next_digest(digest, tokens[start:end])
        blocks = names_between(name, tokens, start, end)
        name = blocks[-1] if blocks else name
        yield PageKey(digest, tuple(blocks))


def shard_key(digest: bytes, shard: str) -> bytes:
    """Return the key of a different rank's part of a page.

    Rank 0 hashes the tokens once for all ranks. Nodes with the same number of ranks get the same keys.

    Args:
        digest: Key of rank 0's part; it covers the number of ranks.
        shard: Shard of the other rank; see `PageSpace`.
    """
    return _digest(digest + shard.encode(), b"tandem-shard").digest()


def _digest(data: bytes, person: bytes = b"tandem-page") -> "hashlib.blake2b":
    return hashlib.blake2b(data, digest_size=KEY_BYTES, person=person)


# If a router is further behind, the full set is usually shorter. At 100,000 prompt tokens/s this is 10 s of
# changes; routers poll every 0.5 s.
MAX_CHANGES = 1 << 14


@dataclass(frozen=True, slots=True)
class PrefixChanges:
    """Changes that bring a router from an earlier position to `position`.

    Attributes:
        position: Position after these changes.
        is_whole: Whether `added` is the full set, which replaces all earlier changes.
        added: Names of newly cached blocks.
        removed: Names of evicted blocks.
    """

    position: int
    is_whole: bool
    added: list[int]
    removed: list[int]


class PrefixJournal:
    """The blocks of one prefix cache or tier. Thread-safe.

    Args:
        max_blocks: Limit of reported blocks, which bounds each router's memory for this node.
        max_changes: Number of latest changes to keep.

    Attributes:
        position: Number of changes so far.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS, max_changes: int = MAX_CHANGES) -> None:
        self.position = 0
        self._max_blocks = max_blocks
        # Pages per block: an orphaned page and its replacement have the same block.
        self._num_pages: dict[int, int] = {}
        # Block name, and True if added, False if removed.
        self._changes: deque[tuple[int, bool]] = deque(maxlen=max_changes)
        # Tiers write on their own threads while the node's loop reads.
        self._lock = threading.Lock()

    @override
    def __repr__(self) -> str:
        return f"<PrefixJournal {len(self._num_pages)} blocks at {self.position}>"

    def add(self, name: int) -> bool:
        """Record that a page in which this block ends is cached; return whether the block is new here."""
        with self._lock:
            count = self._num_pages.get(name, 0)
            if not count and len(self._num_pages) >= self._max_blocks:
                return False
            self._num_pages[name] = count + 1
            if not count:
                self._record(name, is_added=True)
            return not count

    def remove(self, name: int) -> bool:
        """Record that a page in which this block ends was evicted; return whether the block is gone.

        An unreported block is ignored.
        """
        with self._lock:
            count = self._num_pages.get(name)
            if count is None:
                return False
            if count > 1:
                self._num_pages[name] = count - 1
                return False
            del self._num_pages[name]
            self._record(name, is_added=False)
            return True

    def since(self, position: int) -> PrefixChanges | None:
        """Return the changes since `position`; None if there are none.

        The answer never lists more blocks than are cached: it is the full set if there are more changes.
        """
        with self._lock:
            if position == self.position:
                return None
            num_new = self.position - position
            if not 0 < num_new <= len(self._changes) or num_new > len(self._num_pages):
                return PrefixChanges(self.position, True, list(self._num_pages), [])
            # Only the last change of each block counts.
            last = dict(islice(self._changes, len(self._changes) - num_new, None))
            added = [name for name, is_added in last.items() if is_added]
            removed = [name for name, is_added in last.items() if not is_added]
            return PrefixChanges(self.position, False, added, removed)

    def _record(self, name: int, *, is_added: bool) -> None:
        self.position += 1
        self._changes.append((name, is_added))
