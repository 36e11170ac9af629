"""Memory for a pool: where the engine computes, and where the other side can write or read."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tandem.kvtransfer.region import DeviceRegion, MemoryRegion
from tandem.kvtransfer.transports.registry import names_of
from tandem.node.config import NodeConfig

if TYPE_CHECKING:  # an engine that is simulated has memory, and no tensors
    import torch


def make_region(config: NodeConfig, size_bytes: int) -> MemoryRegion:
    """Return memory on the engine's device: on decode such as the other side can write into."""
    device = config.engine.device
    if device != "cpu":
        return _device_region(size_bytes, device)
    # Only memory in a file can be mapped by a prefill of this host.
    names = names_of(config.transfer.backend, device)
    is_shared = config.role == "decode" and "shm" in names
    make = MemoryRegion.shared if is_shared else MemoryRegion.private
    return make(size_bytes)


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

    return MemoryRegion.of_tensor(memory, read)
