"""What the role receives of a room: in whatever order its members report, what is true of all of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.kvtransfer.events import (
    Failed,
    Granted,
    Landed,
    LandRooms,
    Lost,
    PushDone,
    PushRooms,
    Released,
    Safe,
)
from tandem.wire.errors import PeerLost
from tandem.wire.generation import Room

ROOM = Room(42)
LAST = (PushDone, Released, Landed, Failed, Safe)


def error_of(member):
    return PeerLost(f"of member {member}")


# What one member may report, in order. Whatever it reports after it was told to end is its choice too: the
# news may have crossed with the order.
STORIES = {
    PushRooms: [
        lambda _: [Granted(ROOM, 8), PushDone(ROOM, 100)],
        lambda n: [Granted(ROOM, 8), Released(ROOM, error_of(n))],
        lambda n: [Released(ROOM, error_of(n))],
    ],
    LandRooms: [
        lambda n: [Landed(ROOM, n, 0, 0)],
        lambda n: [Failed(ROOM, error_of(n))],
        lambda n: [Lost(ROOM, error_of(n)), Safe(ROOM)],
        lambda _: [Safe(ROOM)],
    ],
}


@st.composite
def transcripts(draw):
    """Return (fan-in, members, what members and role say, in some order)."""
    kind, num_members = draw(st.sampled_from([PushRooms, LandRooms])), draw(st.integers(1, 3))
    # A room is safe at one member only after it was ended.
    first = [story for story in STORIES[kind] if story(0) != [Safe(ROOM)]]
    is_given_up = draw(st.booleans())
    left = {n: draw(st.sampled_from(STORIES[kind]))(n) for n in range(num_members)}
    if not is_given_up and all(story == [Safe(ROOM)] for story in left.values()):
        left[0] = draw(st.sampled_from(first))(0)
    words = []
    if is_given_up:
        words.append(("role", None))
    while any(left.values()):
        who = draw(st.sampled_from([name for name, story in left.items() if story]))
        words.append((who, left[who].pop(0)))
    return kind, num_members, words


def is_bad(event):
    return not isinstance(event, Granted | PushDone | Landed)


@given(transcripts())
def test_the_last_event_comes_once_when_every_member_has_ended_and_is_the_worst_of_theirs(told):
    kind, num_members, words = told
    said, ended, has_ended, was_bad = [], [], set(), False
    rooms = kind(lambda room, error: ended.append(error))
    rooms.open(ROOM, num_members)
    for who, event in words:
        if who == "role" or (event == Safe(ROOM) and not was_bad):
            # By the role, as in every run in which a part is safe without an error.
            rooms.give_up(ROOM, None)
            was_bad = True
        if who == "role":
            continue
        has_ended |= {who} if isinstance(event, LAST) else set()
        is_turn = is_bad(event) and not was_bad
        was_bad = was_bad or is_bad(event)
        said += [each for each in [rooms.hear(who, event)] if each is not None]
        if is_turn and len(has_ended) < num_members:
            assert str(who) in str(ended[0])
        assert any(isinstance(each, LAST) for each in said) == (len(has_ended) == num_members)
    last = said[-1]
    assert len(ended) <= 1
    assert sum(isinstance(each, LAST) for each in said) == 1
    assert isinstance(last, PushDone | Landed) != was_bad
    if isinstance(last, Landed):
        assert last.first_token == 0, "member 0 reports the most"
    if isinstance(last, PushDone):
        assert last.pushed_bytes == 100 * num_members
    assert sum(isinstance(each, Lost) for each in said) <= 1
    assert sum(isinstance(each, Granted) for each in said) <= 1


def test_a_room_is_granted_when_all_its_members_are():
    rooms = PushRooms(lambda *_: None)
    rooms.open(ROOM, 2)
    assert rooms.hear(1, Granted(ROOM, 4)) is None
    assert rooms.hear(0, Granted(ROOM, 4)) == Granted(ROOM, 4)


def test_members_that_are_known_late_count_from_the_beginning():
    rooms = PushRooms(lambda *_: None)
    rooms.open(ROOM)
    rooms.give_up(ROOM, None)
    rooms.report(0, 2, Released(ROOM))
    assert list(rooms.events()) == []
    rooms.report(1, 2, PushDone(ROOM, 1))
    assert list(rooms.events()) == [Released(ROOM)]


def test_a_role_that_gives_up_a_room_that_failed_hears_no_error():
    rooms = PushRooms(lambda *_: None)
    rooms.open(ROOM, 2)
    assert rooms.hear(0, Released(ROOM, error_of(0))) is None
    rooms.give_up(ROOM, None)
    assert rooms.hear(1, PushDone(ROOM, 1)) == Released(ROOM)


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


def test_an_event_that_a_role_stumbles_over_takes_no_other_with_it(rooms):
    rooms.report(0, 1, Failed(ROOM, error_of(0)))
    rooms.report(0, 1, Failed(OTHER, error_of(0)))
    assert next(rooms.events()).room == ROOM
    assert [event.room for event in rooms.events()] == [OTHER]


def test_a_room_given_up_while_an_earlier_event_is_handled_hears_only_its_end(rooms, ended):
    rooms.report(0, 1, Failed(ROOM, error_of(0)))
    rooms.report(0, 1, Landed(OTHER, 1, 2, 3))
    events = rooms.events()
    assert next(events).room == ROOM
    rooms.give_up(OTHER, None)
    rooms.give_up(OTHER, None)
    assert list(events) == [Safe(OTHER)]
    rooms.give_up(OTHER, None)  # it is over
    assert ended == [(OTHER, None)]


REPORTS = {
    PushRooms: [Granted(ROOM, 8), PushDone(ROOM, 1), Released(ROOM), Released(OTHER)],
    LandRooms: [
        Landed(ROOM, 1, 2, 3),
        Failed(ROOM, error_of(0)),
        Lost(ROOM, error_of(0)),
        Safe(ROOM),
    ],
}


@given(st.sampled_from([*REPORTS]), st.data())
def test_no_report_that_cannot_be_raises_or_ends_a_room_twice(kind, data):
    rooms = kind(lambda *_: None)
    rooms.open(ROOM, 2)
    reports = st.tuples(st.integers(0, 1), st.sampled_from(REPORTS[kind]))
    for member, event in data.draw(st.lists(reports, max_size=8)):
        rooms.report(member, 2, event)
    heard = list(rooms.events())
    assert {event.room for event in heard} <= {ROOM}
    assert sum(isinstance(event, LAST) for event in heard) <= 1


def test_a_member_that_fails_ends_the_others_once(rooms, ended):
    rooms.report(1, 2, Lost(ROOM, error_of(1)))
    assert [type(event) for event in rooms.events()] == [Lost]
    rooms.report(0, 2, Failed(ROOM, error_of(0)))
    rooms.report(1, 2, Safe(ROOM))
    assert list(rooms.events()) == [Safe(ROOM)]
    [(room, error)] = ended
    assert (room, str(error)) == (ROOM, "of member 1")
