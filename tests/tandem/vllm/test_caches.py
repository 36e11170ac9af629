import numpy as np
import pytest
import torch

from tandem.kvtransfer.plan import PagedTokens, copy_blocks, plan_copies
from tandem.vllm.caches import Caches
from tandem.wire.errors import ConfigInvalid

L, B, H, N, C = 3, 8, 2, 4, 6
NAMES = [f"model.layers.{layer}.attn" for layer in range(L)]
# Physical order of the axes (layer, block, head, token, content), as in vLLM's KVCacheLayout.
LAYOUTS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
}


def tensors_of(layout: str, fill: int) -> dict[str, torch.Tensor]:
    """Return caches as vLLM allocates them: one piece of memory, viewed layer by layer."""
    order = LAYOUTS[layout]
    sizes = (L, B, H, N, C)
    memory = torch.full([sizes[axis] for axis in order], fill, dtype=torch.bfloat16)
    logical = memory.permute([order.index(axis) for axis in range(5)])
    return {name: logical[layer] for layer, name in enumerate(NAMES)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_are_copied_into_the_blocks_meant_and_nowhere_else(layout):
    source, target = tensors_of(layout, 1), tensors_of(layout, 0)
    for layer, name in enumerate(NAMES):
        source[name] += torch.arange(B * H * N * C).reshape(B, H, N, C) % 100 + layer
    here, there = Caches(source, is_shared=False), Caches(target, is_shared=True)
    assert here.layout.holds_same_heads(there.layout)
    assert [here.indexes[name] for name in NAMES] == list(range(L))
    from_, to = PagedTokens(here.layout, [1, 2, 6]), PagedTokens(there.layout, [7, 3, 4])
    plan = plan_copies(from_, to, range(3 * N), layers=range(1, 3))
    pages = there.layout.places.pages(plan.destination_offset, plan.size_bytes)
    assert set(pages.tolist()) == {7, 3, 4}
    copy_blocks(plan, here.region.array(), there.region.array())
    for layer, name in enumerate(NAMES):
        expected = torch.zeros(B, H, N, C, dtype=torch.bfloat16)
        if layer:
            expected[[7, 3, 4]] = source[name][[1, 2, 6]]
        torch.testing.assert_close(target[name], expected, rtol=0, atol=0)
    there.region.close()


def test_caches_whose_heads_lie_in_another_order_are_not_the_same():
    one, other = (Caches(tensors_of(each, 0), is_shared=False) for each in ("LBHNC", "LBNHC"))
    assert not one.layout.holds_same_heads(other.layout)


def test_a_layer_that_reads_the_blocks_of_another_is_not_moved_twice():
    tensors = tensors_of("LBHNC", 0)
    tensors["model.layers.9.attn"] = tensors[NAMES[1]]
    caches = Caches(tensors, is_shared=False)
    assert caches.layout.num_layers == L
    assert "model.layers.9.attn" not in caches.indexes


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"a": torch.zeros(B, H, N)}, "dimensions"),
        ({"a": torch.zeros(B, H, N, C), "b": torch.zeros(B, H, N, C)}, "pieces of memory"),
        ({"a": torch.zeros(H, B, N, C).permute(1, 0, 2, 3)}, "VLLM_KV_CACHE_LAYOUT"),
    ],
)
def test_memory_of_another_shape_is_refused_with_what_to_do(tensors, words):
    with pytest.raises(ConfigInvalid, match=words):
        Caches(tensors, is_shared=False)


def test_elements_keep_their_type_in_the_layout():
    caches = Caches(tensors_of("LBHNC", 0), is_shared=False)
    assert caches.layout.dtype == "torch.bfloat16"
    assert caches.layout.page_bytes == L * H * N * C * 2
    assert caches.region.array().dtype == np.uint8
