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
def test_a_single_copy_writes_its_bytes_and_none_beside_them(pools, size_bytes, to):
    source, destination = pools
    destination[:] = 0
    plan = CopyPlan(*(np.array([each], np.int64) for each in (7, to, size_bytes)))
    expected = one_by_one(plan, source, destination)
    copying.copy(plan, source, destination)
    np.testing.assert_array_equal(destination, expected)


def test_without_a_compiler_a_plan_writes_the_same(pools, monkeypatch):
    source, destination = pools
    offsets = np.arange(0, POOL_BYTES, 4096, np.int64)
    plan = CopyPlan(offsets, offsets[::-1].copy(), np.full(len(offsets), 4096, np.int64))
    expected = one_by_one(plan, source, destination)
    monkeypatch.setattr(copying, "kernel", lambda: None)
    copying.copy(plan, source, destination)
    np.testing.assert_array_equal(destination, expected)


@given(plan=plans())
def test_what_was_gathered_is_scattered_to_the_same_places(pools, plan):
    source, destination = pools
    destination[:] = 0
    expected = one_by_one(plan, source, destination)
    staging = np.zeros(plan.total_bytes, np.uint8)
    copying.gather(source, plan, staging)
    copying.scatter(staging, plan, destination)
    np.testing.assert_array_equal(destination, expected)
