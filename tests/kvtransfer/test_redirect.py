"""A rank of decode finds its like behind one bootstrap port."""

import pytest
from structlog.testing import capture_logs

from tandem.kvtransfer.events import Failed
from tandem.kvtransfer.layout import KVLayout
from tandem.kvtransfer.receiver import DecodeAgent
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.sharding import Shard
from tandem.kvtransfer.transports.loopback import LoopbackTransport
from tandem.wire.channel import Envelope, Inbox, Waker, wait
from tandem.wire.errors import PeerLost
from tandem.wire.hand_off import Hello, Redirect, ToPrefill
from tandem.wire.ids import Epoch, Room
from tests.calm import CALM, calm_receiver
from tests.patience import patiently

LAYOUT = KVLayout(
    num_pages=4,
    page_size=4,
    num_layers=1,
    num_kv_heads=1,
    head_dim=4,
    dtype="float32",
    itemsize=4,
)


@pytest.fixture
def decode():
    region, waker = MemoryRegion.private(LAYOUT.pool_bytes), Waker()
    agent = DecodeAgent(
        epoch=Epoch(2),
        fingerprint="m",
        layout=LAYOUT,
        region=region,
        transports=[LoopbackTransport()],
        waker=waker,
        timeouts=calm_receiver(),
        shard=Shard(1, 2, 2),
    )
    yield agent, waker
    agent.close()
    waker.close()
    region.close()


def hello_at(port: Inbox[ToPrefill]) -> Envelope[ToPrefill]:
    for _ in patiently():
        wait([port], 0.1)
        envelope = port.receive()
        if envelope is not None and isinstance(envelope.message, Hello):
            return envelope
    raise AssertionError("no Hello")


def event_of(decode: DecodeAgent, waker: Waker):
    for _ in patiently():
        for event in decode.events():
            return event
        wait([], 0.1, waker)
    raise AssertionError("no event")


def test_a_rank_says_hello_again_where_it_is_sent_once(decode):
    agent, waker = decode
    with (
        capture_logs() as told,
        Inbox("tcp://127.0.0.1:0", ToPrefill, heartbeat=CALM) as first,
        Inbox("tcp://127.0.0.1:0", ToPrefill, heartbeat=CALM) as own,
    ):
        agent.request(Room(7), "127.0.0.1", first.port, [0])
        hello = hello_at(first)
        assert (hello.message.tp_rank, hello.message.tp_size) == (1, 2)
        first.send(hello.peer, Redirect(epoch=Epoch(1), port=own.port))
        again = hello_at(own)
        assert again.message == hello.message
        own.send(again.peer, Redirect(epoch=Epoch(1), port=first.port))
        event = event_of(agent, waker)
        assert isinstance(event, Failed)
        assert isinstance(event.error, PeerLost)
        assert "redirected twice" in event.error.message
    assert "kv_control.failed" not in [line["event"] for line in told]
