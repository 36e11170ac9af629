"""Checksums of pages: how decode finds that bytes arrived other than they were sent."""

from collections.abc import Sequence

import xxhash

from kvtransfer.region import MemoryRegion


def page_checksums(region: MemoryRegion, page_bytes: int, page_ids: Sequence[int]) -> list[int]:
    """Return the xxh3-64 of each page."""
    pool = region.buffer
    return [
        xxhash.xxh3_64_intdigest(pool[page * page_bytes : (page + 1) * page_bytes])
        for page in page_ids
    ]
