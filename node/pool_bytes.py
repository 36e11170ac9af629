"""The bytes of a pool's pages, copied between the pool and host memory for tiers. No bookkeeping.

A page is one contiguous run of the pool's memory, so a copy of it is one piece. Workers of the tiers call
this beside the engine's loop, for pages that are held meanwhile.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tandem.kvtier.tier import PoolPages
from tandem.kvtransfer.region import DeviceRegion, MemoryRegion

if TYPE_CHECKING:  # an engine that is simulated has pages, and no tensors
    import torch


def pool_pages(region: MemoryRegion, page_bytes: int) -> PoolPages:
    """Return the pages of the pool in a region."""
    if isinstance(region, DeviceRegion):
        return DevicePages(region, page_bytes)
    return HostPages(region, page_bytes)


class HostPages:
    """Pages in the CPU's memory.

    Args:
        page_bytes: Bytes of one page.
    """

    def __init__(self, region: MemoryRegion, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        whole = region.size_bytes // page_bytes
        self._pages = region.array()[: whole * page_bytes].reshape(whole, page_bytes)

    # NumPy copies without the interpreter's lock, which a copy between memoryviews keeps: forwards go on.

    def read(self, page_ids: Sequence[int], into: Sequence[memoryview]) -> None:
        """See `PoolPages.read`."""
        for page, view in zip(page_ids, into, strict=True):
            np.copyto(np.frombuffer(view, np.uint8), self._pages[page])

    def write(self, page_ids: Sequence[int], pages: Sequence[memoryview]) -> None:
        """See `PoolPages.write`."""
        for page, view in zip(page_ids, pages, strict=True):
            np.copyto(self._pages[page], np.frombuffer(view, np.uint8))

    def host_memory(self, num_bytes: int) -> memoryview:
        """See `PoolPages.host_memory`."""
        return np.empty(num_bytes, np.uint8).data


class DevicePages:
    """Pages in a GPU's memory, copied on a stream beside that of the forwards.

    A page is given to tiers when the forward that wrote it was collected, and to a forward when `write` has
    returned: so no order between the two streams is needed.
    """

    def __init__(self, region: DeviceRegion, page_bytes: int) -> None:
        import torch

        assert isinstance(region.tensor, torch.Tensor)
        self.page_bytes = page_bytes
        whole = region.size_bytes // page_bytes
        self._pages = region.tensor[: whole * page_bytes].view(whole, page_bytes)
        self._stream = torch.cuda.Stream(region.device)  # type: ignore[no-untyped-call]

    def read(self, page_ids: Sequence[int], into: Sequence[memoryview]) -> None:
        """See `PoolPages.read`."""
        import torch

        with torch.cuda.stream(self._stream):
            for page, view in zip(page_ids, into, strict=True):
                _as_tensor(view).copy_(self._pages[page], non_blocking=True)
        self._stream.synchronize()

    def write(self, page_ids: Sequence[int], pages: Sequence[memoryview]) -> None:
        """See `PoolPages.write`."""
        import torch

        # Kept until the copies are done: they read this memory while the loop goes on.
        sources = [_as_tensor(view) for view in pages]
        with torch.cuda.stream(self._stream):
            for page, source in zip(page_ids, sources, strict=True):
                self._pages[page].copy_(source, non_blocking=True)
        self._stream.synchronize()

    def host_memory(self, num_bytes: int) -> memoryview:
        """See `PoolPages.host_memory`: pinned, so that the copies above need no detour."""
        import torch

        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy().data


def _as_tensor(view: memoryview) -> "torch.Tensor":
    import torch

    # A tensor over memory that may not be written is warned of: such a page is copied first.
    array = np.array(view) if view.readonly else np.frombuffer(view, np.uint8)
    return torch.from_numpy(array)
