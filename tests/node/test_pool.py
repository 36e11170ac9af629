"""Pool memory on a CPU, and page copies for tiers; GPUs are covered by tests/gpu."""

from types import SimpleNamespace

import pytest
import torch

from tandem.kvtransfer.region import DeviceRegion, MemoryRegion
from tandem.node.ranks.pool import Piece, bytes_of, make_region, pinned, pool_pages
from tests.node.test_flags import read

PAGE_BYTES = 64


@pytest.fixture(params=["private", "shared"])
def region(request):
    # One page more than the plan counts, and a partial page.
    with getattr(MemoryRegion, request.param)(5 * PAGE_BYTES + 8) as made:
        made.array()[:] = [i // PAGE_BYTES for i in range(5 * PAGE_BYTES + 8)]
        yield made


def test_pages_are_read_in_the_requested_order(region):
    pages = pool_pages(region, [Piece(0, PAGE_BYTES, PAGE_BYTES)])
    memory = pages.host_memory(3 * PAGE_BYTES)
    views = [memory[i * PAGE_BYTES : (i + 1) * PAGE_BYTES] for i in range(3)]
    pages.read([4, 0, 2], views)
    assert bytes(memory) == bytes([4] * PAGE_BYTES + [0] * PAGE_BYTES + [2] * PAGE_BYTES)


def test_pages_are_written_to_their_places_only(region):
    pages = pool_pages(region, [Piece(0, PAGE_BYTES, PAGE_BYTES)])
    pages.write([3, 1], [memoryview(bytes([30] * PAGE_BYTES)), memoryview(bytearray(PAGE_BYTES))])
    expected = [0, 0, 2, 30, 4]
    assert region.array()[: 5 * PAGE_BYTES].reshape(5, -1)[:, 0].tolist() == expected
    assert set(region.array()[5 * PAGE_BYTES :].tolist()) == {5}


def test_page_of_wrong_length_is_not_written(region):
    pages = pool_pages(region, [Piece(0, PAGE_BYTES, PAGE_BYTES)])
    with pytest.raises(ValueError, match="broadcast"):
        pages.write([1], [memoryview(bytes(PAGE_BYTES - 1))])


def fake_cuda(held: dict[int, int], error: int = 0) -> SimpleNamespace:
    """Return a fake of the CUDA runtime that records pinned bytes by address."""

    def register(address, num_bytes, _flags):
        held[address] = num_bytes
        return error

    return SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=held.pop)


def test_exactly_the_requested_memory_is_pinned_until_released():
    held = {}
    memory = pinned(3 * PAGE_BYTES, fake_cuda(held))
    page = memory[PAGE_BYTES : 2 * PAGE_BYTES]
    assert list(held.values()) == [len(memory)] == [3 * PAGE_BYTES]
    del memory
    assert held
    page[:] = bytes(range(PAGE_BYTES))
    del page
    assert not held


def test_failed_pinning_raises_memory_error():
    with pytest.raises(MemoryError, match="cannot pin 64 bytes: error 2"):
        pinned(PAGE_BYTES, fake_cuda({}, error=2))


@pytest.mark.parametrize(
    ("role", "backend", "is_shared"),
    [
        ("decode", "auto", True),
        ("decode", "shm", True),
        ("decode", "shm,tcp", True),
        ("decode", "tcp", False),
        ("prefill", "auto", False),
    ],
)
def test_pool_is_shared_memory_if_prefill_can_map_it(role, backend, is_shared):
    config, _ = read("--transfer-backend", backend, role=role)
    with make_region(config, SimpleNamespace(memory_bytes=4096)) as region:
        assert (region.path is not None) == is_shared


def test_colocated_node_allocates_a_region_only_for_tiers():
    plan = SimpleNamespace(memory_bytes=4096)
    config, _ = read(role="colocated")
    assert make_region(config, plan) is None
    config, _ = read("--kv-tier", "host:1MiB", role="colocated")
    with make_region(config, plan) as region:
        assert region.size_bytes == 4096


def test_bytes_of_a_region_share_its_memory():
    region = MemoryRegion.private(4096)
    bytes_of(region)[5] = 7
    assert region.buffer[5] == 7
    on_device = torch.zeros(4096, dtype=torch.uint8)
    assert bytes_of(DeviceRegion(on_device)) is on_device
