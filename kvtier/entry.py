"""What tiers keep beside a page: the header that proves it, and which pages routers are told of.

```
 0       8        12       16       24        56          72    128
 magic   version  header   length   digest    checksum    0s     the page
```

Numbers are little-endian. Nodes of other releases read it, so it may not change.
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
    """Return the header of a page; `checksum`: `Checksum` of it."""
    return _HEADER.pack(b"TANDEMKV", VERSION, HEADER_BYTES, num_bytes, digest, checksum)


def header_of(key: PageKey, page: memoryview) -> bytes:
    """Return the header of a page that is in memory."""
    return page_header(key.digest, page.nbytes, Checksum(page).digest())


def is_entry_of(key: PageKey, entry: memoryview) -> bool:
    """Return whether some bytes, header and page, are what was put under this key."""
    if entry.nbytes < HEADER_BYTES:
        return False
    return bytes(entry[:HEADER_BYTES]) == header_of(key, entry[HEADER_BYTES:])


class KnownPages:
    """Pages that this node put into a tier or found there, as far as routers are told of them.

    Only pages that a block ends in are remembered, and of those no more than routers take: the ones that were
    met longest ago are forgotten first. Any thread may call it.

    Attributes:
        journal: Follows.
    """

    def __init__(self, max_pages: int = MAX_BLOCKS) -> None:
        self.journal = PrefixJournal()
        self._max_pages = max_pages
        self._blocks: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()
        self._lock = threading.Lock()

    def met(self, keys: Iterable[PageKey]) -> None:
        """Note that these are there."""
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
                    self._note_gone(self._blocks.popitem(last=False)[1])

    def missed(self, digest: bytes) -> bool:
        """Note that a page is not there; return whether it was known to be."""
        with self._lock:
            blocks = self._blocks.pop(digest, ())
            self._note_gone(blocks)
        return bool(blocks)

    def forget_all(self) -> None:
        """Note that the store is another, or was emptied."""
        with self._lock:
            for blocks in self._blocks.values():
                self._note_gone(blocks)
            self._blocks.clear()

    def _note_gone(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.journal.remove(block)
