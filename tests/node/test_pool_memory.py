"""What memory a pool gets."""

import pytest
import torch

from tandem.kvtransfer.region import MemoryRegion
from tandem.node.pool_memory import bytes_of, make_region
from tests.node.test_flags import read


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
def test_a_pool_is_in_shared_memory_where_a_prefill_may_map_it(role, backend, is_shared):
    config, _ = read("--transfer-backend", backend, role=role)
    with make_region(config, 4096) as region:
        assert (region.path is not None) == is_shared


def test_the_bytes_of_a_region_are_the_regions_own():
    region = MemoryRegion.private(4096)
    bytes_of(region)[5] = 7
    assert region.buffer[5] == 7
    on_device = torch.zeros(4096, dtype=torch.uint8)
    assert bytes_of(MemoryRegion.of_tensor(on_device)) is on_device
