"""How many parts a room has, from the first word of it to the last."""

import pytest

from tandem.kvtransfer.fan_in import GroupAction
from tandem.kvtransfer.parts import Part, RoomParts
from tandem.wire.errors import PeerLost
from tandem.wire.ids import Room

ROOM = Room(42)


def test_a_room_has_one_part_until_the_other_node_is_known():
    room = RoomParts(ROOM)
    assert room.parts == [Part(ROOM, 0)]
    assert room.spread(3) == [Part(ROOM, 1), Part(ROOM, 2)]
    assert len(room.parts) == 3
    assert not room.has_ended


def test_it_ends_with_the_last_of_them():
    room = RoomParts(ROOM)
    room.spread(2)
    assert room.fan_in.ended(1) == []
    assert room.fan_in.ended(0) == [GroupAction.TELL_DONE]
    assert room.has_ended


def test_parts_that_come_after_the_end_only_answer():
    room = RoomParts(ROOM)
    room.fan_in.failed(0, PeerLost("x"))
    assert room.spread(2) == [Part(ROOM, 1)]
    assert room.has_ended


def test_a_room_that_begins_again_hears_of_all_its_parts():
    room = RoomParts(ROOM)
    room.spread(2)
    for number in range(2):
        room.fan_in.ended(number)
    room.reopen()
    assert room.fan_in.live_ranks == [0, 1]


def test_it_is_spread_once():
    room = RoomParts(ROOM)
    room.spread(1)
    with pytest.raises(AssertionError):
        room.spread(2)
