import numpy as np
import pytest
import torch

from tandem.kvtransfer import copying
from tandem.kvtransfer.plan import PagedTokens, plan_copies
from tandem.vllm.caches import Caches, LayerCache, RankBlocks
from tandem.wire.errors import ConfigInvalid

NUM_LAYERS, NUM_BLOCKS, PAGE, SIZE = 3, 8, 4, 96
NAMES = [f"model.layers.{layer}.attn" for layer in range(NUM_LAYERS)]


def pieces_of(order: str) -> list[LayerCache]:
    """Return the location of blocks, with layers or blocks as the outer dimension."""
    if order == "layers":
        return [LayerCache(name, i * NUM_BLOCKS * SIZE, SIZE, SIZE) for i, name in enumerate(NAMES)]
    return [LayerCache(name, i * SIZE, NUM_LAYERS * SIZE, SIZE) for i, name in enumerate(NAMES)]


def view_of(order: str, memory: torch.Tensor) -> torch.Tensor:
    """Return a view of the memory as (layer, block, byte)."""
    if order == "layers":
        return memory.view(NUM_LAYERS, NUM_BLOCKS, SIZE)
    return memory.view(NUM_BLOCKS, NUM_LAYERS, SIZE).permute(1, 0, 2)


@pytest.mark.parametrize("to_order", ["layers", "blocks"])
@pytest.mark.parametrize("from_order", ["layers", "blocks"])
def test_blocks_are_copied_to_their_targets_and_nowhere_else(from_order, to_order):
    source = torch.arange(NUM_LAYERS * NUM_BLOCKS * SIZE).to(torch.uint8)
    target = torch.zeros_like(source)
    here = Caches(source, RankBlocks(NUM_BLOCKS, PAGE, pieces_of(from_order), True))
    there = Caches(target, RankBlocks(NUM_BLOCKS, PAGE, pieces_of(to_order), True))
    assert here.layout.holds_same_heads(there.layout)
    assert [here.indexes[name] for name in NAMES] == list(range(NUM_LAYERS))
    from_, to = PagedTokens(here.layout, [1, 2, 6]), PagedTokens(there.layout, [7, 3, 4])
    plan = plan_copies(from_, to, range(3 * PAGE), layers=range(1, 3))
    copying.copy(plan, here.region.array(), there.region.array())
    expected = torch.zeros(NUM_LAYERS, NUM_BLOCKS, SIZE, dtype=torch.uint8)
    expected[1:, [7, 3, 4]] = view_of(from_order, source)[1:, [1, 2, 6]]
    torch.testing.assert_close(view_of(to_order, target), expected, rtol=0, atol=0)
    there.region.close()


def test_overlapping_layer_groups_are_copied_once():
    small = [LayerCache(f"small {i}", i * 64, NUM_LAYERS * SIZE, 64) for i in range(4)]
    memory = torch.zeros(NUM_LAYERS * NUM_BLOCKS * SIZE, dtype=torch.uint8)
    blocks = RankBlocks(NUM_BLOCKS, 1, [*pieces_of("blocks"), *small], False)
    caches = Caches(memory, blocks)
    assert caches.layout.page_bytes == NUM_LAYERS * SIZE
    assert caches.indexes == {}


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([LayerCache("a", 0, SIZE // 2, SIZE)], "VLLM_KV_CACHE_LAYOUT=LBHNC"),
        ([LayerCache("a", 0, SIZE, SIZE), LayerCache("b", 8, 2 * SIZE, SIZE)], "interleaved"),
        ([LayerCache("a", 0, SIZE, SIZE - 1)], "not a multiple"),
    ],
)
def test_unsupported_layout_is_rejected(pieces, words):
    memory = torch.zeros(NUM_BLOCKS * SIZE * 2, dtype=torch.uint8)
    with pytest.raises(ConfigInvalid, match=words):
        Caches(memory, RankBlocks(4, PAGE, pieces, True))


def test_page_bytes_include_all_layers_of_a_block():
    memory = torch.zeros(NUM_LAYERS * NUM_BLOCKS * SIZE // 2, dtype=torch.bfloat16)
    caches = Caches(memory, RankBlocks(NUM_BLOCKS, PAGE, pieces_of("layers"), True))
    assert caches.layout.page_bytes == NUM_LAYERS * SIZE
    assert caches.region.array().dtype == np.uint8


def test_closed_region_leaves_the_memory_to_vllm():
    memory = torch.zeros(NUM_LAYERS * NUM_BLOCKS * SIZE, dtype=torch.uint8)
    caches = Caches(memory, RankBlocks(NUM_BLOCKS, PAGE, pieces_of("layers"), True))
    caches.region.array()[5] = 7
    caches.region.close()
    assert memory[5] == 7
    memory[6] = 8
