"""The memory of a page pool: its size, its location, and copies to and from host memory.

The engine computes in this memory, transfers read and write it, and tiers copy whole pages to and from it. The
engine tracks the owners of pages (`tandem.engine.pages.kv_cache`).
"""

import mmap
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tandem.engine.shape import ModelShape
from tandem.kvtier.tier import PoolPages
from tandem.kvtransfer.layout import KVLayout
from tandem.kvtransfer.region import DeviceRegion, MemoryRegion
from tandem.kvtransfer.transports.registry import names_of
from tandem.node.config import NodeConfig
from tandem.wire.errors import ConfigInvalid

if TYPE_CHECKING:  # simulated engines use this module without torch
    import torch

_FOR_ALL_CONTEXTS = 1  # cudaHostRegisterPortable


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The size of a pool to allocate.

    `has_scratch_page`: whether the pool has one page more than `num_pages`; see `make_pool`.
    """

    shape: ModelShape
    num_pages: int
    page_size: int
    has_scratch_page: bool = False

    @property
    def layout(self) -> KVLayout:
        """The pool's layout for transfers."""
        shape = self.shape
        return KVLayout.of_layers(
            self.num_pages, self.page_size, shape.kv_layers, shape.kv_dtype, shape.kv_item_bytes
        )

    @property
    def memory_bytes(self) -> int:
        """Size of the whole pool in bytes, including the scratch page."""
        return self.layout.pool_bytes + self.has_scratch_page * self.layout.page_bytes


MakeRegion = Callable[[PoolPlan], MemoryRegion | None]
"""Allocates the memory of a pool. None: torch allocates it."""


def checked_pages(num_pages: int) -> int:
    """Return `num_pages`; raise `ConfigInvalid` if it is less than 1."""
    if num_pages < 1:
        raise ConfigInvalid(
            "the KV pool has no room for a page; raise --max-total-tokens",
            topic="docs/troubleshooting.md#too-little-memory",
        )
    return num_pages


def make_region(config: NodeConfig, plan: PoolPlan) -> MemoryRegion | None:
    """Allocate memory for a pool; shared memory on a CPU decode node with the shm transport.

    Return None if only the engine uses the memory.
    """
    if config.role == "colocated" and not config.tiers.specs:
        return None
    device, size_bytes = config.engine.device, plan.memory_bytes
    if device != "cpu":
        return _device_region(size_bytes, device)
    # Prefill nodes on this host can map the memory only if it is a file.
    names = names_of(config.transfer.backend, device)
    is_shared = config.role == "decode" and "shm" in names
    return (MemoryRegion.shared if is_shared else MemoryRegion.private)(size_bytes)


def bytes_of(region: MemoryRegion) -> "torch.Tensor":
    """Return the memory of a region as a tensor of bytes."""
    import torch

    if isinstance(region, DeviceRegion):
        assert isinstance(region.tensor, torch.Tensor)
        return region.tensor
    return torch.frombuffer(region.buffer, dtype=torch.uint8)


def _device_region(size_bytes: int, device: str) -> MemoryRegion:
    import torch

    return DeviceRegion.of_bytes(torch.zeros(size_bytes, dtype=torch.uint8, device=device))


# ── for tiers ────────────────────────────────────────────────────────────────────────────────────


class Piece(NamedTuple):
    """A part of every page: the first byte of page 0's, the distance to the next page's, and its size."""

    base: int
    stride: int
    num_bytes: int


def pool_pages(region: MemoryRegion, pieces: Sequence[Piece]) -> PoolPages:
    """Return the pool's pages in a region, which worker threads of tiers copy while the engine's loop runs.

    Args:
        pieces: The parts of a page, in the order of its bytes. Each is copied with one memory copy.
    """
    if isinstance(region, DeviceRegion):
        return _DevicePages(region, pieces)
    return _HostPages(region, pieces)


def _places(pieces: Sequence[Piece]) -> Iterator[slice]:
    """Yield the place of each piece in the bytes of a page."""
    end = 0
    for piece in pieces:
        yield slice(end, end + piece.num_bytes)
        end += piece.num_bytes


class _HostPages:
    """Pages in CPU memory."""

    def __init__(self, region: MemoryRegion, pieces: Sequence[Piece]) -> None:
        self.page_bytes = sum(piece.num_bytes for piece in pieces)
        memory = region.array()
        # By piece: its place in a page, and shape (num_pages, num_bytes).
        self._pieces = [
            (place, _rows(memory, piece))
            for place, piece in zip(_places(pieces), pieces, strict=True)
        ]

    # NumPy releases the GIL during a copy, so that forwards continue; copies between memoryviews would hold it.

    def read(self, page_ids: Sequence[int], into: Sequence[memoryview]) -> None:
        """Copy pages out of the pool."""
        for page, view in zip(page_ids, into, strict=True):
            whole = np.frombuffer(view, np.uint8)
            for place, rows in self._pieces:
                np.copyto(whole[place], rows[page])

    def write(self, page_ids: Sequence[int], pages: Sequence[memoryview]) -> None:
        """Copy pages into the pool."""
        for page, view in zip(page_ids, pages, strict=True):
            whole = np.frombuffer(view, np.uint8)
            for place, rows in self._pieces:
                np.copyto(rows[page], whole[place])

    def host_memory(self, num_bytes: int) -> memoryview:
        """Return host memory for copies of pages."""
        return np.empty(num_bytes, np.uint8).data


def _rows(memory: np.ndarray, piece: Piece) -> np.ndarray:
    num_pages = (memory.size - piece.base - piece.num_bytes) // piece.stride + 1
    return np.lib.stride_tricks.as_strided(
        memory[piece.base :], (num_pages, piece.num_bytes), (piece.stride, 1)
    )


class _DevicePages:
    """Pages in GPU memory, copied on a separate stream.

    The copies need no ordering with the forward stream: tiers read a page only after the forward that wrote it was
    collected, and a forward uses a page only after `write` has returned.
    """

    def __init__(self, region: DeviceRegion, pieces: Sequence[Piece]) -> None:
        import torch

        memory = region.tensor
        assert isinstance(memory, torch.Tensor)
        self.page_bytes = sum(piece.num_bytes for piece in pieces)
        # By piece: its place in a page, and shape (num_pages, num_bytes).
        self._pieces = [
            (
                place,
                memory.as_strided(
                    (
                        (memory.numel() - piece.base - piece.num_bytes) // piece.stride + 1,
                        piece.num_bytes,
                    ),
                    (piece.stride, 1),
                    piece.base,
                ),
            )
            for place, piece in zip(_places(pieces), pieces, strict=True)
        ]
        self._stream = torch.cuda.Stream(region.device)  # type: ignore[no-untyped-call]

    def read(self, page_ids: Sequence[int], into: Sequence[memoryview]) -> None:
        """Copy pages out of the pool."""
        import torch

        with torch.cuda.stream(self._stream):
            for page, view in zip(page_ids, into, strict=True):
                whole = _as_tensor(view)
                for place, rows in self._pieces:
                    whole[place].copy_(rows[page], non_blocking=True)
        self._stream.synchronize()

    def write(self, page_ids: Sequence[int], pages: Sequence[memoryview]) -> None:
        """Copy pages into the pool."""
        import torch

        # Keep references until the copies finish: they read this memory asynchronously.
        sources = [_as_tensor(view) for view in pages]
        with torch.cuda.stream(self._stream):
            for page, source in zip(page_ids, sources, strict=True):
                for place, rows in self._pieces:
                    rows[page].copy_(source[place], non_blocking=True)
        self._stream.synchronize()

    def host_memory(self, num_bytes: int) -> memoryview:
        """Return pinned memory, so that copies need no intermediate buffer."""
        import torch

        return pinned(num_bytes, torch.cuda.cudart())  # type: ignore[no-untyped-call]


def pinned(num_bytes: int, cuda: Any) -> memoryview:
    """Allocate pinned host memory of exactly this size; torch would round it up to a power of two.

    Args:
        cuda: `torch.cuda.cudart()`.

    Raises:
        MemoryError: CUDA cannot pin that much memory.
    """
    memory = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
    address = memory.ctypes.data
    if error := int(cuda.cudaHostRegister(address, num_bytes, _FOR_ALL_CONTEXTS)):
        raise MemoryError(f"CUDA cannot pin {num_bytes} bytes: error {error}")
    weakref.finalize(memory, cuda.cudaHostUnregister, address).atexit = False
    return memory.data


def _as_tensor(view: memoryview) -> "torch.Tensor":
    import torch

    # Copy read-only pages first, because torch warns about tensors on read-only memory.
    array = np.array(view) if view.readonly else np.frombuffer(view, np.uint8)
    return torch.from_numpy(array)
