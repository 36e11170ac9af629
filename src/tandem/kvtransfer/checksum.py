"""Checksums of pages, with which decode detects corrupted KV.

The bytes that prefill wrote into a granted page are hashed slab by slab (K or V of one layer), in their order in
decode's page. Each end finds these bytes with a copy plan: prefill plans the page's tokens from its own pages to
decode's, and decode plans the same tokens from its pages to the same pages. Page sizes and heads may therefore
differ, and bytes that were not written do not matter.

The room determines the hashed slabs, so the ends need not exchange them: one in `SAMPLE_ONE_IN`, from a hash of
the room. Any slab reveals a page that was written to the wrong place or not at all. A link that flips bits does
so repeatedly, and is detected within the first prompts.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
import xxhash

from tandem.kvtransfer.layout import KVLayout
from tandem.kvtransfer.plan import HeadRange, PagedTokens, plan_copies
from tandem.kvtransfer.region import MemoryRegion
from tandem.wire.generation import Room

Verify = Literal["off", "sample", "always"]
"""Share of slabs that are hashed: none, one in `SAMPLE_ONE_IN` per room, or all."""

# Hashing everything would delay the hand-off: decode hashes after the last byte has arrived, and reads bytes that a
# different core has just written, which is half as fast as a memcpy.
SAMPLE_ONE_IN = 64
_ONE_IN: Mapping[Verify, int] = {"off": 0, "sample": SAMPLE_ONE_IN, "always": 1}


def one_in(verify: Verify) -> int:
    """Return n if one in n slabs is hashed; 0 for none."""
    return _ONE_IN[verify]


def sampled_slabs(room: Room, layout: KVLayout, one_in: int) -> Sequence[int]:
    """Return the slabs of a room's pages to hash: at least one, unless `one_in` is 0.

    Slab 2 i is K of layer i, slab 2 i + 1 its V. Empty slabs are left out.
    """
    if not one_in:
        return ()
    key = room % 2**64  # rooms of other routers may be any integers
    draw = xxhash.xxh3_64_intdigest(key.to_bytes(8, "little"))
    filled: list[int] = np.flatnonzero(np.diff(layout.planes.begin)).tolist()
    return filled[draw % min(one_in, len(filled)) :: one_in]


def page_sums(
    region: MemoryRegion,
    source: PagedTokens,
    granted: PagedTokens,
    end_token: int,
    *,
    slabs: Sequence[int],
    heads: HeadRange | None = None,
) -> list[int]:
    """Return the XXH3-64 of the bytes pushed into each page of a grant.

    Both ends compute the same sums: prefill from its own pages, decode from the granted pages.

    Args:
        region: The own pool, which holds the pages of `source`.
        source: Own pages that hold the tokens.
        granted: Decode's pages for the tokens.
        end_token: One past the last pushed token.
        slabs: Slabs to hash.
        heads: Pushed heads, from `source` to `granted`; None means all.
    """
    digests = [xxhash.xxh3_64() for _ in granted.page_ids]
    tokens = range(granted.first_token, end_token)
    for slab in slabs:
        places = list(_places(source, granted, tokens, slab, heads))
        contents = region.read([extent for _, extent in places])
        for (index, _), content in zip(places, contents, strict=True):
            digests[index].update(content)
    return [digest.intdigest() for digest in digests]


def _places(
    source: PagedTokens, granted: PagedTokens, tokens: range, slab: int, heads: HeadRange | None
) -> Iterator[tuple[int, slice]]:
    """Yield (index of a granted page, range of the source's pool that holds bytes of the slab for that page)."""
    layout = granted.layout
    begins = layout.planes.begin
    slab_bytes = int(begins[slab + 1] - begins[slab])
    skipped, slot = divmod(granted.first_token - source.first_token, layout.page_size)
    has_all_heads = heads is None or heads.num_heads == layout.num_kv_heads
    is_whole = slot == 0 and tokens.stop == granted.end_token
    if has_all_heads and is_whole and source.layout.has_same_pages(layout):
        # The usual case, on the path of the hand-off: skip the arrays of a plan.
        base, stride = _place(source.layout, slab)
        for index in range(len(granted.page_ids)):
            begin = base + source.page_ids[skipped + index] * stride
            yield index, slice(begin, begin + slab_bytes)
        return
    base, stride = _place(layout, slab)
    index_of = {page_id: index for index, page_id in enumerate(granted.page_ids)}
    plan = plan_copies(source, granted, tokens, heads, range(slab // 2, slab // 2 + 1))
    for copy in np.argsort(plan.destination_offset).tolist():
        to = int(plan.destination_offset[copy])
        shift = int(plan.source_offset[copy]) - to
        end = to + int(plan.size_bytes[copy])
        # One copy may cover both slabs of a layer, and adjacent pages.
        for page_id in range((to - base) // stride, -(-(end - base) // stride)):
            first = base + page_id * stride
            begin, stop = max(to, first), min(end, first + slab_bytes)
            if begin < stop:
                yield index_of[page_id], slice(begin + shift, stop + shift)


def _place(layout: KVLayout, slab: int) -> tuple[int, int]:
    """Return the offset of a slab of page 0 in the pool, and the bytes from page to page."""
    return int(layout.planes.base[slab]), int(layout.planes.stride[slab])
