"""The layout of vLLM's blocks: strips of one allocation. The bytes of one head in a block are opaque here."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tandem.kvtransfer.layout import KVLayout
from tandem.kvtransfer.region import DeviceRegion, MemoryRegion
from tandem.wire.errors import ConfigInvalid
from tandem.wire.hand_off import LayerKV, Strip

_ABOUT = "this layout of vLLM's KV cache cannot be handed off"


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The part of every block that belongs to one layer. Groups share the memory: a block belongs to one group at a time.

    Attributes:
        layer: vLLM's name for the layer.
        base: First byte of block 0.
        stride: Bytes from one block to the next.
        num_bytes: Size of the layer's part of one block.
    """

    layer: str
    base: int
    stride: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Heads:
    """How the ranks of a node divide every block.

    Attributes:
        num_own: Heads of this rank: as many consecutive, equal parts of each layer's part of a block.
        num_all: Heads of all ranks. If there are more ranks, several hold the same head.
        obstacle: Why a block has no such parts, and what to set. Each rank then counts as one head, so that only
            nodes with the same number of ranks pair. Empty: they may differ.
        cause: The obstacle in a word; empty: none.
    """

    num_own: int = 1
    num_all: int = 1
    obstacle: str = ""
    cause: str = ""


@dataclass(frozen=True, slots=True)
class RankBlocks:
    """The blocks of a rank.

    Attributes:
        page_size: Tokens per block; 1 if some blocks hold recurrent state or the groups differ.
        are_alike: Whether every layer uses every block, so that layers can be pushed one by one.
    """

    num_blocks: int
    page_size: int
    pieces: Sequence[LayerCache]
    are_alike: bool
    heads: Heads = Heads()


class Caches:
    """The memory of a rank's blocks and their layout.

    Args:
        memory: Any tensor whose storage holds the blocks.

    Attributes:
        indexes: Position of each layer in memory order, by name; empty unless the blocks are alike.
        pieces: The parts of every block, in memory order.
        heads: How the ranks divide the blocks.

    Raises:
        ConfigInvalid: The layout is not supported; the message says what to do.
    """

    def __init__(self, memory: torch.Tensor, blocks: RankBlocks) -> None:
        self.pieces = own = _without_overlays(blocks.pieces)
        names = [piece.layer for piece in own] if blocks.are_alike else []
        self.indexes = {name: index for index, name in enumerate(names)}
        empty = torch.tensor([], dtype=torch.uint8, device=memory.device)
        whole = empty.set_(memory.untyped_storage())
        if memory.device.type == "cpu":
            self.region = MemoryRegion(whole.numpy().data)
        else:
            self.region = DeviceRegion.of_bytes(whole)
        self.heads = blocks.heads
        self.layout = _layout(blocks, own)


def _without_overlays(pieces: Sequence[LayerCache]) -> list[LayerCache]:
    """Merge overlapping pieces; return disjoint ones in memory order that cover the same bytes."""
    own: list[LayerCache] = []
    for piece in sorted(pieces, key=lambda each: each.base):
        if piece.num_bytes > piece.stride:
            raise ConfigInvalid(
                f"{_ABOUT}: a block is not contiguous; set VLLM_KV_CACHE_LAYOUT=LBHNC"
            )
        last = own[-1] if own else None
        if last is None or piece.base >= last.base + last.num_bytes:
            own.append(piece)
            continue
        if piece.stride != last.stride:
            raise ConfigInvalid(
                f"{_ABOUT}: blocks of {last.layer} and {piece.layer} are interleaved"
            )
        end = max(last.base + last.num_bytes, piece.base + piece.num_bytes)
        own[-1] = LayerCache(last.layer, last.base, last.stride, end - last.base)
    return own


def _layout(blocks: RankBlocks, own: Sequence[LayerCache]) -> KVLayout:
    strips: list[Strip] = []
    end = -1
    for piece in own:
        if strips and piece.base == end and piece.stride == strips[-1].stride:
            last = strips.pop()
            strips.append(Strip(last.base, last.stride, last.num_planes + 2))
        else:
            strips.append(Strip(piece.base, piece.stride, 2))
        end = piece.base + piece.num_bytes
    num_parts = blocks.page_size * blocks.heads.num_own
    if any(piece.num_bytes % num_parts for piece in own):
        raise ConfigInvalid(
            f"{_ABOUT}: the size of a block is not a multiple of its {blocks.page_size} tokens x "
            f"{blocks.heads.num_own} heads"
        )
    kept = tuple(LayerKV(1, piece.num_bytes // num_parts, 0) for piece in own)
    num_bytes = sum(each.key_dim for each in kept)
    try:
        return KVLayout(
            blocks.num_blocks,
            blocks.page_size,
            len(own),
            blocks.heads.num_own,
            num_bytes,
            "bytes",
            1,
            kept,
            tuple(strips),
        )
    except ValueError as error:
        raise ConfigInvalid(f"{_ABOUT}: {error}") from error
