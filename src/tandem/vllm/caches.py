"""Where vLLM keeps its blocks: strips of one piece of memory, whose inside is vLLM's own business."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tandem.kvtransfer.layout import KVLayout
from tandem.kvtransfer.region import DeviceRegion, MemoryRegion
from tandem.wire.errors import ConfigInvalid
from tandem.wire.hand_off import LayerKV, Strip

_ABOUT = "this layout of vLLM's KV cache cannot be handed off"


@dataclass(frozen=True, slots=True)
class Piece:
    """What one layer keeps of every block. Groups of layers overlay each other: a block is of one group at a time.

    Attributes:
        layer: vLLM's name of it.
        base: First byte of block 0.
        stride: Bytes from one block to the next.
        num_bytes: Of one block.
    """

    layer: str
    base: int
    stride: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of a rank.

    Attributes:
        page_size: Tokens of a block, or 1 where blocks hold something else than tokens too.
        are_alike: Every layer uses every block, so that layers can be pushed one by one.
    """

    num_blocks: int
    page_size: int
    pieces: Sequence[Piece]
    are_alike: bool


class Caches:
    """The memory of a rank's blocks and their layout.

    Args:
        memory: Any view of the memory.
        is_shared: Whether processes of this host can map the memory; only on CPUs.

    Attributes:
        indexes: The number of each layer in the order of memory, by its name; empty if blocks are not alike.

    Raises:
        ConfigInvalid: The blocks do not lie in this way; the message says what to do.
    """

    def __init__(self, memory: torch.Tensor, blocks: Blocks, *, is_shared: bool) -> None:
        self._memory = memory  # the region does not keep it
        own = _without_overlays(blocks.pieces)
        names = [piece.layer for piece in own] if blocks.are_alike else []
        self.indexes = {name: index for index, name in enumerate(names)}
        storage = memory.untyped_storage()
        if memory.device.type == "cpu":
            self.region = MemoryRegion.adopted(
                storage.data_ptr(), storage.nbytes(), is_shared=is_shared
            )
        else:
            whole = torch.tensor([], dtype=torch.uint8, device=memory.device).set_(storage)
            self.region = DeviceRegion.of_bytes(whole)
        # A shared region begins with a page of the system, somewhat before the memory.
        self.layout = _layout(blocks, own, storage.data_ptr() - self.region.address)


def _without_overlays(pieces: Sequence[Piece]) -> list[Piece]:
    """Return pieces that do not overlap, in the order of memory, which cover all given ones."""
    own: list[Piece] = []
    for piece in sorted(pieces, key=lambda each: each.base):
        if piece.num_bytes > piece.stride:
            raise ConfigInvalid(
                f"{_ABOUT}: the parts of a block are apart: set VLLM_KV_CACHE_LAYOUT=LBHNC"
            )
        last = own[-1] if own else None
        if last is None or piece.base >= last.base + last.num_bytes:
            own.append(piece)
            continue
        if piece.stride != last.stride:
            raise ConfigInvalid(f"{_ABOUT}: blocks of {last.layer} and {piece.layer} interlock")
        end = max(last.base + last.num_bytes, piece.base + piece.num_bytes)
        own[-1] = Piece(last.layer, last.base, last.stride, end - last.base)
    return own


def _layout(blocks: Blocks, own: Sequence[Piece], begin: int) -> KVLayout:
    """Return the layout of memory that begins with this byte of its region."""
    strips: list[Strip] = []
    end = -1
    for piece in own:
        if strips and piece.base == end and piece.stride == strips[-1].stride:
            last = strips.pop()
            strips.append(Strip(last.base, last.stride, last.num_planes + 2))
        else:
            strips.append(Strip(begin + piece.base, piece.stride, 2))
        end = piece.base + piece.num_bytes
    if any(piece.num_bytes % blocks.page_size for piece in own):
        raise ConfigInvalid(
            f"{_ABOUT}: its blocks are not whole bytes of {blocks.page_size} tokens"
        )
    kept = tuple(LayerKV(1, piece.num_bytes // blocks.page_size, 0) for piece in own)
    num_bytes = sum(each.key_dim for each in kept)
    try:
        return KVLayout(
            blocks.num_blocks,
            blocks.page_size,
            len(own),
            1,
            num_bytes,
            "bytes",
            1,
            kept,
            tuple(strips),
        )
    except ValueError as error:
        raise ConfigInvalid(f"{_ABOUT}: {error}") from error
