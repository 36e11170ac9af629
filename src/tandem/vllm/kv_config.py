"""How vLLM keeps the state of a model: its groups of layers, and where their blocks lie."""

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

from tandem.vllm.caches import Blocks, Piece
from tandem.vllm.halves import Group
from tandem.wire.errors import ConfigInvalid


def groups_of(config: KVCacheConfig) -> tuple[Group, ...]:
    """Return the groups of a model.

    Raises:
        ConfigInvalid: One keeps something that cannot be handed off.
    """
    if len(config.transfer_group_ids) != len(config.kv_cache_groups) or any(
        group.host_resident for group in config.kv_cache_groups
    ):
        raise ConfigInvalid(
            "blocks that vLLM keeps in the host's memory cannot be handed off: leave HiSparse out",
            topic="vllm",
        )
    return tuple(_group(each.kv_cache_spec) for each in config.kv_cache_groups)


def _group(spec: KVCacheSpec) -> Group:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        kinds = {_group(each) for each in spec.kv_cache_specs.values()}
        if len(kinds) == 1:
            return kinds.pop()
    # By their exact types: what vLLM derives from these keeps its blocks in other ways.
    if type(spec) in {FullAttentionSpec, MLAAttentionSpec}:
        return Group(spec.block_size)
    if type(spec) is SlidingWindowSpec:
        more = getattr(spec, "extra_retained_tokens", 0)
        return Group(spec.block_size, window=spec.sliding_window + more)
    if type(spec) is ChunkedLocalAttentionSpec:
        return Group(spec.block_size, chunk=spec.attention_chunk_size)
    if type(spec) is MambaSpec:
        return Group(spec.block_size, window=2)
    raise ConfigInvalid(
        f"this model keeps state of a kind that cannot be handed off ({type(spec).__name__}): use another model, or "
        "vLLM's own connectors",
        topic="vllm",
    )


def blocks_of(config: KVCacheConfig) -> Blocks:
    """Return where the blocks of a rank lie."""
    groups = groups_of(config)
    is_plain = len(groups) == 1 and not config.has_mamba_layers
    return Blocks(
        config.num_blocks,
        groups[0].block_size if is_plain else 1,
        tuple(_pieces(config)),
        len(groups) == 1,
    )


def _pieces(config: KVCacheConfig) -> Iterator[Piece]:
    specs = {
        name: group.kv_cache_spec for group in config.kv_cache_groups for name in group.layer_names
    }
    for tensor in config.kv_cache_tensors:
        for number, name in enumerate(tensor.layers):
            spec = specs[name]
            if isinstance(spec, UniformTypeKVCacheSpecs):
                spec = spec.kv_cache_specs[name]
            base = tensor.offset + number * tensor.layer_stride
            yield Piece(name, base, tensor.block_stride, spec.page_size_bytes)


def facts_of(config: KVCacheConfig) -> dict[str, object]:
    """Return what must be equal on two nodes for their blocks to be interchangeable, as JSON-like values."""
    return {
        "order": str(config.kv_cache_layout),
        "groups": [
            [str(group), sorted(each.layer_names)]
            for group, each in zip(groups_of(config), config.kv_cache_groups, strict=True)
        ],
        "bytes": sorted({(piece.layer, piece.num_bytes) for piece in _pieces(config)}),
    }
