"""Both ends compute the same checksums, even if page sizes, heads or strips differ."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tandem.kvtransfer.checksum import is_hashed, page_sums
from tandem.kvtransfer.layout import KVLayout
from tandem.kvtransfer.plan import HeadRange, PagedTokens, plan_copies
from tandem.kvtransfer.region import MemoryRegion
from tandem.wire.hand_off import LayerKV, Strip

NUM_LAYERS = 3
# Latents, a layer that keeps nothing, K and V of two sizes.
UNEVEN = (LayerKV(1, 5, 0), LayerKV(0, 0, 0), LayerKV(2, 3, 2))


def layout_of(page_size: int, heads: int, strip_planes: int) -> KVLayout:
    """Return a layout with that many heads; 0 stands for layers that differ.

    `strip_planes`: planes in the first of two strips; 0: no strips.
    """
    if heads:
        packed = KVLayout(16, page_size, NUM_LAYERS, heads, 4, "int16", 2)
    else:
        packed = KVLayout.of_layers(16, page_size, UNEVEN, "int16", 2)
    if not strip_planes:
        return packed
    begin = packed.planes.begin
    first = int(begin[strip_planes])
    rest = int(begin[6]) - first + 3
    strips = (Strip(2, first, strip_planes), Strip(first * 16 + 5, rest, 6 - strip_planes))
    return replace(packed, strips=strips)


def region_of(layout: KVLayout, seed: int) -> MemoryRegion:
    region = MemoryRegion.private(layout.pool_bytes)
    rng = np.random.default_rng(seed)
    region.array()[:] = rng.integers(0, 256, layout.pool_bytes, np.uint8)
    return region


class Link:
    """A prompt that is pushed, and hashed at both ends."""

    def __init__(self, own_size, their_size, heads, num_have, num_tokens, strips=(0, 0)):
        own_heads, their_heads, self.heads = heads
        self.own = layout_of(own_size, own_heads, strips[0])
        self.theirs = layout_of(their_size, their_heads, strips[1])
        self.source, self.target = region_of(self.own, 1), region_of(self.theirs, 2)
        have = num_have // their_size * their_size
        num_granted = -(-(num_tokens - have) // their_size)
        self.granted = PagedTokens(self.theirs, range(15, 15 - num_granted, -1), have)
        self.own_pages = dict(enumerate(range(-(-num_tokens // own_size))))
        self.end = min(len(self.own_pages) * own_size, self.granted.end_token)

    def push(self) -> list[int]:
        tokens = range(self.granted.first_token, max(self.granted.first_token, self.end))
        own = PagedTokens(self.own, list(self.own_pages.values()))
        for at, to, size in plan_copies(own, self.granted, tokens, self.heads).copies():
            self.target.array()[to : to + size] = self.source.array()[at : at + size]
        return page_sums(self.source, own, self.granted, self.end, self.heads)

    def arrived(self) -> list[int]:
        own = self.granted
        return page_sums(self.target, own, own, self.end, self.own_heads)

    @property
    def own_heads(self) -> HeadRange | None:
        """The heads pushed, by their place in the granted pages."""
        first = self.heads and self.heads.destination_first
        return self.heads and HeadRange(first, first, self.heads.num_heads)

    def written(self) -> np.ndarray:
        """Offsets in decode's pool of the pushed bytes."""
        tokens = range(self.granted.first_token, self.end)
        plan = plan_copies(self.granted, self.granted, tokens, self.own_heads)
        return np.concatenate([np.arange(to, to + size) for _, to, size in plan.copies()])


LINKS = st.builds(
    Link,
    st.sampled_from([1, 2, 3, 4, 8]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from(
        [
            (2, 2, None),
            (2, 1, HeadRange(1, 0, 1)),
            (1, 2, HeadRange(0, 1, 1)),
            (4, 4, None),
            (0, 0, None),
        ]
    ),
    st.integers(0, 8),
    st.integers(9, 15),
    st.tuples(*[st.sampled_from([0, 1, 4, 5])] * 2),
)


@given(LINKS)
def test_both_ends_make_the_same_sums(link):
    assert link.push() == link.arrived()


@given(LINKS, st.integers(0, 1 << 30), st.integers(0, 7))
def test_one_bit_changes_one_sum(link, place, bit):
    sums = link.push()
    written = link.written()
    link.target.array()[written[place % len(written)]] ^= 1 << bit
    assert sum(a != b for a, b in zip(link.arrived(), sums, strict=True)) == 1


def test_misplaced_page_changes_one_sum():
    link = Link(4, 4, (2, 2, None), 0, 15)
    sums = link.push()
    first, second = (page_id * link.theirs.page_bytes for page_id in link.granted.page_ids[:2])
    pool, size = link.target.array(), link.theirs.page_bytes
    pool[second : second + size] = pool[first : first + size]
    assert sum(a != b for a, b in zip(link.arrived(), sums, strict=True)) == 1


def test_one_wrong_bit_anywhere_in_a_page_is_found():
    layout = KVLayout(1, 2, 3, 1, 4, "int16", 2)
    region, page = region_of(layout, 1), PagedTokens(layout, [0])
    right = page_sums(region, page, page, layout.page_size)
    for bit in range(8 * layout.page_bytes):
        region.array()[bit // 8] ^= 1 << bit % 8
        assert page_sums(region, page, page, layout.page_size) != right
        region.array()[bit // 8] ^= 1 << bit % 8


def test_adjacent_pages_of_one_layer_are_hashed_separately():
    layout = KVLayout(4, 2, 1, 1, 4, "int16", 2)
    region = region_of(layout, 1)
    one, other = (
        page_sums(region, *[PagedTokens(layout, page_ids)] * 2, 4) for page_ids in ([1, 2], [2, 1])
    )
    assert one == other[::-1]
    assert one[0] != one[1]


@pytest.mark.parametrize(
    ("verify", "device", "expected"),
    [
        ("auto", "cpu", True),
        ("auto", "cuda:0", False),
        ("always", "cuda:0", True),
        ("off", "cpu", False),
    ],
)
def test_pool_on_a_gpu_is_hashed_only_on_request(verify, device, expected):
    assert is_hashed(verify, SimpleNamespace(device=device)) is expected
