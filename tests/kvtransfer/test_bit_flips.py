"""Each hand-off has one wrong bit on its way over a wire, and none lands."""

import random

import pytest

from tandem.kvtransfer.events import PushDone, RoomFailed, RoomGranted
from tandem.wire.errors import KVCorrupted
from tandem.wire.generation import Room
from tests.kvtransfer.makers import cross_process, make
from tests.kvtransfer.rig import layout, push_all, request
from tests.sample import sampled

# The embedded model's layers and heads: a sample of a few layers would miss most flips.
SHAPE = layout(page_size=16, num_layers=30, num_kv_heads=3, head_dim=64, dtype="f2", itemsize=2)
WIRES = [name for name in cross_process() if name != "shm"]


class FlippingConnection:
    """Sends one wrong bit with each write, as a faulty adapter does; prefill's pool stays right."""

    def __init__(self, connection, region, rng):
        self._connection, self._memory, self._rng = connection, region.array(), rng

    def write(self, room, plan):
        begin, _, size = self._rng.choice(list(plan.copies()))
        at, mask = begin + self._rng.randrange(size), 1 << self._rng.randrange(8)
        self._memory[at] ^= mask
        try:
            self._connection.write(room, plan)
        finally:
            self._memory[at] ^= mask

    def close(self):
        self._connection.close()


class FlippingTransport:
    """A transport whose sender has a faulty adapter."""

    def __init__(self, name):
        self.name, self._transport, self._rng = name, make(name), random.Random(7)

    def listen(self, pool):
        return self._transport.listen(pool)

    def connect(self, offer, region):
        return FlippingConnection(self._transport.connect(offer, region), region, self._rng)


@pytest.mark.parametrize(
    ("name", "num_hand_offs"),
    sampled([("tcp", 30), *((name, 1000) for name in WIRES)], ("tcp", 30)),
)
def test_no_hand_off_with_one_wrong_bit_lands(cluster, name, num_hand_offs):
    cluster.use(FlippingTransport(name))
    prefill, decode = cluster.prefill(shape=SHAPE), cluster.decode(shape=SHAPE)
    for room in map(Room, range(num_hand_offs)):
        prefill.agent.expect(room)
        request(decode, prefill, room=room)
        push_all(prefill, room=room)
        assert isinstance(decode.next(RoomFailed).error, KVCorrupted)
        prefill.next(RoomGranted)
        prefill.next(PushDone)
    assert decode.agent.statistics().num_corrupted == num_hand_offs
