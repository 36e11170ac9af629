import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tandem.kvtransfer.layout import KVLayout, Strips
from tandem.kvtransfer.plan import (
    CopyPlan,
    CopyRoute,
    HeadRange,
    PagedTokens,
    plan_copies,
)
from tandem.wire.hand_off import LayerKV, Strip


def layout(page_size=4, heads=2, num_pages=12):
    return KVLayout(num_pages, page_size, 2, heads, 3, "int16", 2)


def pool(shape: KVLayout, fill) -> np.ndarray:
    sizes = (shape.num_pages, shape.num_layers, 2, shape.num_kv_heads, shape.page_size, 3)
    return fill(sizes)


def execute(plan: CopyPlan, source: np.ndarray, destination: np.ndarray) -> np.ndarray:
    src, dst = source.reshape(-1).view(np.uint8), destination.copy().reshape(-1).view(np.uint8)
    for begin, to, size in plan.copies():
        dst[to : to + size] = src[begin : begin + size]
    return dst.view(np.int16).reshape(destination.shape)


def by_element(source, destination, tokens, heads, src, dst):
    """What a plan should do, said in the slowest way."""
    out = dst.copy()
    for token in tokens:
        page, slot = divmod(token - source.first_token, source.layout.page_size)
        to_page, to_slot = divmod(token - destination.first_token, destination.layout.page_size)
        for h in range(heads.num_heads):
            out[destination.page_ids[to_page], :, :, heads.destination_first + h, to_slot] = src[
                source.page_ids[page], :, :, heads.source_first + h, slot
            ]
    return out


@st.composite
def problems(draw):
    heads_src, heads_dst = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    count = draw(st.integers(1, min(heads_src, heads_dst)))
    heads = HeadRange(
        draw(st.integers(0, heads_src - count)), draw(st.integers(0, heads_dst - count)), count
    )
    sides = []
    for num_heads in (heads_src, heads_dst):
        shape = layout(draw(st.integers(1, 8)), num_heads)
        pages = draw(st.permutations(range(shape.num_pages)))[: draw(st.integers(1, 6))]
        sides.append(PagedTokens(shape, pages, draw(st.integers(0, 5))))
    begin = max(side.first_token for side in sides)
    end = max(begin, min(side.end_token for side in sides))
    first = draw(st.integers(begin, end))
    return *sides, range(first, draw(st.integers(first, end))), heads


@given(problems())
def test_plan_equals_copying_element_by_element(problem):
    source, destination, tokens, heads = problem
    rng = np.random.default_rng(0)
    src = pool(source.layout, lambda s: rng.integers(0, 30000, s, np.int16))
    dst = pool(destination.layout, lambda s: np.full(s, -1, np.int16))
    plan = plan_copies(source, destination, tokens, heads)
    expected = by_element(source, destination, tokens, heads, src, dst)
    np.testing.assert_array_equal(execute(plan, src, dst), expected)


# Latents, layers of two sizes, one that keeps nothing of its own, K and V of two sizes.
UNEVEN = (LayerKV(1, 9, 0), LayerKV(2, 4, 4), LayerKV(0, 0, 0), LayerKV(4, 2, 2), LayerKV(2, 5, 3))


def elements(side: PagedTokens, token: int, layers: range, heads: range) -> list[int]:
    """Return where the elements of one token and heads lie in a pool of `UNEVEN` layers, in their order."""
    page, slot = divmod(token - side.first_token, side.layout.page_size)
    strips = side.layout.strips or (Strip(0, side.layout.page_bytes, 2 * len(UNEVEN)),)
    begins = [strip for strip in strips for _ in range(strip.num_planes)]
    found, at, strip = [], 0, None
    for index, layer in enumerate(UNEVEN):
        for plane, dim in enumerate((layer.key_dim, layer.value_dim), 2 * index):
            if begins[plane] is not strip:
                strip = begins[plane]
                at = (strip.base + side.page_ids[page] * strip.stride) // 2
            for each in range(side.layout.num_kv_heads * layer.num_kv_heads):
                if index in layers and each // layer.num_kv_heads in heads:
                    found += range(at + slot * dim, at + (slot + 1) * dim)
                at += side.layout.page_size * dim
    return found


@st.composite
def uneven(draw, shape):
    """Return a pool of `UNEVEN` layers with the heads and pages of `shape`, in one piece or in strips with gaps."""
    packed = KVLayout.of_layers(12, shape.page_size, UNEVEN, "int16", 2)
    packed = replace(packed, num_kv_heads=shape.num_kv_heads)
    filled = np.flatnonzero(np.diff(packed.planes.begin)).tolist()
    cuts = sorted(draw(st.sets(st.sampled_from(filled[1:]))))
    strips, end = [], 0
    for first, stop in zip([0, *cuts], [*cuts, 2 * len(UNEVEN)], strict=True):
        base, gap = end + 2 * draw(st.integers(0, 3)), 2 * draw(st.integers(0, 2))
        stride = int(packed.planes.begin[stop] - packed.planes.begin[first]) + gap
        strips.append(Strip(base, stride, stop - first))
        end = base + 12 * stride
    is_packed = draw(st.booleans())
    return packed if is_packed else replace(packed, strips=tuple(strips))


def layers_hold(layers: range) -> bool:
    return any(UNEVEN[index].num_kv_heads for index in layers)


@given(problems(), st.integers(0, 5), st.integers(0, 5), st.data())
def test_plan_of_differing_layers_and_strips_equals_copying_by_element(problem, one, other, data):
    sides = [side._replace(layout=data.draw(uneven(side.layout))) for side in problem[:2]]
    tokens, layers, heads = problem[2], range(min(one, other), max(one, other)), problem[3]
    firsts = heads.source_first, heads.destination_first
    size = max(side.layout.pool_bytes for side in sides) // 2
    src, dst = np.arange(size, dtype=np.int16), np.full(size, -1, np.int16)
    expected = dst.copy()
    for token in tokens:
        from_, to = (
            elements(side, token, layers, range(first, first + heads.num_heads))
            for side, first in zip(sides, firsts, strict=True)
        )
        expected[to] = src[from_]
    plan = plan_copies(*sides, tokens, heads, layers)
    assert (plan.size_bytes > 0).all()
    np.testing.assert_array_equal(execute(plan, src, dst), expected)
    pages = sides[1].layout.places.pages(plan.destination_offset, plan.size_bytes)
    slots = [divmod(t - sides[1].first_token, sides[1].layout.page_size)[0] for t in tokens]
    assert set(pages.tolist()) == {sides[1].page_ids[i] for i in slots if layers_hold(layers)}


@given(problems(), st.booleans(), st.integers(1, 40), st.data())
def test_plans_of_a_few_layers_make_the_same_copies(problem, is_uneven, max_copies, data):
    source, destination, tokens, heads = problem
    if is_uneven:
        source, destination = (
            side._replace(layout=data.draw(uneven(side.layout))) for side in problem[:2]
        )
    route = CopyRoute(source, destination, tokens, heads)
    end = data.draw(st.integers(0, source.layout.num_layers))
    plans = [*route.plans(range(end), max_copies)]
    plans += route.plans(range(end, source.layout.num_layers), max_copies)
    assert all(len(plan) for plan in plans)
    assert bytes_of(plans) == bytes_of([route.copies()])


def bytes_of(plans) -> dict[int, int]:
    """Return where each byte is read from, by where it is written."""
    return {
        there + at: here + at
        for plan in plans
        for here, there, size in plan.copies()
        for at in range(size)
    }


@given(problems(), st.integers(1, 500), st.integers(1, 9))
def test_batches_make_the_same_copies_within_their_limits(problem, max_bytes, max_copies):
    source, destination, tokens, heads = problem
    rng = np.random.default_rng(0)
    src = pool(source.layout, lambda s: rng.integers(0, 30000, s, np.int16))
    whole = plan_copies(source, destination, tokens, heads)
    once = execute(whole, src, pool(destination.layout, lambda s: np.full(s, -1, np.int16)))
    out = pool(destination.layout, lambda s: np.full(s, -1, np.int16))
    for batch in whole.batches(max_bytes, max_copies):
        assert 0 < len(batch) <= max_copies
        assert batch.total_bytes <= 2 * max_bytes
        assert batch.size_bytes.max() <= max_bytes
        out = execute(batch, src, out)
    np.testing.assert_array_equal(out, once)


def test_equal_pages_that_are_not_adjacent_become_one_copy_each():
    shape = layout()
    plan = plan_copies(PagedTokens(shape, [1, 5, 9]), PagedTokens(shape, [2, 4, 6]), range(12))
    assert plan.size_bytes.tolist() == [shape.page_bytes] * 3
    assert (plan.source_offset // shape.page_bytes).tolist() == [1, 5, 9]


def test_pages_adjacent_on_both_sides_become_one_copy():
    shape = layout()
    plan = plan_copies(
        PagedTokens(shape, [1, 2, 3, 7]), PagedTokens(shape, [4, 5, 6, 7]), range(16)
    )
    assert plan.size_bytes.tolist() == [3 * shape.page_bytes, shape.page_bytes]


def test_no_tokens_need_no_copies():
    plan = plan_copies(PagedTokens(layout(), [1]), PagedTokens(layout(), []), range(0))
    assert (len(plan), plan.total_bytes, list(plan.batches(100, 10))) == (0, 0, [])


def test_a_page_outside_the_pool_is_refused():
    with pytest.raises(ValueError, match="outside the pool of 12"):
        plan_copies(PagedTokens(layout(), [12]), PagedTokens(layout(), [0]), range(4))


def test_tokens_that_a_side_does_not_cover_are_refused():
    with pytest.raises(ValueError, match="not all of"):
        plan_copies(PagedTokens(layout(), [1]), PagedTokens(layout(), [0, 1]), range(8))


def test_pages_of_a_range_are_all_pages_it_overlaps():
    pages = Strips.packed(4, 10).pages(np.array([5, 30]), np.array([10, 1]))
    assert pages.tolist() == [0, 1, 3]


STRIPS = Strips(3, np.array([4, 100]), np.array([10, 20]), np.array([8, 20]))


@pytest.mark.parametrize(
    ("offset", "size"), [(0, 5), (12, 1), (4, 10), (90, 20), (33, 2), (150, 11), (32, 1)]
)
def test_bytes_between_strips_and_pages_belong_to_no_page(offset, size):
    with pytest.raises(ValueError, match="pages of one strip"):
        STRIPS.pages(np.array([offset]), np.array([size]))


def test_pages_are_found_in_each_strip():
    pages = STRIPS.pages(np.array([4, 24, 100, 119]), np.array([8, 8, 60, 2]))
    assert pages.tolist() == [0, 2, 0, 1, 2, 0, 1]
