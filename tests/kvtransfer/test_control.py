"""What the outbox tells a role, and when."""

from kvtransfer.control import Outbox
from kvtransfer.events import Failed, Landed, Lost, Safe
from wire.errors import PeerLost
from wire.ids import Room

A, B = Room(1), Room(2)
ERROR = PeerLost("gone")


def make_outbox() -> Outbox:
    outbox: Outbox = Outbox(None, (Landed, Failed, Safe), Safe)
    outbox.open(A)
    outbox.open(B)
    return outbox


def test_an_event_that_a_role_stumbles_over_takes_no_other_with_it():
    outbox = make_outbox()
    outbox.put(Failed(A, ERROR))
    outbox.put(Failed(B, ERROR))
    assert next(outbox.take()).room == A
    assert [event.room for event in outbox.take()] == [B]


def test_a_room_given_up_while_an_earlier_event_is_handled_hears_only_its_end():
    outbox = make_outbox()
    outbox.put(Failed(A, ERROR))
    outbox.put(Lost(B, ERROR))
    outbox.put(Landed(B, 1, 2, 3))
    events = outbox.take()
    assert next(events) == Failed(A, ERROR)
    assert outbox.cancel(B)
    assert list(events) == [Safe(B)]
