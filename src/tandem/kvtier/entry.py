"""The header that tiers store with each page to verify it, and the record of pages for reports to routers.

```
 0       8        12       16       24        56          72    128
 magic   version  header   length   digest    checksum    0s     the page
```

Numbers are little-endian. Nodes of other releases read this format, so it must not change.
"""

import struct
import threading
from collections import OrderedDict
from collections.abc import Iterable

import xxhash

from tandem.wire.prefixes import KEY_BYTES, MAX_BLOCKS, PageKey, PrefixJournal

_HEADER = struct.Struct(f"<8sIIQ{KEY_BYTES}s16s56x")
# A page that begins at a multiple of 64 bytes is copied at full speed.
HEADER_BYTES = _HEADER.size
VERSION = 1
Checksum = xxhash.xxh3_128


def page_header(digest: bytes, num_bytes: int, checksum: bytes) -> bytes:
    """Return the header of a page, given the digest of `Checksum` over its bytes."""
    return _HEADER.pack(b"TANDEMKV", VERSION, HEADER_BYTES, num_bytes, digest, checksum)


def header_of(key: PageKey, page: memoryview) -> bytes:
    """Return the header of a page in memory."""
    return page_header(key.digest, page.nbytes, Checksum(page).digest())


def is_entry_of(key: PageKey, entry: memoryview) -> bool:
    """Whether `entry`, header and page, is what was stored under this key."""
    if entry.nbytes < HEADER_BYTES:
        return False
    return bytes(entry[:HEADER_BYTES]) == header_of(key, entry[HEADER_BYTES:])


class KnownPages:
    """Pages that this node stored in a tier or found there, for reports to routers.

    Only pages in which a block ends count. Beyond `max_pages`, the least recently recorded page is forgotten.
    Thread-safe.

    Attributes:
        journal: Blocks of these pages.
    """

    def __init__(self, max_pages: int = MAX_BLOCKS) -> None:
        self.journal = PrefixJournal()
        self._max_pages = max_pages
        self._blocks: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()
        self._lock = threading.Lock()

    def record(self, keys: Iterable[PageKey]) -> None:
        """Record that the tier holds these pages."""
        with self._lock:
            for key in keys:
                if not key.blocks:
                    continue
                if key.digest not in self._blocks:
                    for block in key.blocks:
                        self.journal.add(block)
                self._blocks[key.digest] = key.blocks
                self._blocks.move_to_end(key.digest)
                if len(self._blocks) > self._max_pages:
                    self._remove_blocks(self._blocks.popitem(last=False)[1])

    def forget(self, digest: bytes) -> bool:
        """Record that the tier lacks a page; return whether it was recorded as stored."""
        with self._lock:
            blocks = self._blocks.pop(digest, ())
            self._remove_blocks(blocks)
        return bool(blocks)

    def forget_all(self) -> None:
        """Forget all pages: the store was emptied or replaced."""
        with self._lock:
            for blocks in self._blocks.values():
                self._remove_blocks(blocks)
            self._blocks.clear()

    def _remove_blocks(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.journal.remove(block)
