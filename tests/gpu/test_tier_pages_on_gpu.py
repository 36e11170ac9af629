"""Pages between a pool in a GPU's memory and tiers."""

import pytest
import torch

from tandem.kvtransfer.region import DeviceRegion
from tandem.node.ranks.pool import Piece, pool_pages

PAGE_BYTES, NUM_PAGES = 1 << 16, 9


@pytest.mark.gpu
def test_pages_go_to_pinned_memory_and_back_beside_a_stream_that_computes():
    memory = torch.arange(NUM_PAGES, device="cuda:0").repeat_interleave(PAGE_BYTES)
    memory = memory.to(torch.uint8)
    pages = pool_pages(DeviceRegion(memory), [Piece(0, PAGE_BYTES, PAGE_BYTES)])
    staged = pages.host_memory(3 * PAGE_BYTES)
    views = [staged[i * PAGE_BYTES : (i + 1) * PAGE_BYTES] for i in range(3)]
    # A queue of work on the stream of the forwards, which a copy must not wait for.
    large = torch.randn(4096, 4096, device="cuda:0")
    torch.cuda.synchronize()
    for _ in range(50):
        large = large @ large / 4096
    pages.read([8, 0, 5], views)
    assert [view[0] for view in views] == [8, 0, 5]
    assert [view[PAGE_BYTES - 1] for view in views] == [8, 0, 5]
    pages.write([1, 2], [views[0], memoryview(bytes(views[2]))])
    torch.cuda.synchronize()
    firsts = memory.view(NUM_PAGES, PAGE_BYTES)[:, 0].tolist()
    assert firsts == [0, 8, 5, 3, 4, 5, 6, 7, 8]
    assert torch.from_numpy(torch.frombuffer(staged, dtype=torch.uint8).numpy()).is_pinned()
