"""Both ends of a transport under test in one process: a listener, and a connection to it."""

import hashlib
import os
from collections.abc import Sequence

import numpy as np

from tandem.kvtransfer.layout import KVLayout
from tandem.kvtransfer.plan import CopyPlan, PagedTokens, plan_copies
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports.base import Pool, Transport

NUM_PAGES = 64
LAYOUT = KVLayout(
    num_pages=NUM_PAGES,
    page_size=16,
    num_layers=4,
    num_kv_heads=4,
    head_dim=32,
    dtype="bfloat16",
    itemsize=2,
)
# Of files in /dev/shm: other processes run tests, too.
OWN_NAME = f"conformance-{os.getpid()}"


class Pair:
    """A listener and a connection to it, over pools of random and of zero bytes.

    Args:
        is_one_sided: The owner of the pool sees no write. Nothing but its fence keeps a peer out that
            breaks the protocol.
    """

    def __init__(self, transport: Transport, *, is_one_sided: bool = False) -> None:
        self.is_one_sided = is_one_sided
        self.source = MemoryRegion.private(LAYOUT.pool_bytes)
        self.destination = MemoryRegion.shared(LAYOUT.pool_bytes, OWN_NAME)
        self.source.array()[:] = np.random.default_rng(0).integers(
            0, 256, LAYOUT.pool_bytes, np.uint8
        )
        self.transport = transport
        self.listener = transport.listen(
            Pool.packed(self.destination, LAYOUT.page_bytes, NUM_PAGES)
        )
        self.admission = self.listener.admit("127.0.0.1")
        self.peer = self.admission.peer
        self.connection = transport.connect(self.admission.offer, self.source)

    def plan(self, source_pages: Sequence[int], destination_pages: Sequence[int]) -> CopyPlan:
        """Return the copies of whole pages."""
        tokens = range(len(source_pages) * LAYOUT.page_size)
        return plan_copies(
            PagedTokens(LAYOUT, source_pages), PagedTokens(LAYOUT, destination_pages), tokens
        )

    def page(self, region: MemoryRegion, page: int) -> str:
        """Return a digest of a page."""
        at = page * LAYOUT.page_bytes
        return hashlib.sha256(region.buffer[at : at + LAYOUT.page_bytes]).hexdigest()

    def close(self) -> None:
        """Close both ends and their memory."""
        self.connection.close()
        self.listener.close()
        self.source.close()
        self.destination.close()
