"""Whatever is said on the links between prefill and decode: both ends go on, and all rooms end."""

import contextlib
import itertools
from contextlib import ExitStack

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from tandem.kvtransfer.events import RoomFailed, RoomSafe
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports.base import Pool
from tandem.wire.channel import Inbox, Link, wait
from tandem.wire.errors import PeerLost
from tandem.wire.generation import Epoch, Room
from tandem.wire.hand_off import FromPrefill, Hello, Refused, ToPrefill, Welcome
from tests.calm import CALM, calm_receiver, calm_sender
from tests.kvtransfer import rig
from tests.kvtransfer.rig import serve_the_next
from tests.patience import eventually, patiently
from tests.trust.hostile import FUZZ, frames_of

EPOCH = Epoch(2)
LAST = "the last model"
GRANT_S, CONNECT_S = 5.0, 10.0
HINTS = {
    "epoch": st.just(EPOCH),
    "room": st.integers(1, 3),
    "fingerprint": st.just("llama"),
    "layout": st.just(rig.layout()),
    "page_ids": st.lists(st.integers(0, 15), max_size=5),
    "have_tokens": st.sampled_from([0, 4, 8]),
    "tp_rank": st.just(0),
    "tp_size": st.just(1),
    "model_kv_heads": st.just(0),
    "transport": st.just("loopback"),
    "first_head": st.just(0),
    "num_heads": st.none(),
    "more_addresses": st.just([]),
    "stage": st.just(0),
}


@pytest.fixture
def cluster():
    with ExitStack() as stack:
        yield rig.Cluster(stack)


def test_no_word_of_a_decode_node_keeps_a_room_of_prefill_open(cluster):
    # By a clock that stands still while somebody speaks, and for whoever is honest.
    timeouts = calm_sender(grant_s=GRANT_S, early_grant_s=GRANT_S)
    prefill = cluster.prefill(timeouts=timeouts, clock=cluster.clock)
    shape = rig.layout()
    with MemoryRegion.private(shape.pool_bytes) as region:
        listener = cluster.transport.listen(Pool.packed(region, shape.page_bytes, shape.num_pages))
        hints = HINTS | {"offers": st.builds(lambda: [listener.admit("").offer])}
        rooms = itertools.count(1000)  # each is expected once: what prefill's role promises

        @FUZZ
        @given(st.lists(frames_of(ToPrefill, hints), max_size=6))
        def say(frames):
            cluster.clock.now_s += GRANT_S  # whoever hung up before is found out by a ping
            link = Link(f"tcp://127.0.0.1:{prefill.agent.port}", FromPrefill, heartbeat=CALM)
            with contextlib.closing(link):
                room = Room(next(rooms))
                prefill.agent.expect(room)
                offers = [listener.admit("").offer]
                layout = shape
                _say(link, Hello(epoch=EPOCH, fingerprint="llama", layout=layout, offers=offers))
                while not isinstance(rig.receive(link), Welcome):
                    pass
                for frame in frames:
                    link.socket.send(frame)
                # Prefill has read all of it once it refuses this one by name. A Hello of this link that
                # prefill reads later would replace the next example's link, which has the same epoch.
                _say(link, Hello(epoch=EPOCH, fingerprint=LAST, layout=layout, offers=offers))
                while not _is_refusal_of(rig.receive(link), LAST):
                    pass
                prefill.agent.abort(room)

        say()
        _until_in_time(
            prefill,
            cluster.clock,
            lambda now: now.num_waiting == now.num_early_grants == now.num_pushing == 0,
        )
        list(prefill.agent.events())  # a room's last one comes before it stops counting
        assert prefill.agent.statistics().num_refused > 0
        serve_the_next(prefill, cluster.decode(epoch=9))


def test_no_word_of_a_prefill_node_keeps_a_page_of_decode(cluster):
    limits = calm_receiver(connect_s=CONNECT_S, landed_s=CONNECT_S, released_s=CONNECT_S)
    decode = cluster.decode(timeouts=limits, clock=cluster.clock)
    rooms = iter(range(1, 1 << 20))

    @FUZZ
    @given(st.lists(frames_of(FromPrefill, HINTS), max_size=6))
    def say(frames):
        with Inbox("tcp://127.0.0.1:0", ToPrefill, heartbeat=CALM) as inbox:
            room = Room(next(rooms))
            decode.agent.request(room, "127.0.0.1", inbox.port, rig.DECODE_PAGES)
            peer = rig.receive(inbox).peer
            for frame in frames:
                with contextlib.suppress(zmq.ZMQError):  # it has hung up on what came before
                    inbox.socket.send_multipart([peer, frame])
            decode.agent.withdraw(room)
            _ends(decode, room, cluster.clock)
        # The next example may get the same port: decode does not greet on a link that it has kept.
        _until_in_time(decode, cluster.clock, lambda now: now.num_links == 0)

    say()
    now = decode.agent.statistics()
    assert (now.num_reserving, now.num_granted, now.num_withdrawn, now.num_fencing) == (0,) * 4
    serve_the_next(cluster.prefill(), decode)


def _say(link, message) -> None:
    while True:
        try:
            return link.send(message)
        except PeerLost:
            wait([link], 0.001)


def _is_refusal_of(message, model) -> bool:
    return isinstance(message, Refused) and model in message.error.message


def _ends(decode, room, clock) -> None:
    """Let time pass until the last event of a room, after which its pages are decode's own."""
    for _ in patiently():
        clock.now_s += CONNECT_S / 20
        for event in decode.agent.events():
            if event.room == room and isinstance(event, RoomFailed | RoomSafe):
                return
        wait([], 0.005, decode.waker)
    raise AssertionError(decode.agent)


def _until_in_time(node, clock, is_so) -> None:
    """Let time pass for a node until its statistics are so."""

    def step() -> None:
        clock.now_s += 0.5
        wait([], 0.005, node.waker)

    assert eventually(lambda: is_so(node.agent.statistics()), step), node.agent
