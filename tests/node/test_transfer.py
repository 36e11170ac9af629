"""What memory a pool gets."""

import pytest

from kvtransfer.layout import KVLayout
from node.transfer import make_region
from tests.node.test_flags import read

LAYOUT = KVLayout(2, 4, 1, 1, 8, "float32", 4)


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
    with make_region(config, LAYOUT) as region:
        assert (region.path is not None) == is_shared
