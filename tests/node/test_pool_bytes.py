"""Pages between a pool in the CPU's memory and tiers; a GPU's are in tests/gpu."""

import pytest

from tandem.kvtransfer.region import MemoryRegion
from tandem.node.pool_bytes import pool_pages

PAGE_BYTES = 64


@pytest.fixture(params=["private", "shared"])
def region(request):
    # One page more than is counted, and a rest that is no page.
    with getattr(MemoryRegion, request.param)(5 * PAGE_BYTES + 8) as made:
        made.array()[:] = [i // PAGE_BYTES for i in range(5 * PAGE_BYTES + 8)]
        yield made


def test_pages_are_read_in_the_order_asked_for(region):
    pages = pool_pages(region, PAGE_BYTES)
    memory = pages.host_memory(3 * PAGE_BYTES)
    views = [memory[i * PAGE_BYTES : (i + 1) * PAGE_BYTES] for i in range(3)]
    pages.read([4, 0, 2], views)
    assert bytes(memory) == bytes([4] * PAGE_BYTES + [0] * PAGE_BYTES + [2] * PAGE_BYTES)


def test_pages_are_written_where_they_belong_and_nowhere_else(region):
    pages = pool_pages(region, PAGE_BYTES)
    pages.write([3, 1], [memoryview(bytes([30] * PAGE_BYTES)), memoryview(bytearray(PAGE_BYTES))])
    expected = [0, 0, 2, 30, 4]
    assert region.array()[: 5 * PAGE_BYTES].reshape(5, -1)[:, 0].tolist() == expected
    assert set(region.array()[5 * PAGE_BYTES :].tolist()) == {5}


def test_a_page_of_another_length_is_not_written(region):
    pages = pool_pages(region, PAGE_BYTES)
    with pytest.raises(ValueError, match="broadcast"):
        pages.write([1], [memoryview(bytes(PAGE_BYTES - 1))])
