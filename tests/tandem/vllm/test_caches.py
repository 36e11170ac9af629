import ctypes

import numpy as np
import pytest
import torch

from tandem.kvtransfer import copying
from tandem.kvtransfer.plan import PagedTokens, plan_copies
from tandem.vllm.caches import Blocks, Caches, Piece
from tandem.wire.errors import ConfigInvalid

NUM_LAYERS, NUM_BLOCKS, PAGE, SIZE = 3, 8, 4, 96
NAMES = [f"model.layers.{layer}.attn" for layer in range(NUM_LAYERS)]


def pieces_of(order: str) -> list[Piece]:
    """Return where blocks lie with the layers outside, or with the blocks outside."""
    if order == "layers":
        return [Piece(name, i * NUM_BLOCKS * SIZE, SIZE, SIZE) for i, name in enumerate(NAMES)]
    return [Piece(name, i * SIZE, NUM_LAYERS * SIZE, SIZE) for i, name in enumerate(NAMES)]


def view_of(order: str, memory: torch.Tensor) -> torch.Tensor:
    """Return memory as (layer, block, byte)."""
    if order == "layers":
        return memory.view(NUM_LAYERS, NUM_BLOCKS, SIZE)
    return memory.view(NUM_BLOCKS, NUM_LAYERS, SIZE).permute(1, 0, 2)


def mapped_by_malloc(num_bytes: int) -> torch.Tensor:
    """Return zeros in a mapping of their own, which begin a few bytes behind its start.

    Above 32 MiB malloc asks the system for one, unless a free piece of the heap is as large.
    """
    end_of_heap = ctypes.CDLL(None).sbrk
    end_of_heap.restype = ctypes.c_void_p
    in_heap = [torch.zeros(num_bytes, dtype=torch.uint8)]
    while in_heap[-1].data_ptr() < end_of_heap(0):
        in_heap.append(torch.zeros(num_bytes, dtype=torch.uint8))
    return in_heap.pop()


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("to_order", ["layers", "blocks"])
@pytest.mark.parametrize("from_order", ["layers", "blocks"])
def test_blocks_are_copied_into_the_blocks_meant_and_nowhere_else(from_order, to_order, is_shared):
    source = torch.arange(NUM_LAYERS * NUM_BLOCKS * SIZE).to(torch.uint8)
    target = torch.zeros_like(source)
    here = Caches(source, Blocks(NUM_BLOCKS, PAGE, pieces_of(from_order), True), is_shared=False)
    there = Caches(target, Blocks(NUM_BLOCKS, PAGE, pieces_of(to_order), True), is_shared=is_shared)
    assert here.layout.holds_same_heads(there.layout)
    assert [here.indexes[name] for name in NAMES] == list(range(NUM_LAYERS))
    from_, to = PagedTokens(here.layout, [1, 2, 6]), PagedTokens(there.layout, [7, 3, 4])
    plan = plan_copies(from_, to, range(3 * PAGE), layers=range(1, 3))
    copying.copy(plan, here.region.array(), there.region.array())
    expected = torch.zeros(NUM_LAYERS, NUM_BLOCKS, SIZE, dtype=torch.uint8)
    expected[1:, [7, 3, 4]] = view_of(from_order, source)[1:, [1, 2, 6]]
    torch.testing.assert_close(view_of(to_order, target), expected, rtol=0, atol=0)
    there.region.close()


def test_a_pool_large_enough_for_pages_of_its_own_is_shared_from_where_it_begins():
    num_blocks = (1 << 26) // SIZE
    memory = mapped_by_malloc(num_blocks * SIZE)
    caches = Caches(
        memory, Blocks(num_blocks, PAGE, [Piece("a", 0, SIZE, SIZE)], True), is_shared=True
    )
    assert caches.region.path
    memory[5 * SIZE] = 7
    base = int(caches.layout.planes.base[0])
    assert caches.region.address + base == memory.data_ptr()
    assert caches.region.array()[base + 5 * SIZE] == 7
    caches.region.close()


def test_groups_of_layers_that_overlay_each_other_are_moved_once():
    small = [Piece(f"small {i}", i * 64, NUM_LAYERS * SIZE, 64) for i in range(4)]
    memory = torch.zeros(NUM_LAYERS * NUM_BLOCKS * SIZE, dtype=torch.uint8)
    blocks = Blocks(NUM_BLOCKS, 1, [*pieces_of("blocks"), *small], False)
    caches = Caches(memory, blocks, is_shared=False)
    assert caches.layout.page_bytes == NUM_LAYERS * SIZE
    assert caches.indexes == {}


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([Piece("a", 0, SIZE // 2, SIZE)], "VLLM_KV_CACHE_LAYOUT=LBHNC"),
        ([Piece("a", 0, SIZE, SIZE), Piece("b", 8, 2 * SIZE, SIZE)], "interlock"),
        ([Piece("a", 0, SIZE, SIZE - 1)], "whole bytes"),
    ],
)
def test_memory_of_another_shape_is_refused_with_what_to_do(pieces, words):
    memory = torch.zeros(NUM_BLOCKS * SIZE * 2, dtype=torch.uint8)
    with pytest.raises(ConfigInvalid, match=words):
        Caches(memory, Blocks(4, PAGE, pieces, True), is_shared=False)


def test_a_page_counts_all_bytes_of_a_block():
    memory = torch.zeros(NUM_LAYERS * NUM_BLOCKS * SIZE // 2, dtype=torch.bfloat16)
    caches = Caches(memory, Blocks(NUM_BLOCKS, PAGE, pieces_of("layers"), True), is_shared=False)
    assert caches.layout.page_bytes == NUM_LAYERS * SIZE
    assert caches.region.array().dtype == np.uint8
