"""Checksums of pages: how decode finds that bytes arrived other than they were sent.

Of a granted page the bytes that prefill wrote are hashed, in the order in which they lie in decode's
page. Both ends work out for themselves which those are: prefill plans the page's tokens from its own
pages to decode's, decode plans the same tokens from its pages to themselves. So page sizes and heads
may differ, and what lies between the written bytes does not matter.

Which pages are hashed follows from the room, so the two ends need not speak of it: one in
`SAMPLE_ONE_IN` by a draw keyed with the room, and the last. A link that corrupts does so again and
again, and is found in the first prompts; hashing every byte on both sides would cost as much as half
the copy does.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
import xxhash

from kvtransfer.layout import KVLayout
from kvtransfer.plan import HeadRange, PagedTokens, plan_copies
from kvtransfer.region import MemoryRegion
from wire.ids import Room

Verify = Literal["off", "sample", "always"]
"""How much is hashed: nothing, some pages of each room, all of them."""

# Decode hashes after the last byte came, so all of it is waited for: at 16, a thirtieth of a memcpy.
SAMPLE_ONE_IN = 16
_ONE_IN: Mapping[Verify, int] = {"off": 0, "sample": SAMPLE_ONE_IN, "always": 1}


def one_in(verify: Verify) -> int:
    """Return of how many pages one is hashed; 0 for none."""
    return _ONE_IN[verify]


def sampled_pages(room: Room, num_pages: int, one_in: int) -> list[int]:
    """Return which pages of a grant are hashed, by their place in it, ascending."""
    if not one_in or not num_pages:
        return []
    last = num_pages - 1
    seed = room % 2**64  # drivers other than our router may number rooms as they like
    draws = (xxhash.xxh3_64_intdigest(i.to_bytes(8, "little"), seed=seed) for i in range(last))
    return [i for i, draw in enumerate(draws) if draw % one_in == 0] + [last]


def arrived_sums(
    region: MemoryRegion,
    granted: PagedTokens,
    end_token: int,
    indexes: Iterable[int],
    heads: HeadRange | None = None,
) -> list[int]:
    """Return the xxh3-64 of what was written into pages of a grant, at the receiving end.

    Args:
        region: The own pool, which holds the pages.
        end_token: One past the last token that was written.
        indexes: Which pages, by their place in the grant.
        heads: Those written, by their place in the own pages; None means all.
    """
    if heads is not None:
        heads = HeadRange(heads.destination_first, heads.destination_first, heads.num_heads)
    sums = []
    for index in indexes:
        page, tokens = _page(granted, index, end_token)
        digest = xxhash.xxh3_64()
        _feed(digest, region, _extents(page, page, tokens, heads))
        sums.append(digest.intdigest())
    return sums


class PushSums:
    """The same sums at the sending end, made as far as possible while pages are being pushed.

    A page whose tokens come in one run of own pages is hashed with each push; one that is put together
    from several runs, as other page sizes make it, at the end.

    Args:
        region: The own pool.
        granted: Where the prompt goes.
        indexes: Which of these pages, ascending.
        heads: Those pushed over this link; None means all.
    """

    def __init__(
        self,
        region: MemoryRegion,
        granted: PagedTokens,
        indexes: Sequence[int],
        heads: HeadRange | None = None,
    ) -> None:
        self._region, self._granted, self._heads = region, granted, heads
        self._indexes = indexes
        self._digests: dict[int, xxhash.xxh3_64] = {}
        self._complete: set[int] = set()

    def add(self, own: PagedTokens, layers: range) -> None:
        """Hash what was just pushed. Layers of a run come in order, each once."""
        size, first = self._granted.layout.page_size, self._granted.first_token
        begin = bisect_left(self._indexes, -(-(own.first_token - first) // size))
        for index in self._indexes[begin:]:
            page, tokens = _page(self._granted, index, self._granted.end_token)
            if tokens.stop > own.end_token:
                break
            digest = self._digests.setdefault(index, xxhash.xxh3_64())
            extents = _extents(_holding(own, tokens), page, tokens, self._heads, layers)
            _feed(digest, self._region, extents)
            if layers.stop == own.layout.num_layers:
                self._complete.add(index)

    def finish(self, own_pages: Mapping[int, int], layout: KVLayout, end_token: int) -> list[int]:
        """Hash the rest; return the sums.

        Args:
            own_pages: Ids of the own pages that were pushed, by their place in the prompt.
            layout: Of the own pool.
            end_token: One past the last token that was pushed.
        """
        for index in self._indexes:
            if index in self._complete:
                continue
            page, tokens = _page(self._granted, index, end_token)
            first, last = tokens.start // layout.page_size, (tokens.stop - 1) // layout.page_size
            held = [own_pages[i] for i in range(first, last + 1)]
            own = PagedTokens(layout, held, first * layout.page_size)
            self._digests[index] = digest = xxhash.xxh3_64()
            _feed(digest, self._region, _extents(own, page, tokens, self._heads))
        return [self._digests[index].intdigest() for index in self._indexes]


def _page(granted: PagedTokens, index: int, end_token: int) -> tuple[PagedTokens, range]:
    """Return one granted page, and its tokens before `end_token`."""
    begin = granted.first_token + index * granted.layout.page_size
    page = PagedTokens(granted.layout, [granted.page_ids[index]], begin)
    return page, range(begin, min(page.end_token, end_token))


def _holding(own: PagedTokens, tokens: range) -> PagedTokens:
    """Return only the pages that hold `tokens`: planning looks at every page it is given."""
    size = own.layout.page_size
    first = (tokens.start - own.first_token) // size
    last = (tokens.stop - 1 - own.first_token) // size
    return PagedTokens(own.layout, own.page_ids[first : last + 1], own.first_token + first * size)


def _extents(
    source: PagedTokens,
    page: PagedTokens,
    tokens: range,
    heads: HeadRange | None,
    layers: range | None = None,
) -> Iterator[slice]:
    """Yield where the bytes of `tokens` are in the source's pool, as they follow in `page`."""
    layout = source.layout
    layers = range(layout.num_layers) if layers is None else layers
    if (
        heads is None
        and len(tokens) == page.layout.page_size
        and layout.has_same_pages(page.layout)
    ):
        # The usual case, without the arrays that a plan takes 0.1 ms for.
        begin = source.page_ids[0] * layout.page_bytes + layers.start * layout.layer_bytes
        yield slice(begin, begin + len(layers) * layout.layer_bytes)
        return
    plan = plan_copies(source, page, tokens, heads, layers)
    for i in np.argsort(plan.destination_offset):
        begin = int(plan.source_offset[i])
        yield slice(begin, begin + int(plan.size_bytes[i]))


def _feed(digest: xxhash.xxh3_64, region: MemoryRegion, extents: Iterable[slice]) -> None:
    for extent in extents:
        digest.update(region.read(extent))
