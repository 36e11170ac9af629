"""Checksums of pages: how decode finds that bytes arrived other than they were sent.

Of a granted page the bytes that prefill wrote are hashed, layer by layer, in the order in which they
lie in decode's page. Both ends work out for themselves which those are: prefill plans the page's tokens
from its own pages to decode's, decode plans the same tokens from its pages to themselves. So page sizes
and heads may differ, and what lies between the written bytes does not matter.

Which layers are hashed follows from the room, so the two ends need not speak of it: one in
`SAMPLE_ONE_IN`, from a draw keyed with the room. A page that went elsewhere, or nowhere, is found in
any layer; a link that flips bits does so again and again, and is found in the first prompts.
"""

from collections.abc import Mapping
from typing import Literal

import numpy as np
import xxhash

from kvtransfer.layout import KVLayout
from kvtransfer.plan import HeadRange, PagedTokens, plan_copies
from kvtransfer.region import MemoryRegion
from wire.ids import Room

Verify = Literal["off", "sample", "always"]
"""How much is hashed: nothing, some layers of each room, all of them."""

# Decode hashes after the last byte came, so all of it is waited for.
SAMPLE_ONE_IN = 32
_ONE_IN: Mapping[Verify, int] = {"off": 0, "sample": SAMPLE_ONE_IN, "always": 1}


def one_in(verify: Verify) -> int:
    """Return of how many layers one is hashed; 0 for none."""
    return _ONE_IN[verify]


def sampled_layers(room: Room, num_layers: int, one_in: int) -> range:
    """Return which layers of a room's pages are hashed; one at least, unless `one_in` is 0."""
    if not one_in:
        return range(0)
    key = room % 2**64  # drivers other than our router may number rooms as they like
    draw = xxhash.xxh3_64_intdigest(key.to_bytes(8, "little"))
    return range(draw % min(one_in, num_layers), num_layers, one_in)


def arrived_sums(
    region: MemoryRegion,
    granted: PagedTokens,
    end_token: int,
    layers: range,
    heads: HeadRange | None = None,
) -> list[int]:
    """Return, at the receiving end, the xxh3-64 of what was written into each page of a grant.

    Args:
        region: The own pool, which holds the pages.
        end_token: One past the last token that was written.
        layers: Those that are hashed.
        heads: Those written, by their place in the own pages; None means all.
    """
    if heads is not None:
        heads = HeadRange(heads.destination_first, heads.destination_first, heads.num_heads)
    sums = _PageSums(region, granted, heads)
    for layer in layers:
        sums.feed(granted, range(granted.first_token, end_token), layer)
    return sums.all()


class PushSums:
    """The same sums at the sending end, made as far as possible while pages are being pushed.

    A page whose tokens come in one run of own pages is hashed with each push; one that is put together
    from several runs, as other page sizes make it, at the end.

    Args:
        region: The own pool.
        granted: Where the prompt goes.
        layers: Those that are hashed.
        heads: Those pushed over this link; None means all.
    """

    def __init__(
        self,
        region: MemoryRegion,
        granted: PagedTokens,
        layers: range,
        heads: HeadRange | None = None,
    ) -> None:
        self._granted, self._layers = granted, layers
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
        for layer in self._layers:
            if layer in layers:
                self._sums.feed(own, tokens, layer)
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
            for layer in self._layers:
                self._sums.feed(PagedTokens(layout, held, first * layout.page_size), tokens, layer)
        return self._sums.all()


class _PageSums:
    """A digest for each page of a grant, of bytes that a pool holds now."""

    def __init__(self, region: MemoryRegion, granted: PagedTokens, heads: HeadRange | None) -> None:
        self._region, self._granted, self._heads = region, granted, heads
        self._digests = [xxhash.xxh3_64() for _ in granted.page_ids]
        self._index_of = {page_id: index for index, page_id in enumerate(granted.page_ids)}

    def begin_again(self, index: int) -> None:
        """Forget what was hashed of a page."""
        self._digests[index].reset()

    def feed(self, source: PagedTokens, tokens: range, layer: int) -> None:
        """Hash one layer of tokens that lie in pages of `source`, all that a granted page has of them."""
        layers = range(layer, layer + 1)
        plan = plan_copies(source, self._granted, tokens, self._heads, layers)
        page_bytes = self._granted.layout.page_bytes
        extents, digests = [], []
        for copy in np.argsort(plan.destination_offset).tolist():
            begin, to = int(plan.source_offset[copy]), int(plan.destination_offset[copy])
            end = to + int(plan.size_bytes[copy])
            while to < end:  # pages of one layer that follow each other are one copy
                page_id = to // page_bytes
                size = min(end, (page_id + 1) * page_bytes) - to
                extents.append(slice(begin, begin + size))
                digests.append(self._digests[self._index_of[page_id]])
                begin, to = begin + size, to + size
        for digest, content in zip(digests, self._region.read(extents), strict=True):
            digest.update(content)

    def all(self) -> list[int]:
        """Return the sums."""
        return [digest.intdigest() for digest in self._digests]
