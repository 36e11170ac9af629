"""Tests specific to UCX; test_transports.py has those of every transport."""

from functools import partial

import pytest

from tandem.kvtransfer.transports import lanes
from tandem.kvtransfer.transports import tcp_stream as frames
from tandem.kvtransfer.transports.lanes import open_stream
from tandem.kvtransfer.transports.tcp_stream import TcpOffer
from tandem.kvtransfer.transports.ucx import UcxLane, UcxTransport
from tandem.wire.errors import PeerLost
from tests.kvtransfer.makers import ON_LOOPBACK
from tests.kvtransfer.transports.lane_cases import *  # noqa: F403
from tests.kvtransfer.transports.lane_cases import POOL_BYTES, ROOM, LaneRig, copies
from tests.patience import PATIENCE_S


@pytest.fixture
def rig():
    made = LaneRig(UcxTransport(ON_LOOPBACK), partial(UcxLane, devices="lo"))
    yield made
    made.close()


def test_oversized_handshake_is_not_read(rig):
    with open_stream(TcpOffer(**rig.admission.offer.descriptor)) as stream:
        stream.settimeout(PATIENCE_S)
        lanes.receive_blob(stream)
        stream.sendall((lanes.MAX_BLOB_BYTES + 1).to_bytes(4, "little"))
        with pytest.raises(PeerLost):
            frames.receive_exactly(stream, 1)


def test_message_longer_than_its_table_ends_the_peer_and_lands_nowhere_else(rig):
    stream, lane = rig.stream()
    with stream:
        stream.sendall(frames.table_of(ROOM, copies((0, 0, 1000))))
        assert frames.receive_exactly(stream, 1) == lanes.READY
        with pytest.raises(PeerLost):
            lane._send(copies((0, 0, POOL_BYTES)))
            frames.receive_exactly(stream, 1)
        lane.close()
    assert not rig.pool.array()[1000:].any()


def test_endpoint_is_closed_before_the_pages_of_a_failed_batch_are_released(rig, monkeypatch):
    """A peer may send before it reads the answer, and closing the endpoint takes in what came."""
    known, are_open = rig.listener._peers[rig.admission.peer], []
    send_bytes, close = frames.send_bytes, UcxLane.close

    def send(stream, data):
        if data == lanes.READY:
            raise PeerLost("the peer reads no more")
        send_bytes(stream, data)

    def note(lane):
        are_open.append(ROOM in known.reading.values())
        close(lane)

    monkeypatch.setattr(frames, "send_bytes", send)
    monkeypatch.setattr(UcxLane, "close", note)
    stream, _lane = rig.stream()
    with stream:
        stream.settimeout(PATIENCE_S)
        stream.sendall(frames.table_of(ROOM, copies((0, 0, 1000))))
        with pytest.raises(PeerLost):
            frames.receive_exactly(stream, 1)
    assert are_open[0]
