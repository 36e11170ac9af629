"""How vLLM's specs divide a block among ranks, and which models only pair with equal sizes."""

import re

import pytest
import torch

# vLLM's dependencies raise deprecation warnings on import.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

BLOCK, DIM = 32, 64
SAME = "the same --tp on both nodes"


def config_of(*specs, layout="LBHNC"):
    """Return the config of one layer per spec; layers of equal specs share a group."""
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    groups = [
        KVCacheGroupSpec([f"{i} {j}" for j in range(specs.count(spec))], spec)
        for i, spec in enumerate(dict.fromkeys(specs))
    ]
    return KVCacheConfig(8, [], groups, kv_cache_layout=layout)


def full(num_kv_heads, **fields):
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    shape = {"block_size": BLOCK, "head_size": DIM, "dtype": torch.float32}
    return FullAttentionSpec(num_kv_heads=num_kv_heads, **shape | fields)


def window(num_kv_heads, **fields):
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    shape = {"block_size": BLOCK, "head_size": DIM, "dtype": torch.float32, "sliding_window": 48}
    return SlidingWindowSpec(num_kv_heads=num_kv_heads, **shape | fields)


def latent():
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    return MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=576, dtype=torch.float32)


def state():
    from vllm.v1.kv_cache_interface import MambaSpec

    return MambaSpec(block_size=BLOCK, shapes=((4, 8),), dtypes=(torch.float32,))


@pytest.mark.parametrize(
    ("num_ranks", "model_heads", "own", "held"),
    [(1, 4, 4, (4, 4)), (2, 4, 2, (2, 4)), (4, 4, 1, (1, 4)), (8, 4, 1, (1, 4)), (2, 1, 1, (1, 1))],
)
def test_ranks_divide_the_heads_of_the_model_or_hold_copies(num_ranks, model_heads, own, held):
    from tandem.vllm.kv_config import heads_of

    heads = heads_of(config_of(full(own)), num_ranks, model_heads)
    assert (heads.num_own, heads.num_all, heads.obstacle) == (*held, "")


def test_groups_of_one_block_size_share_the_parts_that_ranks_divide():
    from tandem.vllm.kv_config import heads_of

    # 8 heads of 32 tokens and 4 of 64: a part of a block has two heads or one.
    config = config_of(full(4), window(2, block_size=2 * BLOCK))
    heads = heads_of(config, 2, 8)
    assert (heads.num_own, heads.num_all) == (2, 4)


def test_every_rank_holds_the_whole_latent():
    from tandem.vllm.kv_config import heads_of

    for layout in ("LBHNC", "LBNHC"):
        heads = heads_of(config_of(latent(), layout=layout), 4, 128)
        assert (heads.num_own, heads.num_all, heads.obstacle) == (1, 1, "")


@pytest.mark.parametrize(
    ("specs", "layout", "why"),
    [
        ([full(2)], "LBNHC", f"layout LBNHC .* set VLLM_KV_CACHE_LAYOUT=LBHNC or {SAME}"),
        ([full(2), state()], "LBHNC", f"recurrent state .* set {SAME}"),
        ([full(2, page_size_padded=1 << 20)], "LBHNC", f"padded .* set {SAME}"),
        ([full(2, num_head_slots=4)], "LBHNC", f"packed.* set {SAME}"),
        ([full(2, head_size=144), latent()], "LBHNC", f"mixed .* set {SAME}"),
        ([full(2), window(1)], "LBHNC", f"mixed .* set {SAME}"),
    ],
)
def test_blocks_without_divisible_heads_name_the_reason_and_the_remedy(specs, layout, why):
    from tandem.vllm.kv_config import heads_of

    heads = heads_of(config_of(*specs, layout=layout), 2, 4)
    assert re.search(why, heads.obstacle)
    assert (heads.num_own, heads.num_all) == (1, 2)


def test_blocks_that_the_attention_kernel_splits_have_no_divisible_heads():
    from tandem.vllm.kv_config import heads_of

    config = config_of(full(2))
    whole, halves = torch.zeros(config.num_blocks, 2), torch.zeros(2 * config.num_blocks, 2)
    assert not heads_of(config, 2, 4, [whole, whole]).obstacle
    assert "set a smaller --block-size or" in heads_of(config, 2, 4, [whole, halves]).obstacle
    assert not heads_of(config_of(latent()), 2, 4, [halves]).obstacle


def test_nodes_of_unequal_sizes_describe_the_same_blocks():
    from tandem.vllm.kv_config import heads_of, layout_facts

    def facts(num_ranks, *specs, layout="LBHNC"):
        from vllm.v1.kv_cache_interface import KVCacheTensor

        config = config_of(*specs, layout=layout)
        names = [name for group in config.kv_cache_groups for name in group.layer_names]
        sizes = [spec.page_size_bytes for spec in specs]
        config.kv_cache_tensors = [KVCacheTensor(0, names, 8 * sizes[0], sizes[0])]
        return layout_facts(config, heads_of(config, num_ranks, 4))

    assert facts(1, full(4)) == facts(2, full(2)) == facts(4, full(1)) == facts(8, full(1))
    assert facts(1, latent()) == facts(2, latent())
    assert facts(1, full(4)) != facts(1, full(4, head_size=2 * DIM))
    assert facts(1, full(4)) != facts(1, full(2))
    assert facts(1, full(4), layout="LBNHC") != facts(2, full(2), layout="LBNHC")
