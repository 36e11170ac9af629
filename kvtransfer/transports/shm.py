"""One host, CPU memory: prefill maps decode's pool file and the push is one memcpy.

The write is one-sided, so the fence is a lock, in a control file that each peer has beside the pool:
`shm_control` tells how.
"""

import mmap

import numpy as np

from tandem.kvtransfer.plan import CopyPlan, copy_blocks
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
from tandem.wire.errors import ConfigInvalid, TransferRefused
from tandem.wire.hand_off import TransportOffer
from tandem.wire.ids import Room


class ShmTransport:
    """Shared memory of one host and user."""

    name = "shm"

    def __init__(self, config: TransportConfig | None = None) -> None:
        del config

    def listen(self, pool: Pool) -> ControlListener:
        """Begin to receive.

        Raises:
            ConfigInvalid: The pool is private memory.
        """
        if pool.region.path is None:
            raise ConfigInvalid("transport shm needs a pool in shared memory")
        return ControlListener(pool, pool.region.path, self.name)

    def connect(self, offer: TransportOffer, region: MemoryRegion) -> "ShmConnection":
        """Map the pool that `offer` names.

        Raises:
            TransferRefused: It is not in this /dev/shm, or not what the offer says.
        """
        return ShmConnection(offer, region)


class ShmConnection:
    """Maps the pool and the control file of one listener."""

    def __init__(self, offer: TransportOffer, region: MemoryRegion) -> None:
        self._source = region.array()
        facts = read_offer(offer, ControlOffer)
        self._end = WriterEnd(facts)
        try:
            memory = mmap.mmap(self._end.pool_fd, facts.pool_bytes)
        except (OSError, OverflowError, ValueError) as error:
            self._end.close()
            raise TransferRefused(f"the pool is smaller than its offer says: {error}") from error
        self._pool = np.frombuffer(memory, np.uint8)

    def write(self, room: Room, plan: CopyPlan) -> None:
        """Copy batch by batch, each under the lock."""
        source, pool = self._source, self._pool
        check_bounds(len(source), plan.source_offset, plan.size_bytes)
        check_bounds(len(pool), plan.destination_offset, plan.size_bytes)
        for batch in plan.batches(BATCH_BYTES, BATCH_COPIES):
            with self._end.turn(room, batch):
                copy_blocks(batch, source, pool)

    def close(self) -> None:
        """Hang up after the batch under way. The mapping goes when nothing looks at it."""
        self._end.close()
