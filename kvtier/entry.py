"""What tiers in places that others write to share: the header that proves a page, and which pages are known there.

```
 store  0   4        6  8        16         24            56  64
        magic version -  length   checksum   key's digest  -   the page
 file   0       8        12       16       24        56          72    128
        magic   version  header   length   digest    checksum    0s     the page
```

Numbers are little-endian. Both are read by nodes of other releases, so neither may change.
"""

import struct
import threading
from collections import OrderedDict
from collections.abc import Iterable

import xxhash

from tandem.wire.prefixes import KEY_BYTES, MAX_BLOCKS, PageKey, PrefixJournal

_STORE = struct.Struct(f"<4sHxxQQ{KEY_BYTES}s8x")
# A page that begins at a multiple of 64 bytes is copied at full speed.
STORE_HEADER_BYTES = _STORE.size
_FILE = struct.Struct(f"<8sIIQ{KEY_BYTES}s16s56x")
FILE_HEADER_BYTES = _FILE.size
FILE_VERSION = 1
FileChecksum = xxhash.xxh3_128


def store_header(key: PageKey, page: memoryview) -> bytes:
    """Return the header of a page in a store."""
    return _STORE.pack(b"TdKV", 1, page.nbytes, xxhash.xxh3_64_intdigest(page), key.digest)


def is_entry_of(key: PageKey, entry: memoryview) -> bool:
    """Return whether a store's bytes, header and page, are what was put under this key."""
    if entry.nbytes < STORE_HEADER_BYTES:
        return False
    page = entry[STORE_HEADER_BYTES:]
    return bytes(entry[:STORE_HEADER_BYTES]) == store_header(key, page)


def file_header(digest: bytes, num_bytes: int, checksum: bytes) -> bytes:
    """Return the header of a page in a file.

    Args:
        checksum: `FileChecksum` of the page.
    """
    return _FILE.pack(b"TANDEMKV", FILE_VERSION, FILE_HEADER_BYTES, num_bytes, digest, checksum)


class KnownPages:
    """Pages that this node put into a store or found there, as far as routers are told of them.

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
                if key.digest in self._blocks:
                    self._blocks.move_to_end(key.digest)
                    continue
                self._blocks[key.digest] = key.blocks
                for block in key.blocks:
                    self.journal.add(block)
                if len(self._blocks) > self._max_pages:
                    self._note_gone(self._blocks.popitem(last=False)[1])

    def missed(self, key: PageKey) -> bool:
        """Note that this one is not there; return whether it was known to be."""
        with self._lock:
            blocks = self._blocks.pop(key.digest, ())
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
