"""Checksums of pages: how decode finds that bytes arrived other than they were sent.

Of a granted page the bytes that prefill wrote are hashed, slab by slab (K or V of one layer), in the
order in which they lie in decode's page. Both ends work out for themselves which those are: prefill
plans the page's tokens from its own pages to decode's, decode plans the same tokens from its pages to
themselves. So page sizes and heads may differ, and what lies between the written bytes does not matter.

Which slabs are hashed follows from the room, so the two ends need not speak of it: one in
`SAMPLE_ONE_IN`, from a draw keyed with the room. A page that went elsewhere, or nowhere, is found in
any slab; a link that flips bits does so again and again, and is found in the first prompts.
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
"""How much is hashed: nothing, some slabs of each room, all of them."""

# Decode hashes after the last byte came, so all of it is waited for, and bytes that another core has just
# written are read at half the speed of a memcpy.
SAMPLE_ONE_IN = 64
_ONE_IN: Mapping[Verify, int] = {"off": 0, "sample": SAMPLE_ONE_IN, "always": 1}


def one_in(verify: Verify) -> int:
    """Return of how many slabs one is hashed; 0 for none."""
    return _ONE_IN[verify]


def sampled_slabs(room: Room, layout: KVLayout, one_in: int) -> Sequence[int]:
    """Return which slabs of a room's pages are hashed; one at least, unless `one_in` is 0.

    The slabs of layer i are 2 i, its K, and 2 i + 1, its V. Slabs that hold nothing are left out.
    """
    if not one_in:
        return ()
    key = room % 2**64  # drivers other than our router may number rooms as they like
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
    """Return the xxh3-64 of what goes, or went, into each page of a grant.

    Both ends call it and get the same sums: prefill with its own pages, decode with the granted ones.

    Args:
        region: The own pool, which holds the pages of `source`.
        source: Own pages that hold the tokens.
        granted: Decode's pages for them.
        end_token: One past the last token that is pushed.
        slabs: Those that are hashed.
        heads: Those pushed, from `source` to `granted`; None means all.
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
    """Yield indexes of granted pages, and where the bytes of a slab for them lie in the source's pool."""
    layout = granted.layout
    begins = layout.planes.begin
    slab_bytes = int(begins[slab + 1] - begins[slab])
    skipped, slot = divmod(granted.first_token - source.first_token, layout.page_size)
    has_all_heads = heads is None or heads.num_heads == layout.num_kv_heads
    is_whole = slot == 0 and tokens.stop == granted.end_token
    if has_all_heads and is_whole and source.layout.has_same_pages(layout):
        # The usual case, where somebody waits for all this: without the arrays of a plan.
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
        # Both slabs of a layer, and pages of one layer that follow each other, are one copy.
        for page_id in range((to - base) // stride, -(-(end - base) // stride)):
            first = base + page_id * stride
            begin, stop = max(to, first), min(end, first + slab_bytes)
            if begin < stop:
                yield index_of[page_id], slice(begin + shift, stop + shift)


def _place(layout: KVLayout, slab: int) -> tuple[int, int]:
    """Return where a slab of page 0 lies in the pool, and the bytes from page to page."""
    return int(layout.planes.base[slab]), int(layout.planes.stride[slab])
