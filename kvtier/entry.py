"""What a page is wrapped in where others can write too: enough to tell that it is the one asked for, whole.

```
 bytes  0   4        6  8        16         24            56  64
        magic version -  length   checksum   key's digest  -   the page
```
"""

import struct

import xxhash

from tandem.wire.page_keys import KEY_BYTES, PageKey

_HEADER = struct.Struct(f"<4sHxxQQ{KEY_BYTES}s8x")
# A page that begins at a multiple of 64 bytes is copied at full speed.
HEADER_BYTES = _HEADER.size
_MAGIC, _VERSION = b"TdKV", 1


def entry_header(key: PageKey, page: memoryview) -> bytes:
    """Return what stands before a page."""
    return _HEADER.pack(_MAGIC, _VERSION, page.nbytes, xxhash.xxh3_64_intdigest(page), key.digest)


def is_entry_of(key: PageKey, entry: memoryview) -> bool:
    """Return whether these bytes are this page's, as it was put."""
    if entry.nbytes < HEADER_BYTES:
        return False
    page = entry[HEADER_BYTES:]
    return bytes(entry[:HEADER_BYTES]) == entry_header(key, page)
