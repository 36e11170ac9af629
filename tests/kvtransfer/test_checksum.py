"""Both ends compute the same checksums, even if page sizes, heads or strips differ."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tandem.kvtransfer.checksum import SAMPLE_ONE_IN, page_sums, sampled_slabs
from tandem.kvtransfer.layout import KVLayout
from tandem.kvtransfer.plan import HeadRange, PagedTokens, plan_copies
from tandem.kvtransfer.region import MemoryRegion
from tandem.wire.generation import Room, new_room
from tandem.wire.hand_off import LayerKV, Strip

NUM_LAYERS = 3
# Latents, a layer that keeps nothing, K and V of two sizes.
UNEVEN = (LayerKV(1, 5, 0), LayerKV(0, 0, 0), LayerKV(2, 3, 2))


def layout_of(page_size: int, heads: int, *, has_strips: bool) -> KVLayout:
    """Return a layout with that many heads; 0 stands for layers that differ."""
    if heads:
        packed = KVLayout(16, page_size, NUM_LAYERS, heads, 4, "int16", 2)
    else:
        packed = KVLayout.of_layers(16, page_size, UNEVEN, "int16", 2)
    if not has_strips:
        return packed
    begin = packed.planes.begin
    first = int(begin[4])  # the layers before the last
    rest = int(begin[6]) - first + 3
    return replace(packed, strips=(Strip(2, first, 4), Strip(first * 16 + 5, rest, 2)))


def region_of(layout: KVLayout, seed: int) -> MemoryRegion:
    region = MemoryRegion.private(layout.pool_bytes)
    rng = np.random.default_rng(seed)
    region.array()[:] = rng.integers(0, 256, layout.pool_bytes, np.uint8)
    return region


class Link:
    """A prompt that is pushed, and hashed at both ends."""

    def __init__(
        self, own_size, their_size, heads, num_have, num_tokens, hashed, strips=(False, False)
    ):
        self.hashed = hashed
        own_heads, their_heads, self.heads = heads
        self.own = layout_of(own_size, own_heads, has_strips=strips[0])
        self.theirs = layout_of(their_size, their_heads, has_strips=strips[1])
        if not own_heads:
            self.hashed = [slab for slab in hashed if slab in (0, 4, 5)] or [4]
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
        return page_sums(
            self.source, own, self.granted, self.end, slabs=self.hashed, heads=self.heads
        )

    def arrived(self) -> list[int]:
        own = self.granted
        return page_sums(self.target, own, own, self.end, slabs=self.hashed, heads=self.own_heads)

    @property
    def own_heads(self) -> HeadRange | None:
        """The heads pushed, by their place in the granted pages."""
        first = self.heads and self.heads.destination_first
        return self.heads and HeadRange(first, first, self.heads.num_heads)

    def written(self) -> np.ndarray:
        """Offsets of the bytes that are hashed, in their pool."""
        heads = self.own_heads
        tokens = range(self.granted.first_token, self.end)
        plans = [
            plan_copies(self.granted, self.granted, tokens, heads, range(slab // 2, slab // 2 + 1))
            for slab in self.hashed
        ]
        copies = [copy for plan in plans for copy in plan.copies()]
        places = np.concatenate([np.arange(to, to + size) for _, to, size in copies])
        return places[np.any([self._is_of(slab, places) for slab in self.hashed], axis=0)]

    def _is_of(self, slab: int, places: np.ndarray) -> np.ndarray:
        planes = self.theirs.planes
        page, slot = np.divmod(places - planes.base[slab], planes.stride[slab])
        size = planes.begin[slab + 1] - planes.begin[slab]
        return (page >= 0) & (page < self.theirs.num_pages) & (slot < size)


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
    st.sampled_from([range(2 * NUM_LAYERS), range(1, 2), range(4, 5), range(0, 2 * NUM_LAYERS, 3)]),
    st.tuples(st.booleans(), st.booleans()),
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


@pytest.mark.parametrize("slab", range(2 * NUM_LAYERS))
def test_any_slab_reveals_a_misplaced_page(slab):
    link = Link(4, 4, (2, 2, None), 0, 15, range(slab, slab + 1))
    sums = link.push()
    first, second = (page_id * link.theirs.page_bytes for page_id in link.granted.page_ids[:2])
    pool, size = link.target.array(), link.theirs.page_bytes
    pool[second : second + size] = pool[first : first + size]
    assert sum(a != b for a, b in zip(link.arrived(), sums, strict=True)) == 1


def test_adjacent_pages_of_one_layer_are_hashed_separately():
    layout = KVLayout(4, 2, 1, 1, 4, "int16", 2)
    region = region_of(layout, 1)
    one, other = (
        page_sums(region, *[PagedTokens(layout, page_ids)] * 2, 4, slabs=range(2))
        for page_ids in ([1, 2], [2, 1])
    )
    assert one == other[::-1]
    assert one[0] != one[1]


def of_layers(num_layers: int) -> KVLayout:
    return KVLayout(4, 2, num_layers, 1, 4, "int16", 2)


def test_the_sample_is_some_slabs_of_each_room():
    assert not sampled_slabs(Room(7), of_layers(80), 0)
    assert sampled_slabs(Room(7), of_layers(80), 1) == list(range(160))
    some = sampled_slabs(Room(7), of_layers(80), SAMPLE_ONE_IN)
    assert some == sampled_slabs(Room(7), of_layers(80), SAMPLE_ONE_IN)
    assert len(some) in (2, 3)


@pytest.mark.parametrize("room", [0, -5, 2**64 + 3])
@pytest.mark.parametrize("num_layers", [1, 30, 32, 100])
def test_a_room_of_any_number_has_a_sample_of_any_model(room, num_layers):
    slabs = sampled_slabs(Room(room), of_layers(num_layers), SAMPLE_ONE_IN)
    assert slabs
    assert set(slabs) <= set(range(2 * num_layers))


def test_every_slab_is_sampled_in_some_room():
    layout = of_layers(36)
    seen = {slab for _ in range(1500) for slab in sampled_slabs(new_room(), layout, SAMPLE_ONE_IN)}
    assert seen == set(range(72))


def test_empty_slab_is_never_sampled():
    layout = KVLayout.of_layers(4, 2, UNEVEN, "int16", 2)
    seen = {slab for _ in range(100) for slab in sampled_slabs(new_room(), layout, SAMPLE_ONE_IN)}
    assert seen == {0, 4, 5}
