"""A pool behind a listener, and raw streams to it: to say on them what no honest sender says."""

from contextlib import closing, nullcontext

import numpy as np

from tandem.kvtransfer.plan import CopyPlan
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports import tcp_stream as frames
from tandem.kvtransfer.transports.base import Pool
from tandem.kvtransfer.transports.lanes import open_stream
from tandem.kvtransfer.transports.tcp_stream import TcpOffer
from tandem.wire.generation import Room
from tests.patience import PATIENCE_S

PAGE_BYTES, NUM_PAGES = 64 << 10, 32
POOL_BYTES = PAGE_BYTES * NUM_PAGES
ROOM = Room(1)
LIES = {
    "before the pool": (-PAGE_BYTES, PAGE_BYTES),
    "past its end": (POOL_BYTES - 10, 11),
    "overflow": (2**63 - 10, 100),
    "longer than it": (0, POOL_BYTES + 1),
    "empty": (0, 0),
    "negative": (0, -5),
}


def copies(*rows):
    """Return a plan of (source, destination, size)."""
    return CopyPlan(*np.array(rows, np.int64).reshape(-1, 3).T.copy())


class LaneRig:
    """Both ends in one process. `stream` proves the secret, and has a lane of its own."""

    def __init__(self, transport, open_lane):
        self.transport = transport
        self._open_lane = open_lane
        self.source = MemoryRegion.private(POOL_BYTES)
        self.source.array()[:] = np.random.default_rng(0).integers(0, 256, POOL_BYTES, np.uint8)
        self.pool = MemoryRegion.private(POOL_BYTES)
        self.listener = transport.listen(Pool(self.pool, PAGE_BYTES, NUM_PAGES))
        self.admission = self.listener.admit("127.0.0.1")
        self.listener.permit(self.admission.peer, ROOM, range(NUM_PAGES))

    def connect(self):
        return self.transport.connect(self.admission.offer, self.source)

    def stream(self):
        stream = open_stream(TcpOffer(**self.admission.offer.descriptor))
        return stream, self._open_lane(stream, self.source)

    def answer(self, *said):
        """Return the listener's answer to these bytes."""
        stream, lane = self.stream()
        with stream:
            stream.settimeout(PATIENCE_S)
            for each in said:
                stream.sendall(each)
            with lane if isinstance(lane, nullcontext) else closing(lane):
                return frames.receive_exactly(stream, 1)

    def wait_until_open(self):
        """Return when the listener is in the middle of a batch."""
        known = self.listener._peers[self.admission.peer]
        with self.listener._changed:
            assert self.listener._changed.wait_for(
                lambda: ROOM in known.reading.values(), PATIENCE_S
            )

    def close(self):
        self.listener.close()
        self.source.close()
        self.pool.close()
