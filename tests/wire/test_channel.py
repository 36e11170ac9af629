import asyncio
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.wire.async_link import MAX_DRAINED, AsyncLink
from tandem.wire.channel import Codec, Inbox, Link, wait
from tandem.wire.errors import ConfigInvalid, MessageInvalid, MessageTooLarge, PeerLost
from tandem.wire.generation import Epoch, RequestId
from tandem.wire.keys import ChannelKey, cluster_key
from tandem.wire.messages import Cancel, FromEngine, NodeLoad, Ping, Pong, ToEngine
from tests.calm import CALM
from tests.patience import PATIENCE_S, patiently

PONG = Pong(epoch=Epoch(7), load=NodeLoad(num_pages=3))


def receive(inbox: Inbox[ToEngine]):
    for _ in patiently():
        if (envelope := inbox.receive()) is not None:
            return envelope
        wait([inbox], 0.1)
    raise AssertionError("nothing came")


def make_inbox(key: ChannelKey | None = None) -> Inbox[ToEngine]:
    return Inbox("tcp://127.0.0.1:0", ToEngine, key, CALM)


def make_link(inbox: Inbox[ToEngine], take=lambda _: None) -> AsyncLink[FromEngine]:
    return AsyncLink(inbox.address, FromEngine, take, heartbeat=CALM)


async def send_when_connected(link: AsyncLink[FromEngine], message) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return link.send(message)
            except PeerLost:
                await asyncio.sleep(0)


async def test_a_message_reaches_the_inbox_and_its_answer_comes_back():
    inbox, taken = make_inbox(), asyncio.Queue()
    link = make_link(inbox, taken.put_nowait)
    await send_when_connected(link, Ping())
    envelope = receive(inbox)
    inbox.send(envelope.peer, PONG)
    async with asyncio.timeout(PATIENCE_S):
        assert (envelope.message, await taken.get()) == (Ping(), [PONG])
    link.close()
    inbox.close()


async def test_what_the_owner_raises_at_a_message_ends_the_link_and_is_raised_to_who_holds_it():
    def take(_messages) -> None:
        raise RuntimeError("not what was asked for")

    inbox = make_inbox()
    link = make_link(inbox, take)
    await send_when_connected(link, Ping())
    inbox.send(receive(inbox).peer, PONG)
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(RuntimeError, match="not what was asked for"):
            await link.wait_lost()
    with pytest.raises(PeerLost):
        link.send(Ping())
    link.close()
    inbox.close()


async def test_a_link_notices_that_its_inbox_is_gone():
    inbox = make_inbox()
    link = make_link(inbox)
    await send_when_connected(link, Ping())
    receive(inbox)
    inbox.close()
    async with asyncio.timeout(PATIENCE_S):
        await link.wait_lost()
    with pytest.raises(PeerLost):
        link.send(Ping())
    link.close()


async def test_a_reader_that_finds_something_each_time_lets_others_run():
    loop, num_sent, done = asyncio.get_running_loop(), 4 * MAX_DRAINED, asyncio.Event()
    num_taken = num_before = 0

    def take(messages) -> None:
        nonlocal num_taken
        assert num_taken == num_before
        assert len(messages) <= MAX_DRAINED
        num_taken += len(messages)
        loop.call_soon(run)

    def run() -> None:
        nonlocal num_before
        num_before = num_taken
        if num_taken == num_sent:
            done.set()

    inbox = make_inbox()
    link = make_link(inbox, take)
    await send_when_connected(link, Ping())
    peer = receive(inbox).peer
    for _ in range(num_sent):
        inbox.send(peer, PONG)
    losing = asyncio.ensure_future(link.wait_lost())
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.wait(
            [losing, asyncio.ensure_future(done.wait())], return_when="FIRST_COMPLETED"
        )
    assert not losing.done()
    losing.cancel()
    link.close()
    inbox.close()


def test_an_answer_to_a_peer_that_never_was_is_an_error():
    with Inbox("tcp://127.0.0.1:0", ToEngine) as inbox, pytest.raises(PeerLost):
        inbox.send(b"nobody", PONG)


def test_bytes_that_are_no_message_are_counted_and_passed_over():
    inbox = make_inbox()
    link: Link[FromEngine] = Link(inbox.address, FromEngine, heartbeat=CALM)
    link.socket.setsockopt(0x11, 0)  # linger 0: the test never waits at close
    link.socket.send(b"\xc1 not msgpack")
    link.socket.send_multipart([b"two", b"frames"])
    link.send(Ping())
    assert receive(inbox).message == Ping()
    assert inbox.num_invalid == 2
    link.close()
    inbox.close()


def test_a_port_in_use_is_refused_with_what_to_do():
    with (
        Inbox("tcp://127.0.0.1:0", ToEngine) as inbox,
        pytest.raises(ConfigInvalid, match="choose another port"),
    ):
        Inbox(inbox.address, ToEngine)


@given(st.binary(max_size=200))
def test_no_bytes_decode_into_anything_but_a_message_or_a_refusal(frame):
    codec: Codec[ToEngine] = Codec(ToEngine)
    with contextlib.suppress(MessageInvalid):
        assert isinstance(codec.decode(frame), ToEngine)


def test_a_message_of_the_other_direction_is_refused():
    with pytest.raises(MessageInvalid):
        Codec(ToEngine).decode(Codec(FromEngine).encode(PONG))


def test_a_frame_over_the_limit_is_refused_at_both_ends():
    small: Codec[ToEngine] = Codec(ToEngine, limit_bytes=10)
    message = Cancel(request_id=RequestId("x" * 20))
    with pytest.raises(MessageTooLarge):
        small.encode(message)
    with pytest.raises(MessageTooLarge):
        small.decode(Codec(ToEngine).encode(message))


def test_an_unknown_field_is_ignored_so_that_a_newer_peer_is_understood():
    import msgspec

    frame = msgspec.msgpack.encode({"type": "Cancel", "request_id": "a", "from_the_future": 1})
    assert Codec(ToEngine).decode(frame) == Cancel(request_id=RequestId("a"))


def test_a_public_address_without_a_secret_is_refused(monkeypatch):
    monkeypatch.delenv("TANDEM_CLUSTER_KEY", raising=False)
    assert cluster_key("127.0.0.1", is_insecure=False) is None
    assert cluster_key("0.0.0.0", is_insecure=True) is None
    with pytest.raises(ConfigInvalid, match="TANDEM_CLUSTER_KEY"):
        cluster_key("0.0.0.0", is_insecure=False)
    monkeypatch.setenv("TANDEM_CLUSTER_KEY", "s")
    assert cluster_key("0.0.0.0", is_insecure=False) == ChannelKey.from_secret("s")
