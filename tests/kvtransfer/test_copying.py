"""Plans executed within one process."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.kvtransfer import copying
from tandem.kvtransfer.plan import CopyPlan
from tandem.kvtransfer.region import MemoryRegion

POOL_BYTES = 1 << 18


@pytest.fixture(scope="module")
def pools():
    with (
        MemoryRegion.private(POOL_BYTES) as source,
        MemoryRegion.private(POOL_BYTES) as destination,
    ):
        source.array()[:] = np.random.default_rng(0).integers(0, 256, POOL_BYTES, np.uint8)
        yield source.array(), destination.array()


@st.composite
def plans(draw):
    """Copies side by side, with gaps, in any order; mostly of one size, as those of pages are."""
    num_copies = draw(st.integers(0, 40))
    align = draw(st.sampled_from([1, 64]))
    sizes = st.integers(1, POOL_BYTES // 64 // align).map(lambda units: units * align)
    if draw(st.booleans()):
        size_bytes = np.full(num_copies, draw(sizes), np.int64)
    else:
        size_bytes = np.array(
            draw(st.lists(sizes, min_size=num_copies, max_size=num_copies)), np.int64
        )
    order = np.array(draw(st.permutations(range(num_copies))), np.int64)
    begins = [
        (np.cumsum(size_bytes + gap) - size_bytes)[order]
        for gap in draw(st.tuples(*(st.sampled_from([0, 1, 64, 320]),) * 2))
    ]
    return CopyPlan(*begins, size_bytes[order])


def one_by_one(plan, source, destination):
    out = destination.copy()
    for begin, to, size in plan.copies():
        out[to : to + size] = source[begin : begin + size]
    return out


@given(plan=plans())
def test_a_plan_writes_what_its_copies_write_one_by_one(pools, plan):
    source, destination = pools
    destination[:] = 0
    expected = one_by_one(plan, source, destination)
    copying.copy(plan, source, destination)
    np.testing.assert_array_equal(destination, expected)


@pytest.mark.parametrize("to", [64, 65])
@pytest.mark.parametrize("size_bytes", [1, 2047, 2048, 100_001])
def test_single_copy_writes_only_its_own_bytes(pools, size_bytes, to):
    source, destination = pools
    destination[:] = 0
    plan = CopyPlan(*(np.array([each], np.int64) for each in (7, to, size_bytes)))
    expected = one_by_one(plan, source, destination)
    copying.copy(plan, source, destination)
    np.testing.assert_array_equal(destination, expected)


@pytest.mark.parametrize("size_bytes", [1, 100, copying.MAX_INDEXED_BYTES])
def test_small_copies_beyond_one_buffer_all_arrive(pools, monkeypatch, size_bytes):
    monkeypatch.setattr(copying, "BUFFER_BYTES", 2 * copying.MAX_INDEXED_BYTES)
    source, destination = pools
    destination[:] = 0
    offsets = np.arange(0, POOL_BYTES - size_bytes + 1, size_bytes, np.int64)
    plan = CopyPlan(offsets, offsets[::-1].copy(), np.full(len(offsets), size_bytes, np.int64))
    expected = one_by_one(plan, source, destination)
    copying.copy(plan, source, destination)
    np.testing.assert_array_equal(destination, expected)


@given(plan=plans())
def test_scatter_is_the_inverse_of_gather(pools, plan):
    source, destination = pools
    destination[:] = 0
    expected = one_by_one(plan, source, destination)
    staging = np.zeros(plan.total_bytes, np.uint8)
    copying.gather(source, plan, staging)
    copying.scatter(staging, plan, destination)
    np.testing.assert_array_equal(destination, expected)
