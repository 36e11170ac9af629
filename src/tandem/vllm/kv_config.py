"""Reads vLLM's KV cache config: the groups of layers, and where their blocks lie."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from tandem.vllm.caches import Heads, LayerCache, RankBlocks
from tandem.vllm.hand_offs import LayerGroup
from tandem.wire.errors import ConfigInvalid

# Layouts of vLLM in which a layer's part of a block is [head][token][K and V]. In the others the tokens of a head lie apart.
HEAD_MAJOR = ("LBHNC", "BLHNC")


def groups_of(config: KVCacheConfig) -> tuple[LayerGroup, ...]:
    """Return the layer groups of a model.

    Raises:
        ConfigInvalid: A group keeps state that cannot be handed off.
    """
    if len(config.transfer_group_ids) != len(config.kv_cache_groups) or any(
        group.host_resident for group in config.kv_cache_groups
    ):
        raise ConfigInvalid(
            "vLLM's blocks in host memory cannot be handed off; disable HiSparse",
            topic="docs/vllm.md",
        )
    return tuple(_group(each.kv_cache_spec) for each in config.kv_cache_groups)


def _group(spec: KVCacheSpec) -> LayerGroup:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        kinds = {_group(each) for each in spec.kv_cache_specs.values()}
        if len(kinds) == 1:
            return kinds.pop()
    # Compare exact types: vLLM's subclasses of these lay out their blocks differently.
    if type(spec) in {FullAttentionSpec, MLAAttentionSpec}:
        return LayerGroup(spec.block_size)
    if type(spec) is SlidingWindowSpec:
        more = getattr(spec, "extra_retained_tokens", 0)
        return LayerGroup(spec.block_size, window=spec.sliding_window + more)
    if type(spec) is ChunkedLocalAttentionSpec:
        return LayerGroup(spec.block_size, chunk=spec.attention_chunk_size)
    if type(spec) is MambaSpec:
        return LayerGroup(spec.block_size, window=2)
    raise ConfigInvalid(
        f"this model keeps state that cannot be handed off ({type(spec).__name__}); use a different model, or "
        "vLLM's own connectors",
        topic="docs/vllm.md",
    )


def heads_of(
    config: KVCacheConfig, num_ranks: int, model_kv_heads: int, views: Iterable[Any] = ()
) -> Heads:
    """Return how the ranks of a node divide its blocks.

    Args:
        num_ranks: Tensor-parallel size of the node.
        model_kv_heads: KV heads of the whole model. vLLM gives each rank one head if there are more ranks.
        views: vLLM's tensor of each layer, once they exist. It has more blocks than the config if the kernel splits them.
    """
    specs, layout = list(_specs(config).values()), str(config.kv_cache_layout)
    if any(type(spec) is MambaSpec for spec in specs):
        return _undivided(num_ranks, "state", "blocks with recurrent state")
    is_latent = all(type(spec) is MLAAttentionSpec for spec in specs)
    if layout not in HEAD_MAJOR and not is_latent:
        remedy = f"VLLM_KV_CACHE_LAYOUT={HEAD_MAJOR[0]} or "
        return _undivided(num_ranks, layout, f"blocks of layout {layout}", remedy)
    counts = [_num_heads(spec, num_ranks, model_kv_heads) for spec in specs]
    shares = {num_all // num_own for num_own, num_all in counts}
    sizes = {spec.page_size_bytes for spec in specs}
    # Groups share memory: parts of one size hold the same fraction of the heads in every group.
    are_alike = len(shares) == 1 and (len(sizes) == 1 or len(config.kv_cache_groups) == 1)
    if not are_alike or not all(map(_is_dense, specs)):
        return _undivided(num_ranks, "mixed", "blocks with packed, padded or mixed heads")
    num_all = math.gcd(*(num_all for _, num_all in counts))
    if num_all > 1 and any(len(view) != config.num_blocks for view in views):
        what, remedy = "blocks that the attention kernel splits", "a smaller --block-size or "
        return _undivided(num_ranks, "split", what, remedy)
    return Heads(num_all // shares.pop(), num_all)


def _num_heads(spec: KVCacheSpec, num_ranks: int, model_kv_heads: int) -> tuple[int, int]:
    """Return how many heads of a layer a rank holds, and all ranks together. Each rank holds all of a latent."""
    if type(spec) is MLAAttentionSpec:
        return 1, 1
    num_own = spec.num_kv_heads
    return num_own, num_own * num_ranks if num_own > 1 else min(num_ranks, model_kv_heads)


def _is_dense(spec: KVCacheSpec) -> bool:
    """Whether a layer's part of a block consists of one slot for each head."""
    return spec.page_size_bytes == spec.unpadded_page_size_bytes and spec.num_head_slots is None


def _undivided(num_ranks: int, cause: str, what: str, remedy: str = "") -> Heads:
    """Return the heads of a rank whose blocks have none that can be divided.

    Args:
        cause: In a word.
        what: The blocks, as the subject of a sentence.
        remedy: What to set instead of equal sizes, if anything.
    """
    why = f"{what} cannot be divided by heads; set {remedy}the same --tp on both nodes"
    return Heads(1, num_ranks, why, cause)


def blocks_of(config: KVCacheConfig, heads: Heads) -> RankBlocks:
    """Return the location of a rank's blocks."""
    groups = groups_of(config)
    is_plain = len(groups) == 1 and not config.has_mamba_layers
    return RankBlocks(
        config.num_blocks,
        groups[0].block_size if is_plain else 1,
        tuple(_layer_caches(config)),
        len(groups) == 1,
        heads,
    )


def _specs(config: KVCacheConfig) -> dict[str, KVCacheSpec]:
    """Return the spec of each layer."""
    return {
        name: group.kv_cache_spec.kv_cache_specs[name]
        if isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs)
        else group.kv_cache_spec
        for group in config.kv_cache_groups
        for name in group.layer_names
    }


def _layer_caches(config: KVCacheConfig) -> Iterator[LayerCache]:
    specs = _specs(config)
    for tensor in config.kv_cache_tensors:
        for number, name in enumerate(tensor.layers):
            base = tensor.offset + number * tensor.layer_stride
            yield LayerCache(name, base, tensor.block_stride, specs[name].page_size_bytes)


def layout_facts(config: KVCacheConfig, heads: Heads) -> dict[str, object]:
    """Return the properties of the block layout that must match between two nodes, as JSON values.

    Sizes are those of all ranks together.
    """
    return {
        "order": str(config.kv_cache_layout),
        "groups": [
            [str(group), sorted(each.layer_names)]
            for group, each in zip(groups_of(config), config.kv_cache_groups, strict=True)
        ],
        "heads": heads.num_all,
        "bytes": sorted(
            {
                (piece.layer, piece.num_bytes * heads.num_all // heads.num_own)
                for piece in _layer_caches(config)
            }
        ),
    }
