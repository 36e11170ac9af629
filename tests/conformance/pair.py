"""Both ends of a transport under test in one process: a listener, and a connection to it."""

import hashlib
import os
from contextlib import ExitStack, closing

import numpy as np

from tandem.kvtransfer.layout import KVLayout
from tandem.kvtransfer.plan import PagedTokens, plan_copies
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports.base import Pool
from tandem.wire.generation import Room

ROOM, NUM_PAGES = Room(1), 64
LAYOUT = KVLayout(NUM_PAGES, 16, 4, 4, 32, "bfloat16", 2)
# Of files in /dev/shm: other processes run tests, too.
OWN_NAME = f"conformance-{os.getpid()}"


class Pair:
    """A listener and a connection to it, over pools of random and of zero bytes.

    Args:
        is_one_sided: The owner of the pool sees no write. Nothing but its fence keeps out a peer that
            breaks the protocol.
    """

    def __init__(self, transport, *, is_one_sided=False):
        self.transport, self.is_one_sided = transport, is_one_sided
        with ExitStack() as opened:  # a transport that cannot connect leaves nothing behind
            self._open(opened)
            self._close = opened.pop_all().close

    def _open(self, opened):
        self.source = opened.enter_context(closing(MemoryRegion.private(LAYOUT.pool_bytes)))
        self.destination = opened.enter_context(
            closing(MemoryRegion.shared(LAYOUT.pool_bytes, OWN_NAME))
        )
        random = np.random.default_rng(0)
        self.source.array()[:] = random.integers(0, 256, LAYOUT.pool_bytes, np.uint8)
        pool = Pool.packed(self.destination, LAYOUT.page_bytes, NUM_PAGES)
        self.listener = opened.enter_context(closing(self.transport.listen(pool)))
        self.admission = self.listener.admit("127.0.0.1")
        self.peer = self.admission.peer
        self.connection = opened.enter_context(
            closing(self.transport.connect(self.admission.offer, self.source))
        )

    def plan(self, source_pages, destination_pages):
        """Return the copies of whole pages."""
        tokens = range(len(source_pages) * LAYOUT.page_size)
        source, destination = (
            PagedTokens(LAYOUT, each) for each in (source_pages, destination_pages)
        )
        return plan_copies(source, destination, tokens)

    def page(self, region, page):
        """Return a digest of a page."""
        at = page * LAYOUT.page_bytes
        return hashlib.sha256(region.buffer[at : at + LAYOUT.page_bytes]).hexdigest()

    def close(self):
        """Close both ends and their memory."""
        self._close()
