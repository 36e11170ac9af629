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


def arrived_sums(
    region: MemoryRegion,
    granted: PagedTokens,
    end_token: int,
    slabs: Sequence[int],
    heads: HeadRange | None = None,
) -> list[int]:
    """Return, at the receiving end, the xxh3-64 of what was written into each page of a grant.

    Args:
        region: The own pool, which holds the pages.
        end_token: One past the last token that was written.
        slabs: Those that are hashed.
        heads: Those written, by their place in the own pages; None means all.
    """
    if heads is not None:
        heads = HeadRange(heads.destination_first, heads.destination_first, heads.num_heads)
    sums = _PageSums(region, granted, heads)
    for slab in slabs:
        sums.feed(granted, range(granted.first_token, end_token), slab)
    return sums.all()


class PushSums:
    """The same sums at the sending end, made as far as possible while pages are being pushed.

    A page whose tokens come in one run of own pages is hashed with each push; one that is put together
    from several runs, as other page sizes make it, at the end.

    Args:
        region: The own pool.
        granted: Where the prompt goes.
        slabs: Those that are hashed.
        heads: Those pushed over this link; None means all.
    """

    def __init__(
        self,
        region: MemoryRegion,
        granted: PagedTokens,
        slabs: Sequence[int],
        heads: HeadRange | None = None,
    ) -> None:
        self._granted, self._slabs = granted, slabs
        self._sums = _PageSums(region, granted, heads)
        self._incomplete = set(range(len(granted.page_ids)))

    def add(self, own: PagedTokens, layers: range) -> None:
        """Hash what was just pushed. Layers of a run come in order, each once."""
        size, first = self._granted.layout.page_size, self._granted.first_token
        end_token = min(own.end_token, self._granted.end_token)
        begin = max(0, -(-(own.first_token - first) // size))
        is_to_the_end = end_token == self._granted.end_token
        end = len(self._granted.page_ids) if is_to_the_end else (end_token - first) // size
        if begin >= end:
            return
        tokens = range(first + begin * size, min(first + end * size, end_token))
        for slab in self._slabs:
            if slab // 2 in layers:
                self._sums.feed(own, tokens, slab)
        if layers.stop == own.layout.num_layers:
            self._incomplete.difference_update(range(begin, end))

    def finish(self, own_pages: Mapping[int, int], layout: KVLayout, end_token: int) -> list[int]:
        """Hash the rest; return the sums.

        Args:
            own_pages: Ids of the own pages that were pushed, by their place in the prompt.
            layout: Of the own pool.
            end_token: One past the last token that was pushed.
        """
        size = self._granted.layout.page_size
        for index in sorted(self._incomplete):
            begin = self._granted.first_token + index * size
            tokens = range(begin, min(begin + size, end_token))
            first, last = tokens.start // layout.page_size, (tokens.stop - 1) // layout.page_size
            held = [own_pages[i] for i in range(first, last + 1)]
            self._sums.begin_again(index)
            own = PagedTokens(layout, held, first * layout.page_size)
            for slab in self._slabs:
                self._sums.feed(own, tokens, slab)
        return self._sums.all()


class _PageSums:
    """A digest for each page of a grant, of bytes that a pool holds now."""

    def __init__(self, region: MemoryRegion, granted: PagedTokens, heads: HeadRange | None) -> None:
        self._region, self._granted, self._heads = region, granted, heads
        self._has_all_heads = heads is None or heads.num_heads == granted.layout.num_kv_heads
        self._digests = [xxhash.xxh3_64() for _ in granted.page_ids]
        self._index_of = {page_id: index for index, page_id in enumerate(granted.page_ids)}

    def begin_again(self, index: int) -> None:
        """Forget what was hashed of a page."""
        self._digests[index].reset()

    def feed(self, source: PagedTokens, tokens: range, slab: int) -> None:
        """Hash one slab of tokens that lie in pages of `source`, all that a granted page has of them."""
        extents, digests = [], []
        for index, extent in self._extents(source, tokens, slab):
            extents.append(extent)
            digests.append(self._digests[index])
        for digest, content in zip(digests, self._region.read(extents), strict=True):
            digest.update(content)

    def _extents(
        self, source: PagedTokens, tokens: range, slab: int
    ) -> Iterator[tuple[int, slice]]:
        """Yield places in the grant, and what goes there of a slab: where it is in the source's pool."""
        granted, layout = self._granted, self._granted.layout
        page_bytes, planes = layout.page_bytes, layout.planes.begin
        slab_begin, slab_end = int(planes[slab]), int(planes[slab + 1])
        is_all = tokens == range(granted.first_token, granted.end_token)
        if source is granted and is_all and self._has_all_heads:
            # The usual case at decode, where all this is waited for: without the arrays of a plan.
            for index, page_id in enumerate(granted.page_ids):
                begin = page_id * page_bytes
                yield index, slice(begin + slab_begin, begin + slab_end)
            return
        plan = plan_copies(source, granted, tokens, self._heads, range(slab // 2, slab // 2 + 1))
        for copy in np.argsort(plan.destination_offset).tolist():
            to = int(plan.destination_offset[copy])
            shift = int(plan.source_offset[copy]) - to
            end = to + int(plan.size_bytes[copy])
            # Both slabs of a layer, and pages of one layer that follow each other, are one copy.
            for page_id in range(to // page_bytes, -(-end // page_bytes)):
                first = page_id * page_bytes
                begin, stop = max(to, first + slab_begin), min(end, first + slab_end)
                if begin < stop:
                    yield self._index_of[page_id], slice(begin + shift, stop + shift)

    def all(self) -> list[int]:
        """Return the sums."""
        return [digest.intdigest() for digest in self._digests]
