"""One host, GPUs: prefill maps decode's pool, and the push is a copy from device to device.

The pool is exported as a handle of CUDA's IPC, which travels in the offer. Rooms, lock and fence are
shm's (`shm_control`), beside a file that stands for the pool. A batch is copied and waited for inside a
turn, so whoever has the lock knows that no copy is under way; a fence of a writer that died in a turn
waits until its process is gone, since the driver stops the copies of a process when it clears up
behind it. For that both ends must see each other's process ids: one pid namespace.

What a prompt's forward wrote must be complete before `write` is called: the copies run on a stream of
their own. How a device is reached is `DeviceMemory`, so that tests run all of this on a CPU.

The CUDA side (`cuda_driver`) has not run on a GPU; everything above that seam has run without one.
"""

import os
from typing import Annotated, Protocol

import msgspec

from tandem.kvtransfer.plan import CopyPlan
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports.base import Pool, TransportConfig, check_bounds
from tandem.kvtransfer.transports.shm_control import (
    BATCH_BYTES,
    BATCH_COPIES,
    ControlListener,
    ControlOffer,
    WriterEnd,
    read_offer,
)
from tandem.wire.errors import PeerLost, TransferRefused
from tandem.wire.hand_off import TransportOffer
from tandem.wire.ids import Room


class RemoteMemory(Protocol):
    """Another process's pool, mapped. Any thread may call, one at a time."""

    def copy(self, plan: CopyPlan) -> None:
        """Copy from the own region into the pool; return when the device is done.

        Raises:
            PeerLost: The device failed, and may still be copying.
        """
        ...

    def close(self) -> None:
        """Unmap."""
        ...


class DeviceMemory(Protocol):
    """A kind of memory that one process exports and another of this host maps."""

    def export(self, region: MemoryRegion) -> bytes:
        """Return the handle of a region, at most 256 bytes.

        Raises:
            ConfigInvalid: It is not this kind of memory, or cannot be exported.
        """
        ...

    def open(self, handle: bytes, size_bytes: int, source: MemoryRegion) -> RemoteMemory:
        """Map the region that a peer exported, to copy into it from `source`.

        Raises:
            TransferRefused: It cannot be mapped here, or is smaller than `size_bytes`.
        """
        ...


class _Offer(ControlOffer, frozen=True, kw_only=True):
    """The descriptor.

    Attributes:
        handle: What the device's owner exported, in hexadecimal.
        pid_namespace: Where the owner's process ids are counted.
    """

    handle: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{2}){1,256}$")]
    pid_namespace: int


class CudaIpcTransport:
    """Device memory of one host and user."""

    name = "cuda_ipc"

    def __init__(
        self, config: TransportConfig | None = None, memory: DeviceMemory | None = None
    ) -> None:
        del config
        if memory is None:
            from tandem.kvtransfer.transports.cuda_driver import CudaMemory

            memory = CudaMemory()
        self._memory = memory

    def listen(self, pool: Pool) -> ControlListener:
        """Begin to receive.

        Raises:
            ConfigInvalid: The pool is not in a device's memory, or cannot be exported.
        """
        handle = self._memory.export(pool.region)
        stands_for_pool = MemoryRegion.shared(1, "device")
        assert stands_for_pool.path is not None
        facts: dict[str, str | int] = {"handle": handle.hex(), "pid_namespace": _pid_namespace()}
        return ControlListener(
            pool, stands_for_pool.path, self.name, facts, closing=stands_for_pool.close
        )

    def connect(self, offer: TransportOffer, region: MemoryRegion) -> "CudaIpcConnection":
        """Map the pool that `offer` names.

        Raises:
            TransferRefused: It is another host's or namespace's, or the device is not seen from here.
        """
        return CudaIpcConnection(offer, region, self._memory)


class CudaIpcConnection:
    """Maps the pool and the control file of one listener."""

    def __init__(self, offer: TransportOffer, region: MemoryRegion, memory: DeviceMemory) -> None:
        facts = read_offer(offer, _Offer)
        if facts.pid_namespace != _pid_namespace():
            raise TransferRefused("the pool's owner is in another pid namespace")
        self._source_bytes, self._pool_bytes = region.size_bytes, facts.pool_bytes
        self._has_failed = False
        self._end = WriterEnd(facts)
        try:
            self._pool = memory.open(bytes.fromhex(facts.handle), facts.pool_bytes, region)
        except TransferRefused:
            self._end.close()
            raise
        self._end.on_close(self._pool.close)

    def write(self, room: Room, plan: CopyPlan) -> None:
        """Copy batch by batch, each under the lock."""
        check_bounds(self._source_bytes, plan.source_offset, plan.size_bytes)
        check_bounds(self._pool_bytes, plan.destination_offset, plan.size_bytes)
        for batch in plan.batches(BATCH_BYTES, BATCH_COPIES):
            with self._end.turn(room, batch):
                self._copy(batch)

    def _copy(self, batch: CopyPlan) -> None:
        if self._has_failed:
            raise PeerLost("the device failed in an earlier write")
        # Stays so if the copy raises, and with it the mark: the device may still be at it.
        self._has_failed = True
        with self._end.control.device_busy():
            self._pool.copy(batch)
        self._has_failed = False

    def close(self) -> None:
        """Hang up after the batch under way."""
        self._end.close()


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino
