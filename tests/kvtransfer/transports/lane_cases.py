"""Tests of every two-sided transport, and their rig; the tests of each transport import both."""

import contextlib
import threading

import numpy as np
import pytest

from tandem.kvtransfer.plan import CopyPlan
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports import tcp_stream as frames
from tandem.kvtransfer.transports.base import Pool
from tandem.kvtransfer.transports.lanes import open_stream
from tandem.kvtransfer.transports.tcp_stream import TcpOffer
from tandem.wire.errors import PeerLost
from tandem.wire.generation import Room
from tests.patience import PATIENCE_S

PAGE_BYTES, NUM_PAGES = 64 << 10, 32
POOL_BYTES = PAGE_BYTES * NUM_PAGES
ROOM = Room(1)


def copies(*rows):
    """Return a plan of (source, destination, size)."""
    return CopyPlan(*np.array(rows, np.int64).reshape(-1, 3).T.copy())


class LaneRig:
    """A pool behind a listener, and raw streams to it: to send on them what no honest sender sends."""

    def __init__(self, transport, open_lane):
        self.transport, self._open_lane = transport, open_lane
        self.source = MemoryRegion.private(POOL_BYTES)
        self.source.array()[:] = np.random.default_rng(0).integers(0, 256, POOL_BYTES, np.uint8)
        self.pool = MemoryRegion.private(POOL_BYTES)
        self.listener = transport.listen(Pool.packed(self.pool, PAGE_BYTES, NUM_PAGES))
        self.admission = self.listener.admit("127.0.0.1")
        self.listener.permit(self.admission.peer, ROOM, range(NUM_PAGES))

    def connect(self):
        return self.transport.connect(self.admission.offer, self.source)

    def stream(self):
        """Return a stream that has proved the secret, and its lane."""
        stream = open_stream(TcpOffer(**self.admission.offer.descriptor))
        try:
            return stream, self._open_lane(stream, self.source)
        except PeerLost:
            stream.close()
            raise

    def close(self):
        self.listener.close()
        self.source.close()
        self.pool.close()


TWICE_THE_POOL = [(0, page * PAGE_BYTES, PAGE_BYTES) for page in range(NUM_PAGES)] * 2
LIES = {
    **{f"{n} copies": frames.HEADER.pack(ROOM, n) for n in (-1, 0, frames.MAX_COPIES + 1, 2**62)},
    "before the pool": frames.table_of(ROOM, copies((0, -PAGE_BYTES, PAGE_BYTES))),
    "past its end": frames.table_of(ROOM, copies((0, POOL_BYTES - 10, 11))),
    "overflow": frames.table_of(ROOM, copies((0, 2**63 - 10, 100))),
    "longer than it": frames.table_of(ROOM, copies((0, 0, POOL_BYTES + 1))),
    "together longer than it": frames.table_of(ROOM, copies(*TWICE_THE_POOL)),
    "empty": frames.table_of(ROOM, copies((0, 0, 0))),
    "negative": frames.table_of(ROOM, copies((0, 0, -5))),
    "another room": frames.table_of(2, copies((0, 0, PAGE_BYTES))),
}


@pytest.mark.parametrize("lie", LIES)
def test_invalid_table_is_refused_unread_and_counted(rig, lie):
    stream, lane = rig.stream()
    with stream, contextlib.closing(lane):
        stream.settimeout(PATIENCE_S)
        stream.sendall(LIES[lie])
        assert frames.receive_exactly(stream, 1) == frames.REFUSED
    assert rig.listener.num_violations == 1


@pytest.mark.parametrize("size_bytes", [1, 100, 4097])
def test_small_and_odd_copies_land_only_at_their_destinations(rig, size_bytes):
    rng = np.random.default_rng(size_bytes)
    begin, to = (rng.permutation(POOL_BYTES // 5000)[:200] * 5000 for _ in range(2))
    connection = rig.connect()
    connection.write(ROOM, copies(*zip(begin, to, [size_bytes] * 200, strict=True)))
    expected = np.zeros(POOL_BYTES, np.uint8)
    for at, there in zip(begin, to, strict=True):
        expected[there : there + size_bytes] = rig.source.array()[at : at + size_bytes]
    assert (rig.pool.array() == expected).all()
    connection.close()


def test_closing_from_another_thread_ends_a_write_that_hangs(rig):
    connection = rig.connect()
    errors = []

    def write():
        try:
            connection.write(ROOM, copies((0, 0, POOL_BYTES)))
        except PeerLost as error:
            errors.append(error)

    # The listener cannot open pages while its lock is held: the write has begun and cannot end.
    with rig.listener._changed:
        writer = threading.Thread(target=write)
        writer.start()
        connection.close()
        writer.join(PATIENCE_S)
    assert not writer.is_alive()
    assert errors


def test_fence_ends_a_batch_whose_bytes_do_not_arrive(rig):
    stream, lane = rig.stream()
    with stream:
        stream.sendall(frames.table_of(ROOM, copies((0, 0, POOL_BYTES))))
        assert frames.receive_exactly(stream, 1) != frames.REFUSED
        fence = threading.Thread(target=rig.listener.fence, args=(rig.admission.peer,))
        fence.start()
        fence.join(PATIENCE_S)
        assert not fence.is_alive()
        with pytest.raises(PeerLost):
            frames.receive_exactly(stream, 1)
        lane.close()
    assert rig.listener.num_violations == 0
