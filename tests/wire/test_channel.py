import asyncio
import contextlib
import select

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.wire import channel
from tandem.wire.async_link import MAX_DRAINED, AsyncLink
from tandem.wire.channel import Codec, Inbox, Link, Waker, wait
from tandem.wire.errors import ConfigInvalid, MessageInvalid, MessageTooLarge, PeerLost
from tandem.wire.generation import Epoch, RequestId
from tandem.wire.keys import ChannelKey, cluster_key
from tandem.wire.messages import Cancel, FromEngine, NodeLoad, Ping, Pong, ToEngine
from tests.calm import CALM
from tests.patience import PATIENCE_S, patiently, until_async

PONG = Pong(epoch=Epoch(7), load=NodeLoad(num_pages=3))


def receive(inbox: Inbox[ToEngine]):
    for _ in patiently():
        if (envelope := inbox.receive()) is not None:
            return envelope
        wait([inbox], 0.1)
    raise AssertionError("no message arrived")


def make_inbox(key: ChannelKey | None = None) -> Inbox[ToEngine]:
    return Inbox("tcp://127.0.0.1:0", ToEngine, key, CALM)


def make_link(inbox: Inbox[ToEngine], on_messages=lambda _: None) -> AsyncLink[FromEngine]:
    return AsyncLink(inbox.address, FromEngine, on_messages, heartbeat=CALM)


async def send_when_connected(link: AsyncLink[FromEngine], message) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(PeerLost):
                link.send(message)
                break
            await asyncio.sleep(0)
    await asyncio.sleep(0)  # the loop's next iteration sends it


def send_soon(link: Link[FromEngine], send) -> None:
    """Send once the link is connected."""
    for _ in patiently():
        with contextlib.suppress(PeerLost):
            return send()
        wait([link], 0.01)
    raise AssertionError("not connected")


@pytest.mark.parametrize("is_valid", [True, False])
def test_frames_of_a_peer_that_floods_are_read_in_several_turns(monkeypatch, is_valid):
    monkeypatch.setattr(channel, "FRAMES_PER_TURN", 10)
    inbox = make_inbox()
    link = Link(inbox.address, FromEngine, heartbeat=CALM)
    send_soon(link, lambda: link.send(Ping()))
    peer = receive(inbox).peer
    for _ in range(45):
        link.send(Ping()) if is_valid else link.socket.send(b"no message")
        inbox.send(peer, PONG) if is_valid else inbox.socket.send_multipart([peer, b"none"])
    num_read = 0
    for _ in patiently():
        turn = list(inbox.queued())
        assert len(turn) + inbox.num_invalid - (num_read if not is_valid else 0) <= 10
        num_read += len(turn) if is_valid else inbox.num_invalid - num_read
        if num_read == 45:
            break
        wait([inbox], 0.1)
    assert num_read == 45
    for _ in patiently():
        assert len(list(link.queued())) <= 10
        if not is_valid or not link.socket.poll(100):
            break
    link.close()
    inbox.close()


async def test_message_reaches_inbox_and_answer_reaches_link():
    inbox, received = make_inbox(), asyncio.Queue()
    link = make_link(inbox, received.put_nowait)
    await send_when_connected(link, Ping())
    envelope = receive(inbox)
    inbox.send(envelope.peer, PONG)
    async with asyncio.timeout(PATIENCE_S):
        assert (envelope.message, await received.get()) == (Ping(), [PONG])
    link.close()
    inbox.close()


async def test_exception_from_on_messages_ends_the_link_and_wait_lost_raises_it():
    def on_messages(_messages) -> None:
        raise RuntimeError("unexpected message")

    inbox = make_inbox()
    link = make_link(inbox, on_messages)
    await send_when_connected(link, Ping())
    inbox.send(receive(inbox).peer, PONG)
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(RuntimeError, match="unexpected message"):
            await link.wait_lost()
    with pytest.raises(PeerLost):
        link.send(Ping())
    link.close()
    inbox.close()


async def test_link_is_lost_when_its_inbox_closes():
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


async def test_link_is_lost_if_sending_queued_messages_fails(monkeypatch):
    inbox = make_inbox()
    link = make_link(inbox)
    await send_when_connected(link, Ping())

    def broken(_frames):
        raise PeerLost("no connection")

    monkeypatch.setattr(link._link, "send_frames", broken)
    link.send(Ping())
    async with asyncio.timeout(PATIENCE_S):
        await link.wait_lost()
    with pytest.raises(PeerLost):
        link.send(Ping())
    link.close()
    inbox.close()


async def test_messages_for_a_full_queue_are_sent_later(monkeypatch):
    inbox = make_inbox()
    link = make_link(inbox)
    await send_when_connected(link, Ping())
    assert receive(inbox).message == Ping()
    send_frames, tries = link._link.send_frames, []

    def full_at_first(frames):
        tries.append(len(frames))
        return frames if len(tries) == 1 else send_frames(frames)

    monkeypatch.setattr(link._link, "send_frames", full_at_first)
    link.send(Ping())
    await until_async(lambda: len(tries) == 2)
    assert receive(inbox).message == Ping()
    link.close()
    inbox.close()


async def test_backlog_of_messages_does_not_starve_other_tasks():
    loop, num_sent, done = asyncio.get_running_loop(), 4 * MAX_DRAINED, asyncio.Event()
    num_received = num_seen_by_loop = 0

    def on_messages(messages) -> None:
        nonlocal num_received
        assert num_received == num_seen_by_loop
        assert len(messages) <= MAX_DRAINED
        num_received += len(messages)
        loop.call_soon(run)

    def run() -> None:
        nonlocal num_seen_by_loop
        num_seen_by_loop = num_received
        if num_received == num_sent:
            done.set()

    inbox = make_inbox()
    link = make_link(inbox, on_messages)
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


def test_waker_ends_one_wait_only():
    with contextlib.closing(Waker()) as waker:
        waker.wake()
        waker.wake()
        wait([], PATIENCE_S, waker)
        assert select.select([waker], [], [], 0)[0] == []


def test_send_to_unknown_peer_raises_peer_lost():
    with Inbox("tcp://127.0.0.1:0", ToEngine) as inbox, pytest.raises(PeerLost):
        inbox.send(b"nobody", PONG)


def test_invalid_frames_are_counted_and_skipped():
    inbox = make_inbox()
    link: Link[FromEngine] = Link(inbox.address, FromEngine, heartbeat=CALM)
    link.socket.setsockopt(0x11, 0)  # linger 0: do not wait at close
    link.socket.send(b"\xc1 not msgpack")
    link.socket.send_multipart([b"two", b"frames"])
    link.send(Ping())
    assert receive(inbox).message == Ping()
    assert inbox.num_invalid == 2
    link.close()
    inbox.close()


def test_port_in_use_is_rejected_with_remedy():
    with (
        Inbox("tcp://127.0.0.1:0", ToEngine) as inbox,
        pytest.raises(ConfigInvalid, match="use a different port"),
    ):
        Inbox(inbox.address, ToEngine)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_decode_to_a_message_or_raise_message_invalid(frame):
    codec: Codec[ToEngine] = Codec(ToEngine)
    with contextlib.suppress(MessageInvalid):
        assert isinstance(codec.decode(frame), ToEngine)


def test_message_of_the_other_direction_is_rejected():
    with pytest.raises(MessageInvalid):
        Codec(ToEngine).decode(Codec(FromEngine).encode(PONG))


def test_frame_over_size_limit_is_rejected_by_encoder_and_decoder():
    small: Codec[ToEngine] = Codec(ToEngine, limit_bytes=10)
    message = Cancel(request_id=RequestId("x" * 20))
    with pytest.raises(MessageTooLarge):
        small.encode(message)
    with pytest.raises(MessageTooLarge):
        small.decode(Codec(ToEngine).encode(message))


def test_unknown_field_of_newer_peer_is_ignored():
    import msgspec

    frame = msgspec.msgpack.encode({"type": "Cancel", "request_id": "a", "from_the_future": 1})
    assert Codec(ToEngine).decode(frame) == Cancel(request_id=RequestId("a"))


def test_public_address_without_secret_is_rejected(monkeypatch):
    monkeypatch.delenv("TANDEM_CLUSTER_KEY", raising=False)
    assert cluster_key("127.0.0.1", is_insecure=False) is None
    assert cluster_key("0.0.0.0", is_insecure=True) is None
    with pytest.raises(ConfigInvalid, match="TANDEM_CLUSTER_KEY"):
        cluster_key("0.0.0.0", is_insecure=False)
    monkeypatch.setenv("TANDEM_CLUSTER_KEY", "s")
    assert cluster_key("0.0.0.0", is_insecure=False) == ChannelKey.from_secret("s")
