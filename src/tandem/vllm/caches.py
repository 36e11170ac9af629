"""Where vLLM keeps its blocks: one tensor a layer, each (block, head, token, K and V), in one piece of memory."""

from collections.abc import Mapping, Sequence

import torch

from tandem.kvtransfer.layout import KVLayout
from tandem.kvtransfer.region import DeviceRegion, MemoryRegion
from tandem.wire.errors import ConfigInvalid
from tandem.wire.hand_off import LayerKV, Strip

_ABOUT = "this layout of vLLM's KV cache cannot be handed off"


class Caches:
    """The memory of a rank's blocks and their layout.

    Args:
        tensors: As vLLM registers them: of each layer, shape (num_blocks, num_heads, block_size, content), in any
            order of memory in which the heads and tokens of one block lie together.
        is_shared: Whether processes of this host can map the memory; only on CPUs.

    Attributes:
        indexes: The number of each layer that has blocks of its own, by its name.

    Raises:
        ConfigInvalid: The tensors do not lie in this way; the message says what to do.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, is_shared: bool) -> None:
        own: dict[int, torch.Tensor] = {}
        for tensor in tensors.values():  # layers that share blocks come more than once
            own.setdefault(tensor.data_ptr(), tensor)
        layers = [own[address] for address in sorted(own)]
        places = {address: index for index, address in enumerate(sorted(own))}
        self.indexes: dict[str, int] = {}
        for name, tensor in tensors.items():
            index = places[tensor.data_ptr()]
            if index not in self.indexes.values():
                self.indexes[name] = index
        self.region = _region(layers, is_shared=is_shared)
        self.layout = _layout(layers, self.region.address)


def _layout(layers: Sequence[torch.Tensor], address: int) -> KVLayout:
    first = layers[0]
    if any(layer.dim() != 4 for layer in layers):
        raise ConfigInvalid(f"{_ABOUT}: its tensors have {first.dim()} dimensions, not 4")
    num_blocks, _, page_size, _ = first.shape
    if any(layer.shape[0] != num_blocks or layer.shape[2] != page_size for layer in layers):
        raise ConfigInvalid(f"{_ABOUT}: its layers have blocks of several sizes")
    strips: list[Strip] = []
    end = -1
    for layer in layers:
        base, stride = layer.data_ptr() - address, layer.stride(0) * layer.itemsize
        if strips and base == end and stride == strips[-1].stride:
            last = strips.pop()
            strips.append(Strip(last.base, stride, last.num_planes + 2))
        else:
            strips.append(Strip(base, stride, 2))
        end = base + layer[0].nbytes
    kept = tuple(_kept(layer) for layer in layers)
    dim = sum(each.num_kv_heads * each.key_dim for each in kept)
    itemsize = first.itemsize
    try:
        return KVLayout(
            num_blocks,
            page_size,
            len(layers),
            1,
            dim,
            str(first.dtype),
            itemsize,
            kept,
            tuple(strips),
        )
    except ValueError as error:
        raise ConfigInvalid(f"{_ABOUT}: {error}") from error


def _kept(layer: torch.Tensor) -> LayerKV:
    """Return what a layer keeps of a token: K and V of a head lie together, as one K."""
    _, num_heads, page_size, content = layer.shape
    strides = layer.stride()[1:]
    if strides == (page_size * content, content, 1):
        return LayerKV(num_heads, content, 0)
    if strides == (content, num_heads * content, 1):
        return LayerKV(1, num_heads * content, 0)
    raise ConfigInvalid(
        f"{_ABOUT}: the parts of a block are apart (strides {tuple(layer.stride())}): set VLLM_KV_CACHE_LAYOUT=HND"
    )


def _region(layers: Sequence[torch.Tensor], *, is_shared: bool) -> MemoryRegion:
    first = layers[0]
    storages = {layer.untyped_storage().data_ptr() for layer in layers}
    if len(storages) > 1:
        raise ConfigInvalid(f"{_ABOUT}: its layers are {len(storages)} pieces of memory")
    storage = first.untyped_storage()
    if first.device.type == "cpu":
        return MemoryRegion.adopted(storage.data_ptr(), storage.nbytes(), is_shared=is_shared)
    memory = torch.tensor([], dtype=torch.uint8, device=first.device).set_(storage)
    return DeviceRegion.of_bytes(memory)
