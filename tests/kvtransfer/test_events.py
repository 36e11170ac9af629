"""The merged events of a room are correct for every order of its members' reports."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.kvtransfer.events import (
    LandRooms,
    PushDone,
    PushRooms,
    RoomFailed,
    RoomGranted,
    RoomLanded,
    RoomLost,
    RoomReleased,
    RoomSafe,
)
from tandem.wire.errors import PeerLost
from tandem.wire.generation import Room
from tests.patience import Clock

ROOM = Room(42)
LAST = (PushDone, RoomReleased, RoomLanded, RoomFailed, RoomSafe)


def error_of(member):
    return PeerLost(f"of member {member}")


# What one member may report, in order. Whatever it reports after it was told to end is its choice too: the
# news may have crossed with the order.
STORIES = {
    PushRooms: [
        lambda _: [RoomGranted(ROOM, 8), PushDone(ROOM, 100)],
        lambda n: [RoomGranted(ROOM, 8), RoomReleased(ROOM, error_of(n))],
        lambda n: [RoomReleased(ROOM, error_of(n))],
    ],
    LandRooms: [
        lambda n: [RoomLanded(ROOM, n, 0, 0)],
        lambda n: [RoomFailed(ROOM, error_of(n))],
        lambda n: [RoomLost(ROOM, error_of(n)), RoomSafe(ROOM)],
        lambda _: [RoomSafe(ROOM)],
    ],
}


@st.composite
def transcripts(draw):
    """Return (fan-in, members, what members and role say, in some order)."""
    kind, num_members = draw(st.sampled_from([PushRooms, LandRooms])), draw(st.integers(1, 3))
    # A room is safe at one member only after it was ended.
    first = [story for story in STORIES[kind] if story(0) != [RoomSafe(ROOM)]]
    is_given_up = draw(st.booleans())
    left = {n: draw(st.sampled_from(STORIES[kind]))(n) for n in range(num_members)}
    if not is_given_up and all(story == [RoomSafe(ROOM)] for story in left.values()):
        left[0] = draw(st.sampled_from(first))(0)
    words = []
    if is_given_up:
        words.append(("role", None))
    while any(left.values()):
        who = draw(st.sampled_from([name for name, story in left.items() if story]))
        words.append((who, left[who].pop(0)))
    return kind, num_members, words


def is_bad(event):
    return not isinstance(event, RoomGranted | PushDone | RoomLanded)


@given(transcripts())
def test_last_event_follows_the_last_member_once_and_is_the_worst_of_all(told):
    kind, num_members, words = told
    said, ended, has_ended, was_bad = [], [], set(), False
    rooms = kind(lambda room, error: ended.append(error))
    rooms.open(ROOM, num_members)
    for who, event in words:
        if who == "role" or (event == RoomSafe(ROOM) and not was_bad):
            # By the role, as in every run in which a part is safe without an error.
            rooms.cancel(ROOM, None)
            was_bad = True
        if who == "role":
            continue
        has_ended |= {who} if isinstance(event, LAST) else set()
        is_turn = is_bad(event) and not was_bad
        was_bad = was_bad or is_bad(event)
        said += [each for each in [rooms.apply(who, event)] if each is not None]
        if is_turn and len(has_ended) < num_members:
            assert str(who) in str(ended[0])
        assert any(isinstance(each, LAST) for each in said) == (len(has_ended) == num_members)
    last = said[-1]
    assert len(ended) <= 1
    assert sum(isinstance(each, LAST) for each in said) == 1
    assert isinstance(last, PushDone | RoomLanded) != was_bad
    if isinstance(last, RoomLanded):
        assert last.first_token == 0, "member 0 reports the most"
    if isinstance(last, PushDone):
        assert last.pushed_bytes == 100 * num_members
    assert sum(isinstance(each, RoomLost) for each in said) <= 1
    assert sum(isinstance(each, RoomGranted) for each in said) <= 1


def test_a_room_is_granted_when_all_its_members_are():
    rooms = PushRooms(lambda *_: None)
    rooms.open(ROOM, 2)
    assert rooms.apply(1, RoomGranted(ROOM, 4)) is None
    assert rooms.apply(0, RoomGranted(ROOM, 4)) == RoomGranted(ROOM, 4)


def test_members_added_late_count_from_the_beginning():
    rooms = PushRooms(lambda *_: None)
    rooms.open(ROOM)
    rooms.cancel(ROOM, None)
    rooms.report(0, 2, RoomReleased(ROOM))
    assert list(rooms.events()) == []
    rooms.report(1, 2, PushDone(ROOM, 1))
    assert list(rooms.events()) == [RoomReleased(ROOM)]


@pytest.mark.parametrize(
    "end",
    [
        lambda rooms: rooms.cancel(ROOM, None),
        lambda rooms: rooms.apply(0, RoomReleased(ROOM, error_of(0))),
    ],
)
def test_age_counts_from_the_first_failure_to_the_last_member(end):
    clock = Clock()
    rooms = PushRooms(lambda *_: None, clock=clock)
    rooms.open(ROOM, 2)
    clock.now_s = 10
    assert rooms.ending_s() == 0
    end(rooms)
    clock.now_s = 15
    rooms.cancel(ROOM, None)
    clock.now_s = 17
    assert rooms.ending_s() == 7
    for member in (0, 1):
        rooms.apply(member, RoomReleased(ROOM))
    assert rooms.ending_s() == 0


def test_role_that_cancels_a_failed_room_receives_no_error():
    rooms = PushRooms(lambda *_: None)
    rooms.open(ROOM, 2)
    assert rooms.apply(0, RoomReleased(ROOM, error_of(0))) is None
    rooms.cancel(ROOM, None)
    assert rooms.apply(1, PushDone(ROOM, 1)) == RoomReleased(ROOM)


OTHER = Room(43)


@pytest.fixture
def ended():
    return []


@pytest.fixture
def rooms(ended):
    """Two rooms, of two members each."""
    made = LandRooms(lambda room, error: ended.append((room, error)))
    for room in (ROOM, OTHER):
        made.open(room)
    return made


def test_exception_of_the_role_at_one_event_loses_no_other_event(rooms):
    rooms.report(0, 1, RoomFailed(ROOM, error_of(0)))
    rooms.report(0, 1, RoomFailed(OTHER, error_of(0)))
    assert next(rooms.events()).room == ROOM
    assert [event.room for event in rooms.events()] == [OTHER]


def test_room_cancelled_during_an_earlier_event_reports_only_its_end(rooms, ended):
    rooms.report(0, 1, RoomFailed(ROOM, error_of(0)))
    rooms.report(0, 1, RoomLanded(OTHER, 1, 2, 3))
    events = rooms.events()
    assert next(events).room == ROOM
    rooms.cancel(OTHER, None)
    rooms.cancel(OTHER, None)
    assert list(events) == [RoomSafe(OTHER)]
    rooms.cancel(OTHER, None)  # it is over
    assert ended == [(OTHER, None)]


REPORTS = {
    PushRooms: [RoomGranted(ROOM, 8), PushDone(ROOM, 1), RoomReleased(ROOM), RoomReleased(OTHER)],
    LandRooms: [
        RoomLanded(ROOM, 1, 2, 3),
        RoomFailed(ROOM, error_of(0)),
        RoomLost(ROOM, error_of(0)),
        RoomSafe(ROOM),
    ],
}


@given(st.sampled_from([*REPORTS]), st.data())
def test_invalid_report_neither_raises_nor_ends_a_room_twice(kind, data):
    rooms = kind(lambda *_: None)
    rooms.open(ROOM, 2)
    reports = st.tuples(st.integers(0, 1), st.sampled_from(REPORTS[kind]))
    for member, event in data.draw(st.lists(reports, max_size=8)):
        rooms.report(member, 2, event)
    heard = list(rooms.events())
    assert {event.room for event in heard} <= {ROOM}
    assert sum(isinstance(event, LAST) for event in heard) <= 1


def test_a_member_that_fails_ends_the_others_once(rooms, ended):
    rooms.report(1, 2, RoomLost(ROOM, error_of(1)))
    assert [type(event) for event in rooms.events()] == [RoomLost]
    rooms.report(0, 2, RoomFailed(ROOM, error_of(0)))
    rooms.report(1, 2, RoomSafe(ROOM))
    assert list(rooms.events()) == [RoomSafe(ROOM)]
    [(room, error)] = ended
    assert (room, str(error)) == (ROOM, "of member 1")
