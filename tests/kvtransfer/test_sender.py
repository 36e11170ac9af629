"""When prefill's agent gives pages back after a push that went wrong."""

from contextlib import ExitStack, closing, suppress

import pytest

from tandem.kvtransfer.checksum import PushSums
from tandem.kvtransfer.events import Failed, Granted, Landed, Lost, Released, Safe
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports.base import Pool
from tandem.kvtransfer.transports.loopback import Fault, LoopbackConnection, LoopbackTransport
from tandem.wire import channel, hand_off
from tandem.wire.errors import Aborted, ConfigInvalid, PeerLost, TransferFailed, TransferRefused
from tandem.wire.ids import Epoch, Room
from tests.calm import CALM
from tests.kvtransfer import test_agents as rig
from tests.kvtransfer.test_agents import DECODE_PAGES, PROMPT_PAGES, ROOM
from tests.patience import patiently


@pytest.fixture
def cluster():
    with ExitStack() as stack:
        yield rig.Cluster(stack)


def begin(cluster):
    """Return both ends of a room that is granted."""
    prefill, decode = cluster.prefill(), cluster.decode()
    prefill.agent.expect(ROOM)
    rig.request(decode, prefill)
    prefill.next(Granted)
    return prefill, decode


def serve_the_next(prefill, decode):
    """Do a hand-off over a link of its own."""
    room = Room(777)
    prefill.agent.expect(room)
    rig.request(decode, prefill, room=room)
    rig.push_all(prefill, room=room)
    prefill.next(Granted)
    decode.next(Landed)


def test_pages_of_a_push_that_broke_come_back_only_behind_a_fence(cluster):
    # As of a one-sided library: the first write still is under way when the second breaks.
    cluster.use(LoopbackTransport([Fault("late"), Fault("break", at_write=1)]))
    prefill, decode = begin(cluster)
    prefill.agent.push(ROOM, PROMPT_PAGES[:2], 0)
    prefill.agent.push(ROOM, PROMPT_PAGES[2:], 2)
    assert isinstance(decode.next(Lost).error, TransferFailed)
    assert decode.next() == Safe(ROOM)
    assert isinstance(prefill.next(Released).error, TransferFailed)
    with pytest.raises(PeerLost):
        cluster.transport.release()
    assert not rig.pages(decode, DECODE_PAGES).any()
    serve_the_next(prefill, decode)


class Panic(BaseException):
    """What a library in Rust raises."""


class Raising(LoopbackTransport):
    """Raises this in its first write."""

    def __init__(self, error):
        super().__init__()
        self.errors = [error]

    def connect(self, offer, region):
        return RaisingConnection(self, self._listeners[offer.descriptor["peer"]], offer, region)


class RaisingConnection(LoopbackConnection):
    def __init__(self, transport, listener, offer, region):
        super().__init__(transport, listener, offer.descriptor["peer"], region)

    def write(self, room, plan):
        while self._transport.errors:
            raise self._transport.errors.pop()
        super().write(room, plan)


@pytest.mark.parametrize(
    "error", [OSError("broken"), ConfigInvalid("no such device"), MemoryError(), Panic()]
)
def test_only_a_refusal_says_that_no_write_is_under_way(cluster, error):
    cluster.use(Raising(error))
    prefill, decode = begin(cluster)
    rig.push_all(prefill)
    decode.next(Lost)
    assert decode.next() == Safe(ROOM)
    prefill.next(Released)
    serve_the_next(prefill, decode)


@pytest.mark.parametrize("call", ["add", "finish"])
def test_an_error_of_our_checksums_costs_the_room_and_not_the_link(cluster, monkeypatch, call):
    prefill, decode = cluster.prefill(), cluster.decode()

    def fail(*_args):
        raise MemoryError

    prefill.agent.expect(ROOM)
    with monkeypatch.context() as patch:
        patch.setattr(PushSums, call, fail)
        rig.request(decode, prefill)
        prefill.next(Granted)
        rig.push_all(prefill)
        assert isinstance(prefill.next(Released).error, TransferRefused)
        assert isinstance(decode.next(Failed).error, TransferRefused)
    serve_the_next(prefill, decode)
    assert prefill.agent.times.num_lost_links == decode.agent.times.num_lost_links == 0


def test_a_last_word_that_a_full_queue_does_not_take_costs_the_link(cluster, monkeypatch):
    monkeypatch.setattr(channel, "HIGH_WATER_MARK", 2)
    prefill = cluster.prefill(clock=cluster.clock)  # no ping finds the queue full
    region = MemoryRegion.private(rig.layout().pool_bytes)
    listener = cluster.transport.listen(Pool(region, rig.layout().page_bytes, 16))
    hello = hand_off.Hello(
        epoch=Epoch(2),
        fingerprint="llama",
        layout=rig.layout().to_info(),
        offers=[listener.admit("127.0.0.1").offer],
    )
    address = f"tcp://127.0.0.1:{prefill.agent.port}"
    link = channel.Link(address, hand_off.FromPrefill, heartbeat=CALM)

    def say(message):
        for _ in patiently():
            with suppress(PeerLost):
                return link.send(message)
            channel.wait([], 0.001)
        raise AssertionError("it cannot be sent")

    with region, closing(link):
        say(hello)
        prefill.wait_until(lambda now: now.num_links == 1)
        # Nothing is read, and each last word says at length why.
        why = Aborted("x" * (1 << 20)).info()
        for number, _ in enumerate(patiently()):
            room = Room(number)
            say(hand_off.Grant(epoch=Epoch(2), room=room, page_ids=[1]))
            say(hand_off.Withdraw(epoch=Epoch(2), room=room, error=why))
            if not prefill.agent.statistics().num_links:
                return
    raise AssertionError("the link lives on without the word")
