"""What ranks of a node tell each other arrives as it was, until one of them is gone."""

import contextlib
import os

import pytest

from tandem.kvtransfer.events import Failed, Granted, Landed, Lost, PushDone, Released, Safe
from tandem.node.rank_messages import (
    FromRank,
    SafeHere,
    pack_receiver_event,
    pack_sender_event,
    unpack_receiver_event,
    unpack_sender_event,
)
from tandem.node.rank_pipe import RankPipe
from tandem.wire.codec import Codec
from tandem.wire.errors import PeerLost
from tandem.wire.ids import Room

ROOM = Room(1 << 62)


@pytest.fixture
def ends():
    """Two ends, each reading what the other writes."""
    (read_a, write_b), (read_b, write_a) = os.pipe(), os.pipe()
    files = [os.fdopen(fd, mode) for fd, mode in ((read_a, "rb"), (write_a, "wb"))]
    files += [os.fdopen(fd, mode) for fd, mode in ((read_b, "rb"), (write_b, "wb"))]
    yield RankPipe(*files[:2], FromRank), RankPipe(*files[2:], FromRank), files
    for file in files:
        with contextlib.suppress(BrokenPipeError):  # what was written for nobody
            file.close()


def test_messages_arrive_in_order(ends):
    one, other, _ = ends
    for room in range(3):
        one.send(SafeHere(room=Room(room)))
    assert [other.receive().room for _ in range(3)] == [0, 1, 2]


def test_the_end_of_the_far_side_ends_what_is_received(ends):
    one, other, _ = ends
    one.hang_up()
    one.hang_up()
    assert other.receive() is None


def test_a_message_cut_short_is_none(ends):
    one, other, files = ends
    files[1].write(b"\x09\0\0\0abc")
    one.hang_up()
    assert other.receive() is None


def test_a_far_side_that_does_not_read_any_more_is_lost(ends):
    one, _, files = ends
    files[2].close()
    with pytest.raises(PeerLost):
        one.send(SafeHere(room=ROOM))


@pytest.mark.parametrize("event", [Granted(ROOM, 16), PushDone(ROOM, 1 << 40), Released(ROOM)])
def test_a_senders_event_arrives_as_it_was(event):
    assert unpack_sender_event(over_the_wire(pack_sender_event(event))) == event


@pytest.mark.parametrize("event", [Landed(ROOM, 5, 1 << 62, 8), Safe(ROOM)])
def test_a_receivers_event_arrives_as_it_was(event):
    assert unpack_receiver_event(over_the_wire(pack_receiver_event(event))) == event


@pytest.mark.parametrize("kind", [Failed, Lost])
def test_errors_keep_their_kind_and_words(kind):
    arrived = unpack_receiver_event(over_the_wire(pack_receiver_event(kind(ROOM, PeerLost("x")))))
    assert type(arrived) is kind
    assert type(arrived.error) is PeerLost
    assert arrived.error.message == "x"
    released = unpack_sender_event(over_the_wire(pack_sender_event(Released(ROOM, PeerLost("x")))))
    assert released.error.message == "x"


def over_the_wire(message):
    codec: Codec = Codec(FromRank)
    return codec.decode(codec.encode(message))
