"""Checksums of pages, with which decode detects corrupted KV.

Every byte that prefill wrote into a granted page is hashed, in its order in decode's page. Each end finds these
bytes with a copy plan: prefill plans the page's tokens from its own pages to decode's, and decode plans the same
tokens from its pages to the same pages. Page sizes and heads may therefore differ, and bytes that were not written
do not matter.

Hashing only some layers would miss most errors: faulty links and memory typically flip a single bit of a page.
"""

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Literal

import xxhash

from tandem.kvtransfer.layout import KVLayout
from tandem.kvtransfer.plan import HeadRange, PagedTokens, plan_copies
from tandem.kvtransfer.region import MemoryRegion

Verify = Literal["auto", "off", "always"]
"""Which pushed bytes are hashed: `off` none, `always` all, `auto` all unless the pool is on a GPU."""


def is_hashed(verify: Verify, region: MemoryRegion) -> bool:
    """Return whether a pool's pages are hashed. `auto` skips GPU pools: their pages would be copied to the host first."""
    return verify == "always" or (verify == "auto" and region.device == "cpu")


def page_sums(
    region: MemoryRegion,
    source: PagedTokens,
    granted: PagedTokens,
    end_token: int,
    heads: HeadRange | None = None,
) -> list[int]:
    """Return the XXH3-64 of the bytes pushed into each page of a grant.

    Both ends compute the same sums: prefill from its own pages, decode from the granted pages.

    Args:
        region: The own pool, which holds the pages of `source`.
        source: Own pages that hold the tokens.
        granted: Decode's pages for the tokens.
        end_token: One past the last pushed token.
        heads: Pushed heads, from `source` to `granted`; None means all.
    """
    digests = [xxhash.xxh3_64() for _ in granted.page_ids]
    layout = granted.layout
    has_all_heads = heads is None or heads.num_heads == layout.num_kv_heads
    skipped, slot = divmod(granted.first_token - source.first_token, layout.page_size)
    is_whole = slot == 0 and end_token == granted.end_token
    if has_all_heads and is_whole and source.layout.has_same_pages(layout):
        page_ids = source.page_ids[skipped : skipped + len(digests)]
        pieces = _whole_pages(source.layout, page_ids)
    else:
        pieces = _written(source, granted, range(granted.first_token, end_token), heads)
    for places in pieces:
        contents = region.read([extent for _, extent in places])
        for (index, _), content in zip(places, contents, strict=True):
            digests[index].update(content)
    return [digest.intdigest() for digest in digests]


Place = tuple[int, slice]
"""Index of a granted page, and a range of the source's pool that holds bytes of it."""


def _whole_pages(layout: KVLayout, page_ids: Sequence[int]) -> Iterator[list[Place]]:
    """Yield the places of each page.

    The usual case, on the path of the hand-off: the ranges are long, so xxhash releases the interpreter lock.
    """
    _, *columns = layout.places
    strips = list(zip(*(column.tolist() for column in columns), strict=True))
    for index, page_id in enumerate(page_ids):
        begins = [(base + page_id * stride, width) for base, stride, width in strips]
        yield [(index, slice(begin, begin + width)) for begin, width in begins]


def _written(
    source: PagedTokens, granted: PagedTokens, tokens: range, heads: HeadRange | None
) -> Iterator[list[Place]]:
    """Yield the places of the given tokens and heads, slab by slab (K or V of one layer)."""
    planes = granted.layout.planes
    index_of = {page_id: index for index, page_id in enumerate(granted.page_ids)}
    for layer in range(granted.layout.num_layers):
        plan = plan_copies(source, granted, tokens, heads, range(layer, layer + 1))
        copies = sorted(plan.copies(), key=itemgetter(1))
        for slab in (2 * layer, 2 * layer + 1):
            base, stride = int(planes.base[slab]), int(planes.stride[slab])
            slab_bytes = int(planes.begin[slab + 1] - planes.begin[slab])
            places = []
            for begin, to, size in copies:
                # A copy may cover both slabs of a layer, and adjacent pages.
                for page_id in range((to - base) // stride, -(-(to + size - base) // stride)):
                    first = base + page_id * stride
                    start, stop = max(to, first), min(to + size, first + slab_bytes)
                    if start < stop and page_id in index_of:  # else in a strip of other slabs
                        extent = slice(start + begin - to, stop + begin - to)
                        places.append((index_of[page_id], extent))
            yield places
