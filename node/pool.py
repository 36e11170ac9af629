"""The memory of a pool of pages: how large it is, where it lies, and copies between it and host memory.

The engine computes in it; prefill reads and writes it from other processes; tiers copy whole pages out of it
and into it. Which page is whose is the engine's business (`tandem.engine.kv_cache`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tandem.engine.shape import ModelShape
from tandem.kvtier.tier import PoolPages
from tandem.kvtransfer.layout import KVLayout
from tandem.kvtransfer.region import DeviceRegion, MemoryRegion
from tandem.kvtransfer.transports.registry import names_of
from tandem.node.config import NodeConfig
from tandem.wire.errors import ConfigInvalid

if TYPE_CHECKING:  # a simulated engine has memory, and no tensors
    import torch


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The size of a pool that is to be made.

    `has_scratch_page`: one page more lies behind those counted; see `make_pool`.
    """

    shape: ModelShape
    num_pages: int
    page_size: int
    has_scratch_page: bool = False

    @property
    def layout(self) -> KVLayout:
        """The pool as transfer sees it."""
        shape = self.shape
        return KVLayout.of_layers(
            self.num_pages, self.page_size, shape.kv_layers, shape.kv_dtype, shape.kv_item_bytes
        )

    @property
    def memory_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.layout.pool_bytes + self.has_scratch_page * self.layout.page_bytes


MakeRegion = Callable[[PoolPlan], MemoryRegion | None]
"""Returns the memory of a pool; None leaves it to torch."""


def checked_pages(num_pages: int) -> int:
    """Return the size of a pool; raise `ConfigInvalid` where there is no page."""
    if num_pages < 1:
        raise ConfigInvalid(
            "the KV pool holds no page: raise --max-total-tokens",
            topic="troubleshooting#too-little-memory",
        )
    return num_pages


def make_region(config: NodeConfig, plan: PoolPlan) -> MemoryRegion | None:
    """Return memory for a pool, on decode such that the other side can write into it.

    None where nobody but the engine touches it.
    """
    if config.role == "colocated" and not config.tiers.specs:
        return None
    device, size_bytes = config.engine.device, plan.memory_bytes
    if device != "cpu":
        return _device_region(size_bytes, device)
    # Only memory in a file can be mapped by a prefill of this host.
    names = names_of(config.transfer.backend, device)
    is_shared = config.role == "decode" and "shm" in names
    return (MemoryRegion.shared if is_shared else MemoryRegion.private)(size_bytes)


def bytes_of(region: MemoryRegion) -> "torch.Tensor":
    """Return a region's memory as a tensor of bytes."""
    import torch

    if isinstance(region, DeviceRegion):
        assert isinstance(region.tensor, torch.Tensor)
        return region.tensor
    return torch.frombuffer(region.buffer, dtype=torch.uint8)


def _device_region(size_bytes: int, device: str) -> MemoryRegion:
    import torch

    memory = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    # Not the stream of the forwards: a checksum would wait for all that is queued there.
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def read(extents: Sequence[slice]) -> Iterable[memoryview]:
        if not extents:
            return []  # torch joins no empty list
        with torch.cuda.stream(stream):
            gathered = torch.cat([memory[extent] for extent in extents]).cpu()
        sizes = [extent.stop - extent.start for extent in extents]
        return [piece.numpy().data for piece in torch.split(gathered, sizes)]

    return DeviceRegion(memory, read)


# ── for tiers ────────────────────────────────────────────────────────────────────────────────────


def pool_pages(region: MemoryRegion, page_bytes: int) -> PoolPages:
    """Return the pages of the pool in a region, to be copied by workers of tiers beside the engine's loop.

    A page is one contiguous run of the pool's memory, so a copy of it is one piece.
    """
    if isinstance(region, DeviceRegion):
        return _DevicePages(region, page_bytes)
    return _HostPages(region, page_bytes)


class _HostPages:
    """Pages in the CPU's memory."""

    def __init__(self, region: MemoryRegion, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        whole = region.size_bytes // page_bytes
        self._pages = region.array()[: whole * page_bytes].reshape(whole, page_bytes)

    # NumPy copies without the interpreter's lock, which a copy between memoryviews keeps: forwards go on.

    def read(self, page_ids: Sequence[int], into: Sequence[memoryview]) -> None:
        """Copy pages out of the pool."""
        for page, view in zip(page_ids, into, strict=True):
            np.copyto(np.frombuffer(view, np.uint8), self._pages[page])

    def write(self, page_ids: Sequence[int], pages: Sequence[memoryview]) -> None:
        """Copy pages into the pool."""
        for page, view in zip(page_ids, pages, strict=True):
            np.copyto(self._pages[page], np.frombuffer(view, np.uint8))

    def host_memory(self, num_bytes: int) -> memoryview:
        """Return memory that pages are copied from and to."""
        return np.empty(num_bytes, np.uint8).data


class _DevicePages:
    """Pages in a GPU's memory, copied on a stream beside that of the forwards.

    The two streams need no order: tiers get a page when the forward that wrote it was collected, and a
    forward gets one when `write` has returned.
    """

    def __init__(self, region: DeviceRegion, page_bytes: int) -> None:
        import torch

        assert isinstance(region.tensor, torch.Tensor)
        self.page_bytes = page_bytes
        whole = region.size_bytes // page_bytes
        self._pages = region.tensor[: whole * page_bytes].view(whole, page_bytes)
        self._stream = torch.cuda.Stream(region.device)  # type: ignore[no-untyped-call]

    def read(self, page_ids: Sequence[int], into: Sequence[memoryview]) -> None:
        """Copy pages out of the pool."""
        import torch

        with torch.cuda.stream(self._stream):
            for page, view in zip(page_ids, into, strict=True):
                _as_tensor(view).copy_(self._pages[page], non_blocking=True)
        self._stream.synchronize()

    def write(self, page_ids: Sequence[int], pages: Sequence[memoryview]) -> None:
        """Copy pages into the pool."""
        import torch

        # Kept until the copies are done: they read this memory while the loop goes on.
        sources = [_as_tensor(view) for view in pages]
        with torch.cuda.stream(self._stream):
            for page, source in zip(page_ids, sources, strict=True):
                self._pages[page].copy_(source, non_blocking=True)
        self._stream.synchronize()

    def host_memory(self, num_bytes: int) -> memoryview:
        """Return pinned memory, so that the copies above need no detour."""
        import torch

        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy().data


def _as_tensor(view: memoryview) -> "torch.Tensor":
    import torch

    # A tensor over memory that may not be written is warned of: such a page is copied first.
    array = np.array(view) if view.readonly else np.frombuffer(view, np.uint8)
    return torch.from_numpy(array)
