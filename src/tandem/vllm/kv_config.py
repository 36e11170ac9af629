"""Reads vLLM's KV cache config: the groups of layers, and where their blocks lie."""

from collections.abc import Iterator

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

from tandem.vllm.caches import LayerCache, RankBlocks
from tandem.vllm.hand_offs import LayerGroup
from tandem.wire.errors import ConfigInvalid


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


def blocks_of(config: KVCacheConfig) -> RankBlocks:
    """Return the location of a rank's blocks."""
    groups = groups_of(config)
    is_plain = len(groups) == 1 and not config.has_mamba_layers
    return RankBlocks(
        config.num_blocks,
        groups[0].block_size if is_plain else 1,
        tuple(_layer_caches(config)),
        len(groups) == 1,
    )


def _layer_caches(config: KVCacheConfig) -> Iterator[LayerCache]:
    specs = {
        name: group.kv_cache_spec for group in config.kv_cache_groups for name in group.layer_names
    }
    for tensor in config.kv_cache_tensors:
        for number, name in enumerate(tensor.layers):
            spec = specs[name]
            if isinstance(spec, UniformTypeKVCacheSpecs):
                spec = spec.kv_cache_specs[name]
            base = tensor.offset + number * tensor.layer_stride
            yield LayerCache(name, base, tensor.block_stride, spec.page_size_bytes)


def layout_facts(config: KVCacheConfig) -> dict[str, object]:
    """Return the properties of the block layout that must match between two nodes, as JSON values."""
    return {
        "order": str(config.kv_cache_layout),
        "groups": [
            [str(group), sorted(each.layer_names)]
            for group, each in zip(groups_of(config), config.kv_cache_groups, strict=True)
        ],
        "bytes": sorted({(piece.layer, piece.num_bytes) for piece in _layer_caches(config)}),
    }
